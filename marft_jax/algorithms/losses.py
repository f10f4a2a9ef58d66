"""Policy and value losses per unit of decision; sums and denominators are taken by the caller.

A unit is an action (APPO) or a token (TPPO). Returning one number per unit lets unequal
microbatches, and the agents inside one, be weighed exactly.
"""

from __future__ import annotations

import jax.numpy as jnp


def clipped_policy_loss(logprobs, old_logprobs, advantages, clip: float):
    """max(−ratio·A, −clip(ratio, 1 ± ε)·A) with ratio = exp(logprobs − old_logprobs).

    Ratios are capped at e^20: one that overflows has the gradient 0 * inf even where it is clipped.
    Source: PPO, Schulman et al. 2017, equation 7.
    """
    ratio = jnp.exp(jnp.minimum(logprobs - old_logprobs, 20.0))
    clipped = jnp.clip(ratio, 1 - clip, 1 + clip)
    return jnp.maximum(-ratio * advantages, -clipped * advantages)


def clip_fraction(logprobs, old_logprobs, clip: float):
    """1 where the ratio lies outside 1 ± ε."""
    return (jnp.abs(jnp.exp(logprobs - old_logprobs) - 1) > clip).astype(jnp.float32)


def approx_kl(logprobs, old_logprobs):
    """(ratio − 1) − log ratio, the k3 estimate of KL(old ‖ new) (Schulman 2020)."""
    log_ratio = logprobs - old_logprobs
    return jnp.expm1(log_ratio) - log_ratio


def value_loss(values, old_values, returns, clip: float, huber_delta: float | None):
    """max(error(V), error(V_old + clip(V − V_old, ±ε))): Huber, or half the square.

    Huber is e²/2 for |e| ≤ δ and δ·(|e| − δ/2) beyond, on both sides.
    """
    near = old_values + jnp.clip(values - old_values, -clip, clip)

    def error(prediction):
        e = returns - prediction
        if huber_delta is None:
            return jnp.square(e) / 2
        size = jnp.abs(e)
        return jnp.where(
            size <= huber_delta, jnp.square(e) / 2, huber_delta * (size - huber_delta / 2)
        )

    return jnp.maximum(error(values), error(near))
