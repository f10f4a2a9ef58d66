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


def is_wanted(own: argparse.Namespace) -> bool:
    """Tells if any of the flags is given."""
    return bool(own.exploitability or own.against or own.elo)


def evaluate(own: argparse.Namespace, config: Config, folder: Path) -> None:
    """Computes what the flags ask for, prints tables, and writes the figures to a folder."""
    console = Console(highlight=False, soft_wrap=True)
    # when used: pulls in JAX
    from marft_jax.extras.games.matches import play_matches, rate_checkpoints
    from marft_jax.extras.games.policies import measure_policies

    if own.exploitability:
        rows = measure_policies(own.run, config, own.step, folder / "exploitability.jsonl")
        console.print(exploitability_table(rows))
    if own.against:
        rounds = [(own.step, own.against)]
        found = play_matches(own.run, config, rounds, own.limit, folder)
        console.print(matches_table(found))
    if own.elo:
        if own.run is None:
            raise BadInput("--elo: expected --run, the run whose checkpoints are compared")
        found = rate_checkpoints(own.run, config, own.elo, own.limit, folder)
        console.print(ratings_table(found))


def exploitability_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Makes a table with a row for each policy; returns are listed by seat."""
    cells = [
        [
            str(row["step"]),
            f"{row['exploitability']:.4f}",
            " ".join(f"{value:+.4f}" for value in row["values"]),
            "" if row["illegal"] is None else f"{row['illegal']:.4f}",
        ]
        for row in rows
    ]
    figures = ["exploitability", "earned, by seat", "mass on other texts"]
    return folding(["step"], figures, cells)


def ratings_table(found: Mapping[int, Estimate]) -> Table:
    """Makes a table with a row for each checkpoint."""
    rows = [[str(s), f"{e.mean:+.0f} ({e.low:+.0f} to {e.high:+.0f})"] for s, e in found.items()]
    return folding(["step"], ["Elo (95 %)"], rows)


def matches_table(found: Mapping[tuple[str, int, str], Outcomes]) -> Table:
    """Makes a table with a row for each agent and opponent, with 95 % intervals."""
    rows = [
        [agent, opponent, *map(str, (o.games, o.win, o.draw, o.loss)), f"{o.earned.mean:+.4f}"]
        for (agent, _, opponent), o in found.items()
    ]
    figures = ["games", "won (95 %)", "drawn (95 %)", "lost (95 %)", "earned"]
    return folding(["agent", "against"], figures, rows)
