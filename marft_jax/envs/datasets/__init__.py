"""Rows of data sets, from files or the hub, as tasks."""
