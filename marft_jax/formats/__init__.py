"""Files: YAML documents of users, JSON lines of ours, and whatever others wrote."""
