"""The losses of one microbatch: gradient sums, and the totals that they and the metrics need."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marft_jax.learning import critic as critic_lib
from marft_jax.learning import logprobs, losses
from marft_jax.learning.batch import Array, Rows
from marft_jax.learning.settings import LearnerSettings
from marft_jax.learning.values import Static, values
from marft_jax.models import lora


class Targets(NamedTuple):
    """Numbers that losses read besides the rows, None where the settings do not ask for them."""

    advantages_BX: Array  # of each decision
    returns_BX: Array  # in the values' scale
    values_BX: Array = None  # the critic's, before the update
    features_BXD: Array = None  # what a critic without adapters reads
    reference_BA: Array = None  # log-probs of the base without adapters, for a KL in the loss
    proximal_BA: Array = None  # log-probs of the policy at the start of the update


class Sums(NamedTuple):
    """Totals over a minibatch, to be divided late.

    Per agent: decisions, entropy, approx_kl, clip_fraction, correction weight, tokens,
    logprob_gap. Per adapter: denominators and KL of the update, and the decisions with an
    advantage that counts. Of the critic: its error. Per agent and tensor: how many numbers were not
    finite.
    """

    decisions_P: Array
    entropy_P: Array
    approx_kl_P: Array
    clip_fraction_P: Array
    correction_P: Array
    tokens_P: Array
    logprob_gap_P: Array
    owned_N: Array
    kl_N: Array
    taught_N: Array
    critic_loss: Array
    nonfinite: dict[str, Array]


_WATCHED = ("logprobs", "behaviour logprobs", "advantages")


def zeros(adapters: lora.Adapters, critic: critic_lib.Critic, agents: int) -> tuple[Any, Any, Sums]:
    """The ``gradients`` of no microbatch."""
    per_agent, per_adapter = jnp.zeros(agents), jnp.zeros(lora.shape_of(adapters)[0])
    numbers: dict[str, Any] = dict.fromkeys(Sums._fields, per_agent)
    numbers |= dict.fromkeys(("owned_N", "kl_N", "taught_N"), per_adapter)
    numbers |= {"critic_loss": jnp.zeros(()), "nonfinite": dict.fromkeys(_WATCHED, per_agent)}
    return (*jax.tree.map(jnp.zeros_like, (adapters, critic)), Sums(**numbers))


def gradients(
    static: Static,
    base: Any,
    adapters: lora.Adapters,
    critic: critic_lib.Critic,
    r: Rows,
    t: Targets,
) -> tuple[Any, Any, Sums]:
    """(adapter gradient sums, critic gradient sums, totals) of one microbatch."""
    with jax.named_scope("policy"):
        policy = functools.partial(_policy_loss, static, base, r=r, t=t)
        grad_policy, seen = jax.grad(policy, has_aux=True)(adapters)
    critic_loss, grad_critic = jnp.zeros(()), critic
    if static.settings.critic is not None:
        with jax.named_scope("critic"):
            value = functools.partial(_value_loss, static, base, r=r, t=t)
            critic_loss, grad_critic = jax.value_and_grad(value)(critic)
    adapter_count = lora.shape_of(adapters)[0]
    return grad_policy, grad_critic, _sums(static, seen, r, t, adapter_count, critic_loss)


class _Seen(NamedTuple):
    """Numbers of a policy loss that the metrics read."""

    logprobs_BA: jax.Array
    new_BX: jax.Array
    old_BX: jax.Array
    entropy_BX: jax.Array
    correction_BX: jax.Array


def _policy_loss(
    static: Static, base: Any, adapters: lora.Adapters, *, r: Rows, t: Targets
) -> tuple[jax.Array, _Seen]:
    """Sum over decisions of weight · policy loss − entropy_coef · entropy + kl_coef · KL."""
    settings, algo, level = static.settings, static.settings.algo, static.algorithm.level
    mask_BX, _, _ = logprobs.unit_labels(r, level)
    logprobs_BA, entropy_BA = logprobs.action_logprobs(
        static.graphdef, base, adapters, settings.lora.alpha, r, algo.entropy_coef != 0
    )

    def log_prob(x_BA: jax.Array) -> jax.Array:
        return logprobs.per_unit(x_BA, r, level, r.divisor_BK)

    def mean(x_BA: jax.Array) -> jax.Array:
        return logprobs.per_unit(x_BA, r, level, r.tokens_BK)

    new_BX, old_BX, entropy_BX = log_prob(logprobs_BA), log_prob(r.behaviour_BA), mean(entropy_BA)
    correction_BX = jnp.ones_like(mask_BX)
    if t.proximal_BA is not None:
        behaviour_BX, old_BX = old_BX, log_prob(t.proximal_BA)
        correction_BX = losses.correction_weight(
            old_BX, behaviour_BX, settings.correction, algo.correction_cap
        )
    loss_BX = static.algorithm.policy_loss(algo, new_BX, old_BX, t.advantages_BX) * correction_BX
    loss_BX = loss_BX - algo.entropy_coef * entropy_BX
    if t.reference_BA is not None:
        kl_BA = losses.reference_kl(logprobs_BA, t.reference_BA, algo.estimator)
        loss_BX = loss_BX + algo.kl_coef * mean(kl_BA * r.mask_BA)
    seen = _Seen(logprobs_BA, new_BX, old_BX, entropy_BX, correction_BX)
    return jnp.sum(loss_BX * mask_BX), seen


def _value_loss(
    static: Static, base: Any, critic: critic_lib.Critic, *, r: Rows, t: Targets
) -> jax.Array:
    """Sum over decisions of the critic's error."""
    algo, (mask_BX, _, _) = static.settings.algo, logprobs.unit_labels(r, static.algorithm.level)
    values_BX = values(static, base, critic, r, t.features_BXD)
    error_BX = losses.value_loss(
        values_BX, t.values_BX, t.returns_BX, algo.value_clip, algo.huber_delta
    )
    return jnp.sum(error_BX * mask_BX)


