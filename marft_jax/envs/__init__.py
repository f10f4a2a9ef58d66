"""Environments: where tasks come from and how a team's answers are graded."""
