"""Estimates what a configuration needs on hardware that is not present."""
