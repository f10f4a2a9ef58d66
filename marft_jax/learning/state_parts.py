"""Parts of the training state that extras and users add.

A part is a pytree of arrays under its own name in ``TrainState.parts``. It is saved, restored and
rolled back with the rest of the state. ``--run.state_parts package.module:function`` names a part
of a user's: a ``MakeStatePart``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from marft_jax.errors import BadInput
from marft_jax.learning.state import TrainState
from marft_jax.plugins import called, load_extra, load_plugin, shown
from marft_jax.settings.config import Config
from marft_jax.team.prompts import Team
from marft_jax.types import MAIN, Episode


class StatePart(NamedTuple):
    """Two functions that return the part's new value, and the state, whose adapters they may
    change.

    Attributes:
        init: of the state that a run begins with.
        after_step: of the part's value, the state after a step, the episodes that were played in
            the step, and the seeds (of the run, of this attempt at the step).
    """

    init: Callable[[TrainState], tuple[Any, TrainState]]
    after_step: Callable[
        [Any, TrainState, Sequence[Episode], tuple[int, int]], tuple[Any, TrainState]
    ]


MakeStatePart: TypeAlias = Callable[[Config, Team], StatePart]
"""Makes a part for the settings and the team of a run."""


def find_state_parts(config: Config, team: Team) -> dict[str, StatePart]:
    """Makes the parts that the settings name, and those that the team needs, by their names.

    Raises:
        BadInput: two parts have the same name.
    """
    on = zip(team.bases, team.profiles, strict=True)
    bases = dict.fromkeys(base for base, profile in on if profile.past is not None)
    pools: dict[str, MakeStatePart] = {
        "pool" if base == MAIN else f"pool-{base}": functools.partial(
            load_extra("state.pool"), base=base
        )
        for base in bases
    }
    made = dict[str, MakeStatePart]()
    for given in config.run.state_parts:
        make, name = load_plugin(given, "--run.state_parts", ()), given.rpartition(":")[2]
        if name in made or name in pools:
            raise BadInput(
                f"--run.state_parts {given}: expected a function with a name of its own, got "
                f"{name}, which another part of the state has; rename it"
            )
        made[name] = make
    made |= pools
    return {name: called(f"state part {name}", make, config, team) for name, make in made.items()}


def begin(parts: Mapping[str, StatePart], state: TrainState) -> TrainState:
    """Sets each part to its first value."""
    for name, part in parts.items():
        state = _changed(f"state part {name}: init", name, state, part.init, state)
    return state


def after_step(
    parts: Mapping[str, StatePart],
    state: TrainState,
    played: Sequence[Episode],
    seed: tuple[int, int],
) -> TrainState:
    """Moves each part on after a step in which these episodes were played."""
    for name, part in parts.items():
        what, read = f"state part {name}: after_step", (state.parts[name], state, played, seed)
        state = _changed(what, name, state, part.after_step, *read)
    return state


def _changed(
    what: str, name: str, state: TrainState, function: Callable[..., Any], *args: Any
) -> TrainState:
    """Calls a function of a part; what it returns is checked, as a checkpoint must restore it.

    Raises:
        BadInput: it returned something else than (value, state), or a value of another form.
    """
    result = called(what, function, *args)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], TrainState)):
        raise BadInput(f"{what}: expected (value, state), got {shown(result)}")
    (value, changed), forms = result, []
    for tree in (value, state.parts.get(name, value)):
        forms.append(str(jax.tree.map(_form, tree)))
    if forms[0] != forms[1] or "object" in forms[0]:
        wanted = "arrays or numbers" if forms[0] == forms[1] else f"a value like {forms[1]}"
        raise BadInput(f"{what}: expected {wanted:.120}, got {shown(value)}")
    return changed._replace(parts={**changed.parts, name: value})


def _form(x: Any) -> str:
    """Kind and shape of an array."""
    kind = (x if hasattr(x, "dtype") else np.asarray(x)).dtype.kind
    return ("object" if kind in "OUS" else kind) + str(np.shape(x))
