"""Players without a model: for seats of their own, for demonstrations, and to measure against."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

from marft_jax.extras.games.tree import Node, after
from marft_jax.plugins import load_function

Bot = Callable[[Any, int, random.Random], Any]
"""(state, player, source of chance) to an action."""


def uniform(state: Node, player: int, rng: random.Random) -> int:
    """Any legal action, all alike."""
    return rng.choice(list(state.legal_actions(player)))


def perfect(state: Node, player: int, rng: random.Random) -> int:
    """An action of the most value where both play perfectly: two players, moves in turn, nothing
    hidden, rewards that add up to 0. Of several one at random."""
    sign = 1 if player == 0 else -1
    values = {a: sign * _worth(after(state, a)) for a in state.legal_actions(player)}
    best = max(values.values())
    return rng.choice([action for action, worth in values.items() if worth == best])


_known: dict[str, float] = {}


def _worth(state: Any) -> float:
    """Value for the first player, under minimax."""
    if state.is_terminal():
        return state.returns()[0]
    key = f"{type(state).__name__} {state.get_game()}\n{state.current_player()}\n{state}"
    if key not in _known:
        first = state.current_player() == 0
        values = (_worth(after(state, action)) for action in state.legal_actions())
        _known[key] = max(values) if first else min(values)
    return _known[key]


BOTS: dict[str, Bot] = {"random": uniform, "perfect": perfect}


@functools.cache
def find_bot(name: str) -> Bot:
    """Finds a player of the table, or your ``f(state, player, rng) -> action``.

    Raises:
        BadInput: there is none.
    """
    return load_function(name, "--env.bots", BOTS)
