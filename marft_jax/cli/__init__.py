"""The edge of every command: files and flags to settings, errors to exit codes."""

from marft_jax.cli.commands import (
    Parser,
    boundary,
    configure,
    configure_run,
    parse,
    parse_run,
    parse_training,
    run_parser,
    split,
)

__all__ = [
    "Parser",
    "boundary",
    "configure",
    "configure_run",
    "parse",
    "parse_run",
    "parse_training",
    "run_parser",
    "split",
]
