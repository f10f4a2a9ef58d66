"""Tables of exploitabilities, matches and ratings for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from marft_jax.evaluation.scores import Estimate
from marft_jax.evaluation.tables import folding
from marft_jax.extras.games.ratings import Outcomes


def exploitability(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each policy; what players earn is by seat."""
    shown = Table(
        "step", "exploitability", "earned, by seat", "mass on other texts", box=box.SIMPLE
    )
    for row in rows:
        others = "" if row["illegal"] is None else f"{row['illegal']:.4f}"
        earned = " ".join(f"{value:+.4f}" for value in row["values"])
        shown.add_row(str(row["step"]), f"{row['exploitability']:.4f}", earned, others)
    return shown


def ratings(found: Mapping[int, Estimate]) -> Table:
    """A line for each checkpoint."""
    rows = [[str(s), f"{e.mean:+.0f} ({e.low:+.0f} to {e.high:+.0f})"] for s, e in found.items()]
    table = Table("step", "Elo (95 %)", box=box.SIMPLE)
    for row in rows:
        table.add_row(*row)
    return table


def matches(found: Mapping[tuple[str, int, str], Outcomes], width: int) -> Table:
    """A line for each agent and opponent, with 95 % intervals."""
    rows = [
        [
            agent,
            opponent,
            str(o.games),
            str(o.win),
            str(o.draw),
            str(o.loss),
            f"{o.earned.mean:+.4f}",
        ]
        for (agent, _, opponent), o in found.items()
    ]
    figures = ["games", "won (95 %)", "drawn (95 %)", "lost (95 %)", "earned"]
    return folding(["agent", "against"], figures, rows, width)