def _sums(
    static: Static, seen: _Seen, r: Rows, t: Targets, adapters: int, critic_loss: jax.Array
) -> Sums:
    """Totals of a microbatch."""
    algo, agents = static.settings.algo, static.agents
    mask_BX, agent_BX, owner_BX = logprobs.unit_labels(r, static.algorithm.level)
    kl_BX = losses.approx_kl(seen.new_BX, seen.old_BX)
    clipped_BX = losses.clip_fraction(seen.new_BX, seen.old_BX, algo.clip, algo.clip_high)

    def by(labels: jax.Array, x: jax.Array, mask: jax.Array, size: int) -> jax.Array:
        return jnp.einsum("bxn,bx->n", jax.nn.one_hot(labels, size), x * mask)

    def by_agent(x_BX: jax.Array) -> jax.Array:
        return by(agent_BX, x_BX, mask_BX, agents)

    def by_owner(x_BX: jax.Array) -> jax.Array:
        return by(owner_BX, x_BX, mask_BX, adapters)

    def by_token(x_BA: jax.Array) -> jax.Array:
        return by(logprobs.token_agents(r), x_BA, r.mask_BA, agents)

    return Sums(
        decisions_P=by_agent(jnp.ones_like(mask_BX)),
        entropy_P=by_agent(seen.entropy_BX),
        approx_kl_P=by_agent(kl_BX),
        clip_fraction_P=by_agent(clipped_BX),
        correction_P=by_agent(seen.correction_BX),
        tokens_P=by_token(jnp.ones_like(r.mask_BA)),
        logprob_gap_P=by_token(jnp.abs(seen.logprobs_BA - r.behaviour_BA)),
        owned_N=by_owner(jnp.ones_like(mask_BX)),
        kl_N=by_owner(kl_BX),
        taught_N=by_owner(t.advantages_BX * seen.correction_BX != 0),
        critic_loss=critic_loss,
        nonfinite={
            "logprobs": by_token(~jnp.isfinite(seen.logprobs_BA)),
            "behaviour logprobs": by_token(~jnp.isfinite(r.behaviour_BA)),
            "advantages": by_agent(~jnp.isfinite(t.advantages_BX)),
        },
    )


def report(sums: Sums, settings: LearnerSettings) -> dict[str, jax.Array]:
    """Means over all minibatches, per agent; the gap is that of the first one. Decisions are those
    behind an optimiser step: their mean, and the fewest."""
    total = jax.tree.map(lambda x: x.sum(0), sums)
    decisions_P = jnp.maximum(total.decisions_P, 1)
    numbers = {
        "decisions": sums.decisions_P.mean(0),
        "decisions_min": sums.decisions_P.min(0),
        "entropy": total.entropy_P / decisions_P,
        "approx_kl": total.approx_kl_P / decisions_P,
        "clip_fraction": total.clip_fraction_P / decisions_P,
        "logprob_gap": sums.logprob_gap_P[0] / jnp.maximum(sums.tokens_P[0], 1),
    }
    if settings.correction != "none":
        numbers["correction_weight"] = total.correction_P / decisions_P
    if settings.critic is not None:
        numbers["critic/loss"] = total.critic_loss / jnp.maximum(total.decisions_P.sum(), 1)
    return numbers
