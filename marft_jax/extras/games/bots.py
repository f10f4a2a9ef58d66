"""Players without a model: bots in a game, teachers for demonstrations, opponents in matches."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

from marft_jax.extras.games.tree import after
from marft_jax.plugins import load_function

Bot = Callable[[Any, int, random.Random], Any]
"""Maps (state, player, random generator) to an action."""


def uniform(state: Any, player: int, rng: random.Random) -> int:
    """Chooses among the legal actions with equal probability."""
    return rng.choice(list(state.legal_actions(player)))


def perfect(state: Any, player: int, rng: random.Random) -> int:
    """Chooses a minimax action, at random among equally good actions.

    For games of two players with moves in turn, perfect information and zero sum.
    """
    sign = 1 if player == 0 else -1
    values = {a: sign * _worth(after(state, a)) for a in state.legal_actions(player)}
    best = max(values.values())
    return rng.choice([action for action, worth in values.items() if worth == best])


_known: dict[str, float] = {}


def _worth(state: Any) -> float:
    """Returns the minimax value for the first player."""
    if state.is_terminal():
        return state.returns()[0]
    key = f"{type(state).__name__} {state.get_game()}\n{state.current_player()}\n{state}"
    if key not in _known:
        best = max if state.current_player() == 0 else min
        _known[key] = best(_worth(after(state, action)) for action in state.legal_actions())
    return _known[key]


BOTS: dict[str, Bot] = {"random": uniform, "perfect": perfect}


@functools.cache
def find_bot(name: str) -> Bot:
    """Finds a bot of the table, or the function that ``package.module:function`` names.

    Raises:
        BadInput: there is no such bot.
    """
    return load_function(name, "--env.bots", BOTS)
