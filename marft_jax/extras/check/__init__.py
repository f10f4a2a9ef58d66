"""Tries an environment, and shows the tasks of data, before a run starts."""
