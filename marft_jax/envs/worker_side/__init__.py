"""What runs in a worker process: the standard library alone, so that it starts at once."""
