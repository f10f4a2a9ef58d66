"""Tasks of the package reasoning-gym."""
