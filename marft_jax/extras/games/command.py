"""Flags of ``marft_jax.evaluate`` for games: exploitability, opponents, ratings."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from marft_jax.errors import BadInput
from marft_jax.evaluation.scores import Estimate
from marft_jax.evaluation.tables import folding
from marft_jax.extras.games.ratings import Outcomes
from marft_jax.settings.config import Config


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of games to a parser."""
    parser.add_argument(
        "--exploitability", action="store_true",
        help="exact exploitability in an OpenSpiel game; with --step all, of every checkpoint",
    )  # fmt: skip
    parser.add_argument(
        "--against", nargs="+", default=[], metavar="OPPONENT",
        help="play games against: base, step:N, a run directory, random, perfect, or "
             "package.module:function",
    )  # fmt: skip
    parser.add_argument(
        "--elo", type=int, default=0, metavar="N",
        help="rate N checkpoints of the run by games of each against each, in each seat",
    )  # fmt: skip


def is_wanted(flags: argparse.Namespace) -> bool:
    """Tells if any of the flags is given."""
    return bool(flags.exploitability or flags.against or flags.elo)


def evaluate(flags: argparse.Namespace, config: Config, folder: Path) -> None:
    """Computes what the flags ask for, prints tables, and writes the figures to a folder."""
    console = Console(highlight=False, soft_wrap=True)
    # when used: pulls in JAX
    from marft_jax.extras.games.matches import play_matches, rate_checkpoints
    from marft_jax.extras.games.policies import measure_policies

    if flags.exploitability:
        rows = measure_policies(flags.run, config, flags.step, folder / "exploitability.jsonl")
        console.print(_exploitability_table(rows))
    if flags.against:
        rounds = [(flags.step, flags.against)]
        console.print(_matches_table(play_matches(flags.run, config, rounds, flags.limit, folder)))
    if flags.elo:
        if flags.run is None:
            raise BadInput("--elo: expected --run, the run whose checkpoints are compared")
        ratings = rate_checkpoints(flags.run, config, flags.elo, flags.limit, folder)
        console.print(_ratings_table(ratings))


def _exploitability_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Makes a table with a row for each policy; returns are listed by seat."""
    cells = []
    for row in rows:
        earned = " ".join(f"{value:+.4f}" for value in row["values"])
        others = "" if row["illegal"] is None else f"{row['illegal']:.4f}"
        cells.append([str(row["step"]), f"{row['exploitability']:.4f}", earned, others])
    figures = ["exploitability", "earned, by seat", "mass on other texts"]
    return folding(["step"], figures, cells)


def _ratings_table(ratings: Mapping[int, Estimate]) -> Table:
    """Makes a table with a row for each checkpoint."""
    rows = [[str(s), f"{e.mean:+.0f} ({e.low:+.0f} to {e.high:+.0f})"] for s, e in ratings.items()]
    return folding(["step"], ["Elo (95 %)"], rows)


def _matches_table(matches: Mapping[tuple[str, int, str], Outcomes]) -> Table:
    """Makes a table with a row for each agent and opponent, with 95 % intervals."""
    rows = [
        [agent, opponent, *map(str, (o.games, o.win, o.draw, o.loss)), f"{o.earned.mean:+.4f}"]
        for (agent, _, opponent), o in matches.items()
    ]
    figures = ["games", "won (95 %)", "drawn (95 %)", "lost (95 %)", "earned"]
    return folding(["agent", "against"], figures, rows)
