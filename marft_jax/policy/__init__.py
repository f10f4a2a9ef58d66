"""A base with its adapters: data, and the verbs that read them and learn from them.

It knows token sequences of adapters, and neither teams nor episodes.
"""

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

__all__ = [
    "LOSSES", "Adapter", "Datum", "Packed", "Policy", "adam", "add", "drop", "forward",
    "forward_backward", "fresh", "load", "on_base", "open_policy", "optim_step", "pack", "save",
    "take", "top",
]  # fmt: skip
