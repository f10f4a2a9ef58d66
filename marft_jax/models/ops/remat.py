"""What the backward pass finds kept of the forward pass, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
from jax.ad_checkpoint import checkpoint_name

Remat = Literal["none", "products", "block"]
"""What is computed again: nothing, all but the costly products, or each block from its input."""

_KEPT = "product"


def keep(x):
    """Marks what was costly to compute: ``products`` keeps it."""
    return checkpoint_name(x, _KEPT)


def once(x):
    """Computes this once, and not again in every layer that reads it: XLA takes it for cheap."""
    return jax.lax.optimization_barrier(x)


def rematerialised(
    run: Callable, setting: Remat, static_argnums: int | tuple[int, ...]
) -> Callable:
    """``run``, whose backward pass computes again what the setting says."""
    if setting == "none":
        return run
    kept = jax.checkpoint_policies.save_only_these_names(_KEPT)
    policy = kept if setting == "products" else None
    return jax.checkpoint(run, policy=policy, static_argnums=static_argnums)
