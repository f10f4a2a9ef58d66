"""Policy and value losses per decision; sums and denominators are taken by the caller.

A decision is an action (appo, gspo, reinforce) or a token (tppo, grpo, cispo). There is one number
for each decision, so that microbatches of unlike sizes, and the agents in them, have exact weights.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_MOST = 20.0  # cap of log ratios: a ratio that overflows has the gradient 0 * inf = NaN if clipped


def clipped_policy_loss(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    low: jax.Array | float,
    high: jax.Array | float,
    dual_clip: float | None = None,
) -> jax.Array:
    """max(−ratio·A, −clip(ratio, low, high)·A) with ratio = exp(logprobs − old_logprobs).

    With ``dual_clip`` c, negative advantages lose no more than −c·A. Sources: PPO, Schulman et al.
    2017, equation 7; dual clip: Ye et al. 2020, equation 5.
    """
    unclipped = ratio(logprobs, old_logprobs)
    loss = jnp.maximum(-unclipped * advantages, -jnp.clip(unclipped, low, high) * advantages)
    if dual_clip is None:
        return loss
    return jnp.where(advantages < 0, jnp.minimum(loss, -dual_clip * advantages), loss)


def ratio(logprobs: jax.Array, old_logprobs: jax.Array) -> jax.Array:
    """exp(logprobs − old_logprobs)."""
    return jnp.exp(jnp.minimum(logprobs - old_logprobs, _MOST))


def cispo(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    low: jax.Array | float,
    high: jax.Array | float,
) -> jax.Array:
    """−clip(ratio, low, high)·A·log π, no gradient through the ratio (CISPO)."""
    clipped = jnp.clip(ratio(logprobs, old_logprobs), low, high)
    return -jax.lax.stop_gradient(clipped) * advantages * logprobs


def clip_fraction(
    logprobs: jax.Array, old_logprobs: jax.Array, low: float, high: float
) -> jax.Array:
    """1 where the ratio lies outside low to high."""
    change = jnp.expm1(logprobs - old_logprobs)
    return ((change < low - 1) | (change > high - 1)).astype(jnp.float32)


def approx_kl(logprobs: jax.Array, old_logprobs: jax.Array) -> jax.Array:
    """(ratio − 1) − log ratio, the k3 estimate of KL(old ‖ new) (Schulman 2020)."""
    log_ratio = logprobs - old_logprobs
    return jnp.expm1(log_ratio) - log_ratio


def reference_kl(logprobs: jax.Array, reference_logprobs: jax.Array, estimator: str) -> jax.Array:
    """An estimate of KL(policy ‖ reference) from tokens of the policy (Schulman 2020).

    With x = logprobs − reference: k1 = x, k2 = x²/2, k3 = exp(−x) − 1 + x.
    """
    x = logprobs - reference_logprobs
    if estimator == "k1":
        return x
    return jnp.square(x) / 2 if estimator == "k2" else jnp.expm1(jnp.minimum(-x, _MOST)) + x


def correction_weight(
    logprobs: jax.Array, behaviour_logprobs: jax.Array, kind: str, cap: float, floor: float = 0.0
) -> jax.Array:
    """w = exp(logprobs − behaviour), the weight of samples from another policy.

    ``decoupled``: 0 where w > cap; ``truncated``: min(w, cap). Both: 0 where w < floor. Sources:
    decoupled PPO, Hilton et al. 2021, as in AReaL; truncated importance sampling, Ionides 2008;
    decoupled with a floor: IcePop (arXiv 2510.18855).
    """
    weight = jnp.exp(jnp.minimum(logprobs - behaviour_logprobs, _MOST))
    weight = jnp.where(weight > cap, 0.0 if kind == "decoupled" else cap, weight)
    return jnp.where(weight < floor, 0.0, weight) if floor else weight


def value_loss(
    values: jax.Array,
    old_values: jax.Array,
    returns: jax.Array,
    clip: float,
    huber_delta: float | None,
) -> jax.Array:
    """max(error(V), error(V_old + clip(V − V_old, ±ε))): Huber, or half the square.

    Huber is e²/2 for |e| ≤ δ and δ·(|e| − δ/2) beyond, on both sides.
    """
    near = old_values + jnp.clip(values - old_values, -clip, clip)

    def error(prediction: jax.Array) -> jax.Array:
        e = returns - prediction
        if huber_delta is None:
            return jnp.square(e) / 2
        size = jnp.abs(e)
        return jnp.where(
            size <= huber_delta, jnp.square(e) / 2, huber_delta * (size - huber_delta / 2)
        )

    return jnp.maximum(error(values), error(near))
