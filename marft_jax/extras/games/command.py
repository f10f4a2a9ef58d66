"""Flags of ``marft_jax.evaluate`` for games: exploitability, opponents, ratings."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from marft_jax.config import Config
from marft_jax.errors import BadInput
from marft_jax.extras.games import tables


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--exploitability", action="store_true",
        help="of a game of OpenSpiel, exactly, by enumerating it; --step all: of each checkpoint",
    )  # fmt: skip
    parser.add_argument(
        "--against", nargs="+", default=[], metavar="OPPONENT",
        help="play a game, each agent against: base, step:N, a run directory, random, perfect, "
             "or package.module:function",
    )  # fmt: skip
    parser.add_argument(
        "--elo", type=int, default=0, metavar="N",
        help="rate N checkpoints of the run by games of each against each, in each seat",
    )  # fmt: skip


def is_wanted(own: argparse.Namespace) -> bool:
    """Tells if any of the flags is given."""
    return bool(own.exploitability or own.against or own.elo)


def evaluate(own: argparse.Namespace, config: Config, folder: Path) -> None:
    """Prints the exploitability of a game's policies, and the outcomes against opponents."""
    console = Console(highlight=False, soft_wrap=True)
    # when used: pulls in JAX
    from marft_jax.extras.games.matches import play_matches, rate_checkpoints
    from marft_jax.extras.games.policies import exploit

    if own.exploitability:
        rows = exploit(own.run, config, own.step, folder / "exploitability.jsonl")
        console.print(tables.exploitability(rows))
    if own.against:
        rounds = [(own.step, own.against)]
        found = play_matches(own.run, config, rounds, own.limit, folder)
        console.print(tables.matches(found, console.width))
    if own.elo:
        if own.run is None:
            raise BadInput("--elo: it compares checkpoints of a run; name one with --run")
        found = rate_checkpoints(own.run, config, own.elo, own.limit, folder)
        console.print(tables.ratings(found))
