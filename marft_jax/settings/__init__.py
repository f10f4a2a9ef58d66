"""What a setting and a section are, and the sections that several rooms read.

Nothing here imports JAX. ``setting.py`` has types, bounds, help and messages; ``config.py`` the
sections of all runs. Environments, algorithms and samplers declare their settings in their rooms.
"""
