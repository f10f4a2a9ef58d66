"""Shows what a team did: one page, offline, from the files of run directories."""

from marft_jax.extras.report.command import main

__all__ = ["main"]
