"""Layout of the state in checkpoints of earlier releases, which knew one base only."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from marft_jax.learning.state import PolicyState, TrainState
from marft_jax.types import MAIN


class FlatState(NamedTuple):
    """``TrainState`` as earlier releases saved it; each field is a tree of that state."""

    step: Any
    adapters: Any
    adapters_opt: Any
    critic: Any
    critic_opt: Any
    baseline: Any
    lr_scale: Any
    progress: Any
    values_scale: Any
    reference: Any = ()
    past: Any = ()
    pool: Any = ()


def is_flat(arrays: Collection[str]) -> bool:
    """True for the paths of a ``FlatState``."""
    return any(path.startswith(".adapters[") for path in arrays)


def flatten(state: TrainState) -> FlatState:
    """Lays a state out as in a checkpoint of an earlier release."""
    return FlatState(
        **{k: v for k, v in state._asdict().items() if k in FlatState._fields}
        | state.policies[MAIN]._asdict()
        | {
            "critic": state.critic[MAIN],
            "critic_opt": state.critic_opt[MAIN],
            "pool": state.parts.get("pool", ()),
            "past": tuple(v._replace(adapters=v.adapters[MAIN]) for v in state.past),
        }
    )


def unflatten(flat: FlatState, fresh: TrainState) -> TrainState:
    """Returns the state of a checkpoint; what it lacks is as in ``fresh``."""
    return fresh._replace(
        **{k: v for k, v in flat._asdict().items() if k in TrainState._fields}
        | {
            "policies": {MAIN: PolicyState(flat.adapters, flat.adapters_opt, flat.reference)},
            "critic": {MAIN: flat.critic},
            "critic_opt": {MAIN: flat.critic_opt},
            "parts": {"pool": flat.pool} if flat.pool else {},
            "past": tuple(v._replace(adapters={MAIN: v.adapters}) for v in flat.past),
        }
    )
