"""Teachers for supervised starts: `--env.teacher configs.games.teachers:slipping`."""

from __future__ import annotations

import random
import zlib
from typing import Any

from marft_jax.extras.games.bots import perfect, uniform


def slipping(state: Any, player: int, rng: random.Random) -> int:
    """Plays perfectly, but for one move in four: so that what follows a mistake is seen as well."""
    return (uniform if rng.random() < 0.25 else perfect)(state, player, rng)


def scattered(state: Any, player: int, rng: random.Random) -> int:
    """Plays by a policy that was drawn at random for each information state: whoever learns it
    tells the states apart, and prefers nothing in particular."""
    own = random.Random(zlib.crc32(state.information_state_string(player).encode()))
    actions = list(state.legal_actions(player))
    return rng.choices(actions, [own.expovariate(1.0) for _ in actions])[0]
