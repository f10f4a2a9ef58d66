"""Seats of a game: which agent sits where, who must move, and who won."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from marft_jax.errors import BadInput
from marft_jax.types import Turn

_Seat = TypeVar("_Seat")


def take_seats(game: str, seats: Sequence[_Seat], agents: Sequence[str]) -> dict[_Seat, str]:
    """Gives each seat an agent, in order.

    Raises:
        BadInput: there are more or fewer agents than seats.
    """
    if len(agents) != len(seats):
        raise BadInput(
            f"--team.file: {game} has seats for {len(seats)}, expected as many agents, got "
            f"{len(agents)}"
        )
    return dict(zip(seats, agents, strict=True))


def check_movers(turns: Sequence[Turn], acting: Sequence[str]) -> None:
    """Raises ``BadInput`` unless exactly the acting agents have moved."""
    if sorted(turn.name for turn in turns) != sorted(acting):
        raise BadInput("a game says who moves: expected --team.workflow players")


def outcomes(returns: Sequence[float], agents: Mapping[int, str]) -> dict[str, dict[str, Any]]:
    """Lists each agent's seat, its return, and whether that is a win, a draw or a loss.

    Args:
        returns: total reward of each seat.
        agents: the agent at each seat; bots may sit at the others.

    >>> outcomes([1.0, -1.0], {0: "ann"})
    {'ann': {'seat': 0, 'return': 1.0, 'outcome': 'win'}}
    """
    of_agents: dict[str, dict[str, Any]] = {}
    for seat, agent in sorted(agents.items()):
        earned, best = returns[seat], max([*returns[:seat], *returns[seat + 1 :]], default=0.0)
        outcome = "win" if earned > best else "draw" if earned == best else "loss"
        of_agents[agent] = {"seat": seat, "return": float(earned), "outcome": outcome}
    return of_agents
