"""New keys and values written in place into a cache, in each platform's form."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from marft_jax.models.ops.attention import KV
from marft_jax.models.ops.platforms import chosen

KEYS_IN_MEMORY = {"tpu": (1, 0)}
"""The order in memory of the last two dimensions of keys: a TPU's products want channels last, and
would copy keys that have their positions there in every chunk of decoding."""


def append(cached: KV, new: KV, at_BT: Array, layer: Array | None = None) -> KV:
    """``cached`` with new tokens at these positions of their rows; none past the end.

    Args:
        layer: of the stacked layers of ``cached`` the one that is written.
    """
    stacked = () if layer is None else (layer,)
    return KV(*_append(*cached, *new, at_BT, *stacked))


def _by_head(
    k: Array, v: Array, new_k: Array, new_v: Array, at_BT: Array, *layer: Array
) -> tuple[Array, Array]:
    """Each head by itself: a TPU would rearrange the whole cache to write them together."""
    row_B11, at_B1T = jnp.arange(len(at_BT))[:, None, None], at_BT[:, None]
    head_G1 = jnp.arange(new_v.shape[1])[:, None]
    return (
        write(k, (*layer, row_B11, head_G1, slice(None), at_B1T), new_k.swapaxes(2, 3)),
        write(v, (*layer, row_B11, head_G1, at_B1T), new_v),
    )


def _together(
    k: Array, v: Array, new_k: Array, new_v: Array, at_BT: Array, *layer: Array
) -> tuple[Array, Array]:
    """All heads of a token at once."""
    row_B1, every = jnp.arange(len(at_BT))[:, None], slice(None)
    tokens = new_k.transpose(0, 3, 1, 2), new_v.swapaxes(1, 2)
    return (
        write(k, (*layer, row_B1, every, every, at_BT), tokens[0]),
        write(v, (*layer, row_B1, every, at_BT), tokens[1]),
    )


_append = chosen(_by_head, cpu=_together)


def write(cached: Array, where: tuple[Any, ...], new: Array) -> Array:
    """``cached`` with ``new`` in these places; what lies past the end is dropped."""
    new = new.astype(cached.dtype)
    put = _put if cached.dtype.itemsize == 4 else _put_16_bits
    return put(cached, new, where=where)


def _put(cached: Array, new: Array, *, where: tuple[Any, ...]) -> Array:
    return cached.at[where].set(new, mode="drop")


def _put_as_integers(cached: Array, new: Array, *, where: tuple[Any, ...]) -> Array:
    """A CPU would turn the whole cache into float32 and back. A TPU would copy it for this."""
    bits = jax.lax.bitcast_convert_type
    return bits(_put(bits(cached, jnp.uint16), bits(new, jnp.uint16), where=where), cached.dtype)


_put_16_bits = chosen(_put, cpu=_put_as_integers)
