"""Drawing tokens: temperature, then top-k, top-p and min-p, as per-row arrays.

Each filter acts on what the one before it has kept, in the order of transformers: top-p counts
shares of the probability that top-k has left.

The behaviour log-prob of a token is its log-prob under the policy at the row's temperature, among
the tokens that choices or a form allow, filters or not: that is what the learner can compute again,
so that the ratio of the first update is exactly 1. Greedy rows report it at temperature 1.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from marft_jax.engine.kv_cache import SlotSampling
from marft_jax.models.ops.reductions import argmax, in_blocks, total


def scaled_logprobs(logits: Array, temperature: Array) -> Array:
    """log softmax(logits / temperature) in float32; temperature 0 counts as 1.

    Args:
        logits: ``[..., V]``.
        temperature: broadcast over ``[...]``.
    """
    divisor = jnp.where(temperature > 0, temperature, 1.0)[..., None]
    return jax.nn.log_softmax(logits.astype(jnp.float32) / divisor, axis=-1)


def sample(
    logits_BV: Array,
    keys_B2: Array,
    counts_B: Array,
    settings: SlotSampling,
    allowed_BV: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Draws one token per row.

    Args:
        keys_B2: each row's PRNG key data.
        counts_B: how many tokens the row has sampled; folded into its key.
        allowed_BV: the policy's tokens; by default all.

    Returns:
        (ids_B, logprobs_B, kept_B): the tokens, their behaviour log-probs, and the probability,
        among all tokens, of those that are allowed and that the filters let through. Filters change
        no log-prob.
    """
    logprobs_BV = scaled_logprobs(logits_BV, settings.temperature)
    share_B: Array | float = 1.0
    if allowed_BV is not None:
        logits_BV, logprobs_BV = (
            jnp.where(allowed_BV, x, -jnp.inf) for x in (logits_BV, logprobs_BV)
        )
        share_B = jax.nn.logsumexp(logprobs_BV, axis=-1)
        share_B = jnp.where(allowed_BV.all(-1), 0.0, share_B)  # a row without a mask is as alone
        logprobs_BV, share_B = logprobs_BV - share_B[:, None], jnp.exp(share_B)
    filtered = (settings.top_p < 1) | (settings.top_k > 0) | (settings.min_p > 0)
    weights_BV, kept_B = jax.lax.cond(
        jnp.any(filtered), functools.partial(_filtered, settings=settings), _whole, logprobs_BV
    )
    drawn_B = _draw(weights_BV, jax.vmap(_uniform)(keys_B2, counts_B))
    ids_B = jnp.where(settings.temperature > 0, drawn_B, argmax(logits_BV))
    return ids_B, jnp.take_along_axis(logprobs_BV, ids_B[:, None], axis=-1)[:, 0], kept_B * share_B


def _whole(logprobs_BV: Array) -> tuple[Array, Array]:
    return jnp.exp(logprobs_BV), jnp.ones(len(logprobs_BV))


def _filtered(logprobs_BV: Array, settings: SlotSampling) -> tuple[Array, Array]:
    kept_BV = _kept(logprobs_BV, settings)
    weights_BV = jnp.exp(logprobs_BV) * kept_BV
    # a row without filters is as alone, whatever the rounding of its sum
    return weights_BV, jnp.where(kept_BV.all(-1), 1.0, total(weights_BV))


def _uniform(key_2: Array, count: Array) -> Array:
    return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key_2), count))


def _kept(logprobs_BV: Array, settings: SlotSampling) -> Array:
    """True for tokens that pass every filter; the likeliest token always does.

    top-k and top-p keep what is at least as likely as some threshold. It is found by bisection over
    the bit patterns of the probabilities, which are ordered as the numbers are: 31 sums over the
    vocabulary are exact, and on a CPU many times faster than sorting it.
    """
    p_BV = jnp.exp(logprobs_BV)
    bits_BV = jax.lax.bitcast_convert_type(p_BV, jnp.int32)
    floor_k = _floor(bits_BV, jnp.ones_like(bits_BV), settings.top_k, settings.top_k > 0)
    left_B = total(jnp.where(bits_BV >= floor_k[:, None], p_BV, 0))
    floor_p = _floor(bits_BV, p_BV, settings.top_p * left_B, settings.top_p < 1)
    floor_min = settings.min_p[:, None] * jnp.max(p_BV, axis=-1, keepdims=True)
    return (bits_BV >= jnp.maximum(floor_k, floor_p)[:, None]) & (p_BV >= floor_min)


def _floor(bits_BV: Array, amounts_BV: Array, enough_B: Array, wanted_B: Array) -> Array:
    """Greatest number such that entries at least as great amount to enough, ``int32 [B]``.

    It is 0 where none is wanted; nothing is searched where no row wants one.
    """

    def bisect(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low_B, high_B = bounds  # at low it is enough, at high too little
        middle_B = low_B + (high_B - low_B) // 2
        enough = total(jnp.where(bits_BV >= middle_B[:, None], amounts_BV, 0)) >= enough_B
        return jnp.where(enough, middle_B, low_B), jnp.where(enough, high_B, middle_B)

    high_B = jnp.max(bits_BV, axis=-1) + 1
    steps = jnp.where(jnp.any(wanted_B), 31, 0)
    floor_B, _ = jax.lax.fori_loop(0, steps, bisect, (jnp.zeros_like(high_B), high_B))
    return jnp.where(wanted_B, floor_B, 0)


def _draw(weights_BV: Array, uniform_B: Array) -> Array:
    """Inverse-CDF sampling: one random number per row, not one per vocabulary entry.

    Two levels (which block, which entry) keep the running sums short. A uniform number below
    1 - 2^-23 times a float32 total is strictly below that total, so an entry is always found, and
    never one of weight zero.
    """
    blocks_BNX = in_blocks(weights_BV, 0.0)
    block_B, inside_B = _invert(blocks_BNX.sum(-1), uniform_B)
    chosen_BX = jnp.take_along_axis(blocks_BNX, block_B[:, None, None], axis=1)[:, 0]
    entry_B, _ = _invert(chosen_BX, inside_B)
    return block_B * blocks_BNX.shape[-1] + entry_B


def _invert(weights_BX: Array, uniform_B: Array) -> tuple[Array, Array]:
    """First index whose running sum exceeds uniform * total, and where in that entry it fell.

    Only entries with a weight count: a sum computed in parallel may grow, by rounding, where
    nothing is added.
    """
    sums_BX = jnp.where(weights_BX > 0, jnp.cumsum(weights_BX, axis=-1), 0)
    point_B = uniform_B * sums_BX.max(-1)
    index_B = jnp.argmax(sums_BX > point_B[:, None], axis=-1)
    weight_B, end_B = (
        jnp.take_along_axis(x_BX, index_B[:, None], axis=-1)[:, 0] for x_BX in (weights_BX, sums_BX)
    )
    inside_B = 1 - (end_B - point_B) / jnp.maximum(weight_B, 1e-30)
    return index_B, jnp.clip(inside_B, 0, 1 - 2**-23)
