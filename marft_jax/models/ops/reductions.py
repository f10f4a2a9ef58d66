"""Sums and maxima along the last axis, many numbers at a time on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from marft_jax.models.ops.platforms import chosen

_FEW, _BLOCK = 32, 256


def log_softmax(x: Array) -> Array:
    """``jax.nn.log_softmax(x)``."""
    below = x - jax.lax.stop_gradient(x.max(axis=-1, keepdims=True))
    return below - jnp.log(total(jnp.exp(below)))[..., None]


def fold(x: Array, merge: Callable[[Array, Array], Array]) -> Array:
    """Merges the two halves of the last axis while it is long: XLA's own sum along it on a CPU
    waits for each number before it takes the next."""
    while x.shape[-1] > _FEW and x.shape[-1] % 2 == 0:
        half = x.shape[-1] // 2
        x = merge(x[..., :half], x[..., half:])
    return x


def _sum(x: Array) -> Array:
    return x.sum(-1)


def _folded_sum(x: Array) -> Array:
    return fold(x, jnp.add).sum(-1)


total = chosen(_sum, cpu=_folded_sum)
"""``x.sum(-1)``."""


def argmax(x_BV: Array) -> Array:
    """Each row's ``argmax``: of the best block, then within it, as a CPU is slow at it."""
    blocks_BNX = in_blocks(x_BV, -jnp.inf)
    block_B = jnp.argmax(blocks_BNX.max(-1), axis=-1)
    best_BX = jnp.take_along_axis(blocks_BNX, block_B[:, None, None], axis=1)[:, 0]
    return block_B * _BLOCK + jnp.argmax(best_BX, axis=-1)


def in_blocks(x_BV: Array, fill: float) -> Array:
    """The vocabulary in blocks of equal length, the last filled up."""
    b, v = x_BV.shape
    padded = jnp.pad(x_BV, ((0, 0), (0, -v % _BLOCK)), constant_values=fill)
    return padded.reshape(b, -1, _BLOCK)
