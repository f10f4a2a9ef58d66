"""Estimates of what a configuration needs on hardware that is not there."""
