"""What a configuration would need on hardware that is not there."""
