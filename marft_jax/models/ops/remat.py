"""The results of the forward pass that the backward pass finds kept; the rest it computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

Remat = Literal["none", "products", "block"]
"""Computed again: nothing, all but the expensive products, or each block from its input."""

_T = TypeVar("_T")

_KEPT = "product"


def keep(x: jax.Array) -> jax.Array:
    """Marks what was expensive to compute: ``products`` keeps it."""
    return checkpoint_name(x, _KEPT)


def once(x: _T) -> _T:
    """Computes this once, and not again in every layer that reads it: XLA takes it for cheap."""
    return jax.lax.optimization_barrier(x)


def rematerialised(
    run: Callable[..., Any],
    setting: Remat,
    static_argnums: int | tuple[int, ...],
    *,
    scanned: bool = False,
) -> Callable[..., Any]:
    """``run``, whose backward pass computes again as set; ``scanned``: in a loop, where XLA cannot
    take what is computed again for what was computed before."""
    if setting == "none":
        return run
    kept = jax.checkpoint_policies.save_only_these_names(_KEPT)
    policy = kept if setting == "products" else None
    return jax.checkpoint(
        run, policy=policy, static_argnums=static_argnums, prevent_cse=not scanned
    )
