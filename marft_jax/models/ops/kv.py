"""Keys and values of a layer: the cache of the attention mixer, written in place."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from marft_jax.models.ops.platforms import chosen
from marft_jax.parallel import mesh as mesh_lib

KEYS_IN_MEMORY = {"tpu": (1, 0)}
"""Order in memory of the last two dimensions of keys, by platform. A TPU's products want channels
last, and would copy keys that have their positions last in every chunk of decoding."""


class KV(NamedTuple):
    """Keys and values of B rows, G key-value heads, T positions and C channels.

    The layers may be stacked in front. Keys have their positions last: the scores of a step of
    decoding are a plain product with these keys, which a CPU computes half again as fast as a
    product with their transpose.
    """

    k_BGCT: Array
    v_BGTC: Array

    def cut(self, length: int) -> KV:
        """First ``length`` positions."""
        return KV(self.k_BGCT[..., :length], self.v_BGTC[..., :length, :])

    def like(self, cache: KV) -> KV:
        """The same with as many heads as ``cache``: each head repeated, groups stay together."""
        times = cache.v_BGTC.shape[-3] // self.v_BGTC.shape[-3]
        return self if times == 1 else KV(*(jnp.repeat(x, times, axis=-3) for x in self))

    def resumable(self) -> KV:
        """The cache itself: a prompt may start from any position."""
        return self

    def of(self, layer: Array | None) -> KV:
        """One of the stacked layers; None for a layer by itself."""
        return self if layer is None else KV(self.k_BGCT[layer], self.v_BGTC[layer])

    def append(self, new: KV, at_BT: Array, layer: Array | None = None) -> KV:
        """Writes new tokens at these positions of their rows; positions past the end are dropped.

        Args:
            layer: which of the stacked layers is written.
        """
        stacked = () if layer is None else (layer,)
        return KV(*_append(*self, *new.like(self), at_BT, *stacked))

    def insert(self, new: KV, at_B: Array) -> KV:
        """Writes the first positions of these rows; rows past the end are dropped."""
        t = new.v_BGTC.shape[-2]
        return KV(
            write(self.k_BGCT, jnp.s_[..., at_B, :, :, :t], new.k_BGCT),
            write(self.v_BGTC, jnp.s_[..., at_B, :, :t, :], new.v_BGTC),
        )

    def placed(self, mesh: Mesh) -> KV:
        """Abstract arrays with their places: rows over ``data`` and ``fsdp``, heads over ``tensor``
        where ``tensor`` divides them."""
        *layers, _, heads, _, _ = self.k_BGCT.shape
        split = "tensor" if heads % mesh.shape["tensor"] == 0 else None
        places = NamedSharding(mesh, P(*[None] * len(layers), *mesh_lib.ROWS, split))
        keys: Any = places
        if order := KEYS_IN_MEMORY.get(mesh.devices.flat[0].platform):
            before = len(layers) + 2
            keys = Format(Layout((*range(before), *(before + i for i in order))), places)

        def at(x: Array, place: Any) -> Any:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

        return KV(at(self.k_BGCT, keys), at(self.v_BGTC, places))


def _by_head(
    k: Array, v: Array, new_k: Array, new_v: Array, at_BT: Array, *layer: Array
) -> tuple[Array, Array]:
    """Writes each head by itself: a TPU would rearrange the whole cache to write them together."""
    row_B11, at_B1T = jnp.arange(len(at_BT))[:, None, None], at_BT[:, None]
    head_G1 = jnp.arange(new_v.shape[1])[:, None]
    return (
        write(k, (*layer, row_B11, head_G1, slice(None), at_B1T), new_k.swapaxes(2, 3)),
        write(v, (*layer, row_B11, head_G1, at_B1T), new_v),
    )


def _together(
    k: Array, v: Array, new_k: Array, new_v: Array, at_BT: Array, *layer: Array
) -> tuple[Array, Array]:
    """Writes all heads of a token at once."""
    row_B1, every = jnp.arange(len(at_BT))[:, None], slice(None)
    tokens = new_k.transpose(0, 3, 1, 2), new_v.swapaxes(1, 2)
    return (
        write(k, (*layer, row_B1, every, every, at_BT), tokens[0]),
        write(v, (*layer, row_B1, every, at_BT), tokens[1]),
    )


_append = chosen(_by_head, cpu=_together)


def write(cached: Array, where: tuple[Any, ...], new: Array) -> Array:
    """``cached`` with ``new`` in these places; places past the end are dropped."""
    new = new.astype(cached.dtype)
    put = _put if cached.dtype.itemsize == 4 else _put_16_bits
    return put(cached, new, where=where)


def _put(cached: Array, new: Array, *, where: tuple[Any, ...]) -> Array:
    return cached.at[where].set(new, mode="drop")


def _put_as_integers(cached: Array, new: Array, *, where: tuple[Any, ...]) -> Array:
    """Writes the bits: a CPU would turn the whole cache into float32 and back, and a TPU would copy
    it to write integers."""
    bits = jax.lax.bitcast_convert_type
    return bits(_put(bits(cached, jnp.uint16), bits(new, jnp.uint16), where=where), cached.dtype)


_put_16_bits = chosen(_put, cpu=_put_as_integers)
