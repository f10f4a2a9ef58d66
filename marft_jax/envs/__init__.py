"""Environments: where tasks come from and how a team's answers are graded.

``base`` defines an environment and opens one by name.
Nothing is imported here, so that the worker processes of graders start at once.
"""
