"""Keys and values of a layer: the cache of the attention mixer, written in place."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

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

    def cut(self, length: int) -> Self:
        """First ``length`` positions."""
        return type(self)(self.k_BGCT[..., :length], self.v_BGTC[..., :length, :])

    def whole(self, length: int) -> KV:
        """First ``length`` positions, each in its place."""
        return self.cut(length)

    def like(self, cache: KV) -> Self:
        """The same with as many heads as ``cache``: each head repeated, groups stay together."""
        times = cache.v_BGTC.shape[-3] // self.v_BGTC.shape[-3]
        return self if times == 1 else type(self)(*(jnp.repeat(x, times, axis=-3) for x in self))

    def turned(self) -> Self:
        """Keys with their channels last, as a TPU wants them in memory, and back: what a scan only
        reads is laid out by its shape."""
        return self._replace(k_BGCT=self.k_BGCT.swapaxes(-1, -2))

    def resumable(self) -> Self:
        """The cache itself: a prompt may start from any position."""
        return self

    def of(self, layer: Array | None) -> Self:
        """One of the stacked layers; None for a layer by itself."""
        return self if layer is None else type(self)(self.k_BGCT[layer], self.v_BGTC[layer])

    def append(self, new: KV, at_BT: Array, layer: Array | None = None) -> Self:
        """Writes new tokens at these positions of their rows; positions past the end are dropped.

        Args:
            layer: which of the stacked layers is written.
        """
        stacked = () if layer is None else (layer,)
        return type(self)(*_append(*self, *new.like(self), at_BT, *stacked))

    def insert(self, new: KV, at_B: Array, lengths_B: Array) -> Self:
        """Writes the first positions of these rows; rows past the end are dropped.

        Args:
            lengths_B: tokens of each row.
        """
        t = new.v_BGTC.shape[-2]
        return type(self)(
            write(self.k_BGCT, jnp.s_[..., at_B, :, :, :t], new.k_BGCT),
            write(self.v_BGTC, jnp.s_[..., at_B, :, :t, :], new.v_BGTC),
        )

    def placed(self, mesh: Mesh) -> Self:
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

        return type(self)(at(self.k_BGCT, keys), at(self.v_BGTC, places))


class Ring(KV):
    """Keys and values of the last positions of each row, for a layer with a window: position p
    stands at p mod T.

    Up to T positions nothing differs from ``KV``, so that a ring which is cut to more positions
    than its rows have is one, too.
    """

    def whole(self, length: int) -> KV:
        """``length`` positions, each in its place; those that have been overwritten hold others."""
        from_T = jnp.arange(length) % self.v_BGTC.shape[-2]
        return KV(jnp.take(self.k_BGCT, from_T, axis=-1), jnp.take(self.v_BGTC, from_T, axis=-2))

    def places(self, at_BT: Array, read: int) -> Array:
        """Where tokens of these positions go; past the end from position ``read`` on."""
        size = self.v_BGTC.shape[-2]
        return jnp.where(at_BT < read, at_BT % size, size)

    def in_window(self, positions_BT: Array, window: int) -> Array:
        """True for places that the last token of a row reads, which has this position."""
        places_11S = jnp.arange(self.v_BGTC.shape[-2])[None, None]
        behind = (positions_BT[..., None] - places_11S) % places_11S.size
        return (behind < window) & (behind <= positions_BT[..., None])

    def insert(self, new: KV, at_B: Array, lengths_B: Array) -> Self:
        """Writes the last positions of these rows."""
        size, last_B1 = self.v_BGTC.shape[-2], lengths_B[:, None] - 1
        if new.v_BGTC.shape[-2] > size:
            from_BT = jnp.maximum(last_B1 - (last_B1 - jnp.arange(size)[None]) % size, 0)
            layers = new.v_BGTC.ndim - 4
            from_BT = jnp.expand_dims(from_BT, [*range(layers), layers + 1, layers + 2])
            k = jnp.take_along_axis(new.k_BGCT, from_BT, axis=-1)
            v = jnp.take_along_axis(new.v_BGTC, jnp.moveaxis(from_BT, -1, -2), axis=-2)
            new = KV(k, v)
        return super().insert(new, at_B, lengths_B)


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
