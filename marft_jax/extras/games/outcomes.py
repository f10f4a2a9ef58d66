"""Who won a game, for the transcript and its evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def outcomes(returns: Sequence[float], agents: Mapping[int, str]) -> dict[str, dict[str, Any]]:
    """Each agent's seat, what it earned in all, and whether that was a win, a draw or a loss.

    Args:
        returns: of each seat.
        agents: who sits where; others may sit in the seats that are left.

    >>> outcomes([1.0, -1.0], {0: "ann"})
    {'ann': {'seat': 0, 'return': 1.0, 'outcome': 'win'}}
    """
    found: dict[str, dict[str, Any]] = {}
    for seat, agent in sorted(agents.items()):
        own, best = returns[seat], max([*returns[:seat], *returns[seat + 1 :]], default=0.0)
        outcome = "win" if own > best else "draw" if own == best else "loss"
        found[agent] = {"seat": seat, "return": float(own), "outcome": outcome}
    return found
