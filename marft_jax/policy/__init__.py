"""A base with its adapters: data, and the verbs that read them and learn from them.

It knows token sequences of adapters, and neither teams nor episodes. All of it is loaded when it is
first used, as it needs JAX.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from marft_jax.policy.adapters import Adapter, add, drop, fresh, load, save, take
    from marft_jax.policy.data import Datum
    from marft_jax.policy.objective import LOSSES
    from marft_jax.policy.optimiser import adam
    from marft_jax.policy.policy import (
        Packed,
        Policy,
        forward,
        forward_backward,
        on_base,
        open_policy,
        optim_step,
        pack,
        top,
    )

_HOMES = {
    "adapters": ("Adapter", "add", "drop", "fresh", "load", "save", "take"),
    "data": ("Datum",),
    "objective": ("LOSSES",),
    "optimiser": ("adam",),
    "policy": (
        "Packed", "Policy", "forward", "forward_backward", "on_base", "open_policy", "optim_step",
        "pack", "top",
    ),
}  # fmt: skip
__all__ = [
    "LOSSES", "Adapter", "Datum", "Packed", "Policy", "adam", "add", "drop", "forward",
    "forward_backward", "fresh", "load", "on_base", "open_policy", "optim_step", "pack", "save",
    "take", "top",
]  # fmt: skip


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"marft_jax.policy.{home}"), name)
    raise AttributeError(f"module 'marft_jax.policy' has no attribute {name!r}")
