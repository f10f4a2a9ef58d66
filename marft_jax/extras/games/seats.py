"""Agents at the seats of a game."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

from marft_jax.errors import BadInput
from marft_jax.types import Turn

_Seat = TypeVar("_Seat", bound=Hashable)


def take_seats(game: str, seats: Sequence[_Seat], agents: Sequence[str]) -> dict[_Seat, str]:
    """Gives each seat an agent, in order; raises ``BadInput`` where they are not as many."""
    if len(agents) != len(seats):
        raise BadInput(
            f"--team.file: {game} has seats for {len(seats)}, expected as many agents, got "
            f"{len(agents)}"
        )
    return dict(zip(seats, agents, strict=True))


def seat_of(agent: str, seated: dict[_Seat, str]) -> _Seat:
    """Finds the seat of an agent."""
    return next(seat for seat, name in seated.items() if name == agent)


def check_movers(turns: Sequence[Turn], acting: Sequence[str]) -> None:
    """Raises ``BadInput`` where others moved than the game said."""
    if sorted(turn.name for turn in turns) != sorted(acting):
        raise BadInput("a game says who moves: expected --team.workflow players")
