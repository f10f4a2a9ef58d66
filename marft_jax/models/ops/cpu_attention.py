"""Attention of whole rows on CPUs: a few queries at a time, and a backward pass of its own.

Fewer scores are computed to be masked out, and the backward pass has the context and one number per
query to start from, so that it computes each score once (Dao et al. 2022, FlashAttention, appendix
B.2):

    P = exp(S - L),  dV = P' dO,  dS = P * (dO V' - rowsum(dO * O)),  dQ = dS K,  dK = dS' Q.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from marft_jax.models.ops.attention import KV, Attention, Scores, attention, masks, scaled
from marft_jax.models.ops.reductions import fold, total
from marft_jax.models.ops.remat import keep

_PIECES, _LEAST = 8, 128  # of the queries of a row: how many, and the fewest in one


class _Reads(NamedTuple):
    """log(1) = 0 where a query of a piece reads a key, log(0) = -inf elsewhere."""

    log_BTS: Array
    log_BST: Array


def causal_attention_in_pieces(
    until_BT: Array, positions_BT: Array | None = None, window: int = 0
) -> Attention:
    """``attention.causal_attention``."""
    pieces = [masks(until_BT, positions_BT, window, *at) for at in _pieces(until_BT.shape[1])]
    reads = jax.tree.map(_reads, pieces)
    return lambda q_BHTC, kv, slides=False: _in_pieces(q_BHTC, kv, [x.of(slides) for x in reads])


def attention_by_rule(
    until_BT: Array, positions_BT: Array | None = None, window: int = 0
) -> Attention:
    """``attention.causal_attention``, also with a rule for scores, on every platform: of the
    scores, those of one piece are in memory at a time, and the backward pass computes them
    again."""
    pieces = [*_pieces(until_BT.shape[1])]
    by_kind = [masks(until_BT, positions_BT, window, *at) for at in pieces]

    def attend(q_BHTC: Array, kv: KV, slides: bool | Array = False, *rule: Scores) -> Array:
        @jax.checkpoint
        def context(q_BHTC: Array, kv: KV, mask_BTS: Array) -> Array:
            return attention(q_BHTC, kv, mask_BTS, *rule)

        contexts = [
            context(q_BHTC[:, :, start:end], kv.cut(end), kind.of(slides))
            for (start, end), kind in zip(pieces, by_kind, strict=True)
        ]
        return keep(jnp.concatenate(contexts, axis=2))

    return attend


def _reads(mask_BTS: Array) -> _Reads:
    """As logarithms: the sum with the scores is what ``where`` would choose, and XLA takes them
    for too expensive to compute in every layer anew, unlike comparisons."""
    log_BTS = jnp.log(mask_BTS.astype(jnp.float32))
    return _Reads(log_BTS, log_BTS.swapaxes(1, 2))


@jax.custom_vjp
def _in_pieces(q_BHTC: Array, kv: KV, reads: list[_Reads]) -> Array:
    return _forward(q_BHTC, kv, reads)[0]


def _forward(q_BHTC: Array, kv: KV, reads: list[_Reads]) -> tuple[Array, Any]:
    """The context, and what the backward pass reads."""
    pieces = [
        _attend(q_BHTC[:, :, start:end], kv.cut(end), read.log_BTS)
        for (start, end), read in zip(_pieces(q_BHTC.shape[2]), reads, strict=True)
    ]
    context = keep(jnp.concatenate([context for context, _ in pieces], axis=2))
    return context, (q_BHTC, kv, reads, context, [keep(log_total) for _, log_total in pieces])


def _backward(forward: Any, d_context: Array) -> tuple[Array, KV, None]:
    """Cotangents of queries, keys and values; the last argument has none."""
    q_BHTC, kv, reads, context, log_totals = forward
    t, queries = q_BHTC.shape[2], []
    d_k = d_v = jnp.zeros_like(kv.v_BGTC)
    for (start, end), read, log_total in zip(_pieces(t), reads, log_totals, strict=True):
        here = (slice(None), slice(None), slice(start, end))
        d_q, *added = _differentiate(
            q_BHTC[here], kv.cut(end), read.log_BST, context[here], log_total, d_context[here]
        )
        queries.append(d_q)
        d_k, d_v = (
            x + jnp.pad(more, ((0, 0), (0, 0), (0, t - end), (0, 0)))
            for x, more in zip((d_k, d_v), added, strict=True)
        )
    return jnp.concatenate(queries, axis=2), KV(d_k.swapaxes(2, 3), d_v), None


_in_pieces.defvjp(_forward, _backward)


def _attend(q_BHTC: Array, kv: KV, log_BTS: Array) -> tuple[Array, Array]:
    """The context of some queries, and the logarithm of the sum of each one's exp(scores)."""
    b, h, t, c = q_BHTC.shape
    g = kv.v_BGTC.shape[1]
    scores = _scores(q_BHTC, kv, log_BTS)
    top = fold(scores, jnp.maximum).max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    mass = total(weights)[..., None]
    rows = weights.astype(kv.v_BGTC.dtype).reshape(b, g, -1, weights.shape[-1])
    context = _product("bgqs,bgsc->bgqc", rows, kv.v_BGTC).reshape(b, g, -1, t, c) / mass
    return context.reshape(b, h, t, c).astype(q_BHTC.dtype), top + jnp.log(mass)


