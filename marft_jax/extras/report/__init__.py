"""Builds one offline HTML page about runs, from the files of their directories."""

from marft_jax.extras.report.command import main

__all__ = ["main"]
