"""Recurrent state of a layer: what a mixer knows after one token, instead of keys and values."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from marft_jax.models.ops.kv import write
from marft_jax.parallel import mesh as mesh_lib

CHUNK = 64
"""Tokens of a chunk; a prompt's snapshot lies at the beginning of its last chunk."""


class Snapshot(NamedTuple):
    """``inputs`` and ``memory`` of a state at an earlier position of each row, ``position_B``."""

    inputs: Array
    memory: Array | None
    position_B: Array


class MixerState(NamedTuple):
    """MixerState of B rows after the last token of each, a ``LayerCache`` without positions.

    The layers may be stacked in front.

    Attributes:
        inputs: ``[B, K - 1, width]``, the last inputs of a convolution over K tokens.
        memory: float32 ``[B, heads, key channels, value channels]`` of a delta net.
        snapshot: where prompts may start that begin like the row's prompt.
    """

    inputs: Array
    memory: Array | None = None
    snapshot: Snapshot | None = None

    def at(self, start_B: Array | None) -> MixerState:
        """The state at these positions: the snapshot where it is of that position, else the
        present state."""
        if self.snapshot is None or start_B is None:
            return self
        *then, position_B = self.snapshot
        there_B = position_B == start_B

        def choose(old: Array, new: Array) -> Array:
            return jnp.where(jnp.expand_dims(there_B, [*range(1, old.ndim)]), old, new)

        return MixerState(*jax.tree.map(choose, tuple(then), (self.inputs, self.memory)))

    def of(self, layer: Array | None) -> MixerState:
        """One of the stacked layers; None for a layer by itself."""
        return self if layer is None else jax.tree.map(lambda x: x[layer], self)

    def put(self, new: MixerState, layer: Array | None) -> MixerState:
        """Writes the state of a layer; the snapshot stays as it is where ``new`` has none."""
        old = self if new.snapshot is not None else self._replace(snapshot=None)
        if layer is not None:
            new = jax.tree.map(lambda x, y: x.at[layer].set(y.astype(x.dtype)), old, new)
        return new if new.snapshot is not None else new._replace(snapshot=self.snapshot)

    def cut(self, length: int) -> MixerState:
        """The whole state: it has no positions."""
        return self

    def whole(self, length: int) -> MixerState:
        """The state itself."""
        return self

    def like(self, cache: MixerState) -> MixerState:
        """The state with a snapshot where the cache has one."""
        return self if cache.snapshot is not None else self._replace(snapshot=None)

    def resumable(self) -> MixerState:
        """The empty cache with room for snapshots."""
        positions_B = jnp.zeros(self.inputs.shape[:-2], jnp.int32)
        return self._replace(snapshot=Snapshot(self.inputs, self.memory, positions_B))

    def insert(self, new: MixerState, at_B: Array, lengths_B: Array) -> MixerState:
        """Writes the state of these rows; rows past the end are dropped."""
        where = (*[slice(None)] * (self.inputs.ndim - 3), at_B)
        return jax.tree.map(lambda state, x: write(state, where, x), self, new)

    def placed(self, mesh: Mesh) -> MixerState:
        """Abstract arrays with their places: rows over ``data`` and ``fsdp``, heads over
        ``tensor`` where ``tensor`` divides them."""

        layers = self.inputs.ndim - 3

        def at(x: Array) -> jax.ShapeDtypeStruct:
            split = x.ndim == layers + 4 and x.shape[-3] % mesh.shape["tensor"] == 0
            spec = P(*[None] * layers, *mesh_lib.ROWS, *["tensor"] * split)
            where = NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

        return jax.tree.map(at, self)


def tokens_before(until_BT: Array) -> Array:
    """Index of the token before the first one of each chunk in its own sequence, ``[B, N]``; -1
    where it is the first of its sequence.

    Where this is not the token beside it, the sequence goes on from a prefix that another has too;
    such a prefix ends with a chunk.
    """
    at_T = np.arange(until_BT.shape[1])
    earlier_NT = at_T[None] < at_T[::CHUNK, None]
    reads_BNT = earlier_NT[None] & (until_BT[:, None] >= at_T[None, ::CHUNK, None])
    return jnp.where(reads_BNT, at_T[None, None], -1).max(-1)


def causal_convolution(
    x_BTX: Array,
    filter_XK: Array,
    before: Array | None,
    until_BT: Array,
    before_BN: Array | None = None,
) -> tuple[Array, Array]:
    """y_t = Σ_i filter_(K-1-i) · x_(t-i) per channel, over the K last tokens of t's sequence;
    summed in float32.

    Args:
        before: the K - 1 inputs before the first token, ``[B, K - 1, X]``; None for zeros.
        until_BT, before_BN: as of ``Reading``; a token reads no token of another sequence.

    Returns:
        y_BTX, and all inputs, ``[B, K - 1 + T, X]``, for ``inputs_before``.
    """
    (b, t, width), n = x_BTX.shape, filter_XK.shape[1] - 1
    before = jnp.zeros((b, n, width), x_BTX.dtype) if before is None else before
    x = jnp.concatenate([before.astype(x_BTX.dtype), x_BTX], axis=1)
    until = jnp.pad(until_BT, ((0, 0), (n, 0)), constant_values=t)
    weights = filter_XK.astype(jnp.float32)[None, None]
    y = x_BTX * weights[..., n]
    for i in range(1, n + 1):
        at = slice(n - i, n - i + t)
        reads = until[:, at] >= jnp.arange(t)[None]
        y += jnp.where(reads[..., None], x[:, at], 0) * weights[..., n - i]
    if before_BN is not None and n:
        y += _from_prefixes(x_BTX, weights, before_BN)
    return y.astype(x.dtype), x


def _from_prefixes(x_BTX: Array, weights: Array, before_BN: Array) -> Array:
    """What the first tokens of chunks read of prefixes that do not stand beside them."""
    (b, t, width), n = x_BTX.shape, weights.shape[-1] - 1
    chunks = before_BN.shape[1]
    apart_BN = (before_BN >= 0) & (before_BN != jnp.arange(chunks)[None] * CHUNK - 1)
    places_BNK = before_BN[..., None] - np.arange(n)[None, None, ::-1]
    flat = jnp.maximum(places_BNK, 0).reshape(b, -1, 1)
    inputs = jnp.take_along_axis(x_BTX, flat, axis=1).reshape(b, chunks, n, width)
    inputs = jnp.where(apart_BN[..., None, None], inputs, 0)
    padded = jnp.pad(inputs, ((0, 0), (0, 0), (0, n - 1), (0, 0)))  # then zeros: read as they are
    first = sum(padded[:, :, i : i + n] * weights[:, :, None, :, i] for i in range(n))
    rest = jnp.pad(first, ((0, 0), (0, 0), (0, CHUNK - n), (0, 0)))
    return rest.reshape(b, -1, width)[:, :t]


def inputs_before(x_BTX: Array, index_B: Array, count: int) -> Array:
    """The ``count`` inputs of a convolution before these indices of a pass."""
    places_BK = index_B[:, None] + jnp.arange(count)[None]
    return jnp.take_along_axis(x_BTX, places_BK[..., None], axis=1)