def _differentiate(
    q_BHTC: Array,
    kv: KV,
    log_BST: Array,
    context: Array,
    log_total: Array,
    d_context: Array,
) -> tuple[Array, Array, Array]:
    """Cotangents of some queries, and ``[B, G, S, C]`` of the keys and values that they read.

    The scores stand here with their keys first: then no product has to turn them round.
    """
    b, h, t, c = q_BHTC.shape
    g, s = kv.v_BGTC.shape[1:3]
    dtype, grouped, d_rows = (
        q_BHTC.dtype, scaled(q_BHTC).reshape(b, g, -1, c), d_context.reshape(b, g, -1, c)
    )  # fmt: skip

    def per_query(x_BHT1: Array) -> Array:
        return x_BHT1.reshape(b, g, 1, h // g, t)

    def over_queries(x_BGSX: Array) -> Array:
        return x_BGSX.reshape(b, g, s, h // g, t)

    scores = over_queries(_product("bgsc,bgqc->bgsq", kv.k_BGCT.swapaxes(2, 3), grouped))
    weights = jnp.exp(scores + log_BST[:, None, :, None] - per_query(log_total))
    d_weights = over_queries(_product("bgsc,bgqc->bgsq", kv.v_BGTC, d_rows))
    lost = total(d_context.astype(jnp.float32) * context)
    d_scores = (weights * (d_weights - per_query(lost))).astype(dtype).reshape(b, g, s, -1)
    weights = weights.astype(dtype).reshape(b, g, s, -1)
    d_q = _product("bgcs,bgsq->bgcq", kv.k_BGCT, d_scores).swapaxes(2, 3) * c**-0.5
    d_k = _product("bgsq,bgqc->bgsc", d_scores, grouped)
    d_v = _product("bgsq,bgqc->bgsc", weights, d_rows)
    return d_q.reshape(q_BHTC.shape).astype(dtype), d_k.astype(dtype), d_v.astype(dtype)


def _scores(q_BHTC: Array, kv: KV, log_BTS: Array) -> Array:
    b, h, t, c = q_BHTC.shape
    g = kv.k_BGCT.shape[1]
    grouped = scaled(q_BHTC).reshape(b, g, -1, c)
    scores = _product("bgqc,bgcs->bgqs", grouped, kv.k_BGCT).reshape(b, g, h // g, t, -1)
    return scores + log_BTS[:, None, None]


def _product(spec: str, x: Array, y: Array) -> Array:
    """In float32.

    The barrier keeps XLA from turning a product of bfloat16 into one that it cannot run.
    """
    z = jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)
    return z if x.dtype == jnp.float32 else jax.lax.optimization_barrier(z)


def _pieces(t: int) -> Iterator[tuple[int, int]]:
    """(start, end) of each piece of T queries."""
    length = max(_LEAST, -(-t // (_PIECES * _LEAST)) * _LEAST)
    return ((start, min(start + length, t)) for start in range(0, t, length))
