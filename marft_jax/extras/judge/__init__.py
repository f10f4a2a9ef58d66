"""Rewards from a judge: an agent of the team, or a model behind an address."""
