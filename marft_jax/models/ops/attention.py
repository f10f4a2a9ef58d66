"""Attention of queries over keys and values: the reference that every platform's form equals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from marft_jax.models.ops.kv import KV


class Layer(NamedTuple):
    """The layer that is running.

    Attributes:
        number: index where layers are stacked; None for a layer by itself.
        slides: true where attention reads through a window.
        rope: number of the rotary table. Both are traced where scanned layers of a place differ.
    """

    number: Array | None = None
    slides: bool | Array = False
    rope: int | Array = 0


class Scores(NamedTuple):
    """What becomes of scores before and in their softmax.

    Attributes:
        cap: c of c tanh(scores / c), for all of them; 0 for none.
        sinks_H: a score of each query head that has a share of the softmax and no value.
    """

    cap: float = 0.0
    sinks_H: Array | None = None


class PerLayerKind(NamedTuple):
    """A value for layers that read every earlier position, and one for layers that slide.

    ``sliding`` is None where both kinds have the same value.
    """

    full: Any
    sliding: Any = None

    def of(self, slides: bool | Array) -> Any:
        """The value for a layer."""
        if self.sliding is None or slides is False:
            return self.full
        if slides is True:
            return self.sliding
        return jax.tree.map(lambda a, b: jnp.where(slides, a, b), self.sliding, self.full)


Attention = Callable[..., Array]
"""(queries, keys and values, ``Layer.slides``) to context; with a rule for scores if the form is
``causal_attention``."""

CausalAttention = Callable[[Array, Array, int], Attention]
"""Attention of some rows, in every layer; arguments as of ``masks``."""


def scaled(q_BHTC: Array) -> Array:
    """q / √C, so that scores need no further scaling."""
    return (q_BHTC.astype(jnp.float32) * q_BHTC.shape[-1] ** -0.5).astype(q_BHTC.dtype)


def attention(q_BHTC: Array, kv: KV, mask_BTS: Array, rule: Scores | None = None) -> Array:
    """softmax(q kᵀ / √C) v with grouped key-value heads; scores and softmax in float32.

    Args:
        q_BHTC: queries, H a multiple of the key-value heads G.
        kv: keys and values of S positions.
        mask_BTS: true where query t may read position s.
        rule: None for scores as they are.
    """
    rule = rule or Scores()
    b, h, t, c = q_BHTC.shape
    g = kv.k_BGCT.shape[1]
    grouped = q_BHTC.reshape(b, g, (h // g) * t, c)
    scores = jnp.einsum(
        "bgqc,bgcs->bgqs", grouped, kv.k_BGCT, preferred_element_type=jnp.float32
    ).reshape(b, g, h // g, t, -1)
    scores = soft_cap(scores * c**-0.5, rule.cap)
    scores = jnp.where(mask_BTS[:, None, None], scores, -1e30)
    weights = _softmax(scores, rule.sinks_H).astype(kv.v_BGTC.dtype)
    context = jnp.einsum(
        "bgqs,bgsc->bgqc",
        weights.reshape(b, g, -1, weights.shape[-1]),
        kv.v_BGTC,
        preferred_element_type=jnp.float32,
    )
    return context.reshape(b, h, t, c).astype(q_BHTC.dtype)


def soft_cap(x: Array, cap: float) -> Array:
    """cap · tanh(x / cap); 0 for none (Gemma 2's report, section 2)."""
    return cap * jnp.tanh(x / cap) if cap else x


def _softmax(scores_BGHTS: Array, sinks_H: Array | None) -> Array:
    if sinks_H is None:
        return jax.nn.softmax(scores_BGHTS, axis=-1)
    sinks = sinks_H.astype(jnp.float32).reshape(1, *scores_BGHTS.shape[1:3], 1, 1)
    top = jnp.maximum(scores_BGHTS.max(-1, keepdims=True), sinks)
    weights = jnp.exp(scores_BGHTS - top)
    return weights / (weights.sum(-1, keepdims=True) + jnp.exp(sinks - top))


def causal_attention(
    until_BT: Array, positions_BT: Array | None = None, window: int = 0
) -> Attention:
    """Attention of whole rows, through ``masks``."""
    by_kind = masks(until_BT, positions_BT, window)
    return lambda q_BHTC, kv, slides=False, *rule: attention(q_BHTC, kv, by_kind.of(slides), *rule)


def masks(
    until_BT: Array,
    positions_BT: Array | None = None,
    window: int = 0,
    start: int = 0,
    end: int | None = None,
) -> PerLayerKind:
    """Which keys up to ``end`` the queries from ``start`` to ``end`` read, ``[B, t, s]``.

    Args:
        until_BT: as of ``reading``.
        positions_BT: position of each token within its sequence. Where sequences share a prefix,
            neighbours in a sequence stand apart in the row.
        window: positions that layers that slide read, the query's own included; 0 for all.
    """
    full = reading(until_BT, start, end)
    if not window:
        return PerLayerKind(full)
    assert positions_BT is not None
    return PerLayerKind(
        full, full & in_window(positions_BT[:, start:end], positions_BT[:, :end], window)
    )


def in_window(queries_BT: Array, keys_BS: Array, window: int) -> Array:
    """True where a key's position lies less than ``window`` before the query's, ``[B, T, S]``."""
    return queries_BT[:, :, None] - keys_BS[:, None] < window


def reading(until_BT: Array, start: int = 0, end: int | None = None) -> Array:
    """True where a query from ``start`` to ``end`` reads a key up to there, ``[B, t, s]``.

    Query t reads key s where s <= t <= ``until_BT[s]``. All tokens of a sequence have the same
    ``until``, so that sequences of a row stay apart; a shared prefix has a later one.
    """
    queries = jnp.arange(until_BT.shape[1])[None, start:end, None]
    return jnp.tril(queries <= until_BT[:, None, :end], start)
