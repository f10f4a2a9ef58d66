"""Players without a model: for seats of their own, for demonstrations, and to measure against."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

from marft_jax.envs.games.tree import Node
from marft_jax.errors import BadInput
from marft_jax.plugins import load_plugin

Bot = Callable[[Any, int, random.Random], int]
"""(state, player, source of chance) to an action."""


def uniform(state: Node, player: int, rng: random.Random) -> int:
    """Any legal action, all alike."""
    return rng.choice(list(state.legal_actions(player)))


def perfect(state: Node, player: int, rng: random.Random) -> int:
    """An action of the most value where both play perfectly: two players, moves in turn, nothing
    hidden, rewards that add up to 0. Of several one at random."""
    values = {a: value(state.clone(), a, player) for a in state.legal_actions(player)}
    best = max(values.values())
    return rng.choice([action for action, worth in values.items() if worth == best])


def value(state: Any, action: int, player: int) -> float:
    """Returns what the action is worth to a player; ``state`` is used up."""
    state.apply_action(action)
    return _worth(state) * (1 if player == 0 else -1)


_known: dict[str, float] = {}


def _worth(state: Any) -> float:
    """Value for the first player, under minimax."""
    if state.is_terminal():
        return state.returns()[0]
    key = f"{type(state).__name__} {state.get_game()}\n{state.current_player()}\n{state}"
    if key not in _known:
        first = state.current_player() == 0
        values = (_worth(state.child(action)) for action in state.legal_actions())
        _known[key] = max(values) if first else min(values)
    return _known[key]


BOTS: dict[str, Bot] = {"random": uniform, "perfect": perfect}


@functools.cache
def find_bot(name: str) -> Bot:
    """Finds a player of the table, or your ``f(state, player, rng) -> action``.

    Raises:
        BadInput: there is none.
    """
    if name in BOTS:
        return BOTS[name]
    found: Bot = load_plugin(name, "--env.bots", BOTS)
    if not callable(found):
        raise BadInput(f"--env.bots: {name!r} is no function; name one")
    return found
