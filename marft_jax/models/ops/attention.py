"""Attention of queries over keys and values: what every model here reads its context with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class KV(NamedTuple):
    """Keys and values of one layer, of B rows, G key-value heads, T positions and C channels.

    Keys have their positions last: the scores of a step of decoding are a plain product with them,
    which a CPU takes half again as fast as one with their transpose.
    """

    k_BGCT: Array
    v_BGTC: Array

    def cut(self, length: int) -> KV:
        """The first ``length`` positions, of one layer or of several stacked in front."""
        return KV(self.k_BGCT[..., :length], self.v_BGTC[..., :length, :])

    def spread(self, heads: int) -> KV:
        """Each head as often as gives so many: those of a group stay together."""
        times = heads // self.v_BGTC.shape[-3]
        return self if times == 1 else KV(*(jnp.repeat(x, times, axis=-3) for x in self))

    def of(self, layer: Array | None) -> KV:
        """One of the layers that are stacked in front; None for a layer by itself."""
        return self if layer is None else KV(self.k_BGCT[layer], self.v_BGTC[layer])


Cache = list[KV] | KV
"""Keys and values of every layer: one by one, or stacked in front."""


class Layer(NamedTuple):
    """Which layer attends.

    Attributes:
        number: of layers that are stacked; None for a layer by itself.
        slides: it reads through a window. A scan knows it while it runs only.
    """

    number: Array | None = None
    slides: bool | Array = False


class Either(NamedTuple):
    """What layers compute with that read everything, and those that slide; None for the same."""

    full: Any
    sliding: Any = None

    def of(self, slides: bool | Array) -> Any:
        """The one for a layer."""
        if self.sliding is None or slides is False:
            return self.full
        if slides is True:
            return self.sliding
        return jax.tree.map(lambda a, b: jnp.where(slides, a, b), self.sliding, self.full)


Attention = Callable[[Array, KV, bool | Array], Array]
"""(queries, keys and values, ``Layer.slides``) to context."""

CausalAttention = Callable[[Array, Array, int], Attention]
"""The attention of some rows in every layer; arguments as of ``masks``."""


def scaled(q_BHTC: Array) -> Array:
    """q / √C: queries whose scores need no scaling any more."""
    return (q_BHTC.astype(jnp.float32) * q_BHTC.shape[-1] ** -0.5).astype(q_BHTC.dtype)


def attention(q_BHTC: Array, kv: KV, mask_BTS: Array) -> Array:
    """softmax(q kᵀ / √C) v with grouped key-value heads; scores and softmax in float32.

    Args:
        q_BHTC: queries, H a multiple of the key-value heads G.
        kv: keys and values of S positions.
        mask_BTS: true where query t may read position s.
    """
    b, h, t, c = q_BHTC.shape
    g = kv.k_BGCT.shape[1]
    grouped = q_BHTC.reshape(b, g, (h // g) * t, c)
    scores = jnp.einsum(
        "bgqc,bgcs->bgqs", grouped, kv.k_BGCT, preferred_element_type=jnp.float32
    ).reshape(b, g, h // g, t, -1)
    scores = jnp.where(mask_BTS[:, None, None], scores * c**-0.5, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(kv.v_BGTC.dtype)
    context = jnp.einsum(
        "bgqs,bgsc->bgqc",
        weights.reshape(b, g, -1, weights.shape[-1]),
        kv.v_BGTC,
        preferred_element_type=jnp.float32,
    )
    return context.reshape(b, h, t, c).astype(q_BHTC.dtype)


def causal_attention(
    until_BT: Array, positions_BT: Array | None = None, window: int = 0
) -> Attention:
    """Attention of whole rows, as ``masks`` says."""
    either = masks(until_BT, positions_BT, window)
    return lambda q_BHTC, kv, slides=False: attention(q_BHTC, kv, either.of(slides))


def masks(
    until_BT: Array,
    positions_BT: Array | None = None,
    window: int = 0,
    start: int = 0,
    end: int | None = None,
) -> Either:
    """What queries from ``start`` to ``end`` read of the keys up to there, ``[B, t, s]``.

    Args:
        until_BT: as of ``reading``.
        positions_BT: of each token within its sequence; where a prefix is shared, tokens that are
            neighbours in a sequence stand apart in the row.
        window: how many positions layers that slide read, the query's own included; 0 for all.
    """
    full = reading(until_BT, start, end)
    if not window:
        return Either(full)
    assert positions_BT is not None
    return Either(full, full & in_window(positions_BT[:, start:end], positions_BT[:, :end], window))


def in_window(queries_BT: Array, keys_BS: Array, window: int) -> Array:
    """True where a key's position lies less than ``window`` before the query's, ``[B, T, S]``."""
    return queries_BT[:, :, None] - keys_BS[:, None] < window


def reading(until_BT: Array, start: int = 0, end: int | None = None) -> Array:
    """True where a query from ``start`` to ``end`` reads a key up to there, ``[B, t, s]``.

    A position is read by those after it and itself, ``until_BT`` at the latest. With one end for
    all of a sequence, sequences of a row are kept apart; with a later one for a common prefix, they
    share it.
    """
    queries = jnp.arange(until_BT.shape[1])[None, start:end, None]
    return jnp.tril(queries <= until_BT[:, None, :end], start)
