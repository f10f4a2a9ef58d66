"""Run directories in object storage."""
