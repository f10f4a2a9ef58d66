"""The losses of one microbatch: gradient sums, and the totals that they and the metrics need."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marft_jax.learning import critic as critic_lib
from marft_jax.learning import logprobs, losses
from marft_jax.learning.algorithms import Algorithm
from marft_jax.learning.values import trunk_features
from marft_jax.models import lora


class Targets(NamedTuple):
    """What the losses of a microbatch read besides its rows; X is K at the action level, A at the
    token level. What the settings do not ask for is None.

    Attributes:
        advantages_BX, returns_BX: of each decision.
        values_BX: the critic's, before the update.
        features_BXD: what a critic without adapters reads.
        reference_BA: log-probs of the base without adapters, for a KL in the loss.
        proximal_BA: log-probs of the policy at the start of the update.
    """

    advantages_BX: Any
    returns_BX: Any
    values_BX: Any = None
    features_BXD: Any = None
    reference_BA: Any = None
    proximal_BA: Any = None


class Sums(NamedTuple):
    """Totals over a minibatch, to be divided late.

    Per agent: decisions, entropy, approx_kl, clip_fraction, correction weight, tokens,
    logprob_gap. Per adapter: denominators and KL of the update, and the decisions with an
    advantage that counts. Of the critic: its error. Per agent and tensor: how many numbers were not
    finite.
    """

    decisions_X: Any
    entropy_X: Any
    approx_kl_X: Any
    clip_fraction_X: Any
    correction_X: Any
    tokens_X: Any
    logprob_gap_X: Any
    owned_N: Any
    kl_N: Any
    taught_N: Any
    critic_loss: Any
    nonfinite: dict[str, Any]


_WATCHED = ("logprobs", "behaviour logprobs", "advantages")


def zeros(adapters, critic, agents: int) -> tuple[Any, Any, Sums]:
    """What ``gradients`` gives for nothing."""
    per_agent, per_adapter = jnp.zeros(agents), jnp.zeros(lora.shape_of(adapters)[0])
    sums = Sums(*[per_agent] * len(Sums._fields))  # pyright: ignore[reportArgumentType]
    sums = sums._replace(**dict.fromkeys(("owned_N", "kl_N", "taught_N"), per_adapter))
    sums = sums._replace(critic_loss=jnp.zeros(()), nonfinite=dict.fromkeys(_WATCHED, per_agent))
    return jax.tree.map(jnp.zeros_like, adapters), jax.tree.map(jnp.zeros_like, critic), sums


def gradients(
    adapters,
    critic: critic_lib.Critic,
    r,
    p: Targets,
    *,
    graphdef,
    config,
    algorithm: Algorithm,
    agents: int,
    base,
) -> tuple[Any, Any, Sums]:
    """(adapter gradient sums, critic gradient sums, totals) of one microbatch."""
    setting = dict(graphdef=graphdef, config=config, algorithm=algorithm, base=base)
    with jax.named_scope("policy"):
        grad_policy, seen = jax.grad(_policy_loss, has_aux=True)(adapters, r, p, **setting)
    critic_loss, grad_critic = jnp.zeros(()), critic
    if config.critic.mode != "none":
        with jax.named_scope("critic"):
            critic_loss, grad_critic = jax.value_and_grad(_value_loss)(critic, r, p, **setting)
    n = lora.shape_of(adapters)[0]
    return grad_policy, grad_critic, _sums(seen, r, p, config, algorithm, agents, n, critic_loss)


class _Seen(NamedTuple):
    """What the metrics read of a policy loss."""

    logprobs_BA: Any
    new_BX: Any
    old_BX: Any
    entropy_BX: Any
    correction_BX: Any


def _policy_loss(adapters, r, p: Targets, *, graphdef, config, algorithm: Algorithm, base):
    """Sum over decisions of weight · policy loss − entropy_coef · entropy + kl_coef · KL."""
    algo, level = config.algo, algorithm.level
    mask_BX, _, _ = logprobs.unit_labels(r, level)
    logprobs_BA, entropy_BA = logprobs.action_logprobs(
        graphdef, base, adapters, config.lora.alpha, r, entropy_learns=algo.entropy_coef != 0
    )

    def log_prob(x_BA):
        return logprobs.per_unit(x_BA, r, level, r.divisor_UBK)

    def mean(x_BA):
        return logprobs.per_unit(x_BA, r, level, r.tokens_UBK)

    new_BX, old_BX, entropy_BX = log_prob(logprobs_BA), log_prob(r.behaviour_UBA), mean(entropy_BA)
    correction_BX = jnp.ones_like(mask_BX)
    if p.proximal_BA is not None:
        behaviour_BX, old_BX = old_BX, log_prob(p.proximal_BA)
        correction_BX = losses.correction_weight(
            old_BX, behaviour_BX, algo.correction, algo.correction_cap
        )
    assert algo.entropy_coef != "auto"  # settled
    loss_BX = algorithm.policy_loss(algo, new_BX, old_BX, p.advantages_BX) * correction_BX
    loss_BX = loss_BX - algo.entropy_coef * entropy_BX
    if p.reference_BA is not None:
        kl_BA = losses.reference_kl(logprobs_BA, p.reference_BA, algo.kl_estimator)
        loss_BX = loss_BX + algo.kl_coef * mean(kl_BA * r.mask_UBA)
    seen = _Seen(logprobs_BA, new_BX, old_BX, entropy_BX, correction_BX)
    return jnp.sum(loss_BX * mask_BX), seen


def _value_loss(critic, r, p: Targets, *, graphdef, config, algorithm: Algorithm, base):
    """Sum over decisions of the critic's error."""
    mask_BX, agent_BX, _ = logprobs.unit_labels(r, algorithm.level)
    features_BXD = p.features_BXD
    if features_BXD is None:
        features_BXD = trunk_features(graphdef, config, algorithm.level, base, critic, r)
    error_BX = losses.value_loss(
        critic_lib.values(critic.head, features_BXD, agent_BX),
        p.values_BX,
        p.returns_BX,
        config.algo.value_clip,
        config.algo.huber_delta,
    )
    return jnp.sum(error_BX * mask_BX)


def _sums(
    seen: _Seen, r, p: Targets, config, algorithm: Algorithm, agents: int, n: int, critic_loss
) -> Sums:
    mask_BX, agent_BX, owner_BX = logprobs.unit_labels(r, algorithm.level)
    kl_BX = losses.approx_kl(seen.new_BX, seen.old_BX)
    clipped_BX = losses.clip_fraction(
        seen.new_BX, seen.old_BX, config.algo.clip, config.algo.clip_high
    )
    gap_BA = jnp.abs(seen.logprobs_BA - r.behaviour_UBA)

    def by(labels, x, mask, size):
        return jnp.einsum("bxn,bx->n", jax.nn.one_hot(labels, size), x * mask)

    def by_agent(x):
        return by(agent_BX, x, mask_BX, agents)

    def by_token(x):
        return by(logprobs.token_agents(r), x, r.mask_UBA, agents)

    return Sums(
        decisions_X=by_agent(jnp.ones_like(mask_BX)),
        entropy_X=by_agent(seen.entropy_BX),
        approx_kl_X=by_agent(kl_BX),
        clip_fraction_X=by_agent(clipped_BX),
        correction_X=by_agent(seen.correction_BX),
        tokens_X=by_token(jnp.ones_like(r.mask_UBA)),
        logprob_gap_X=by_token(gap_BA),
        owned_N=by(owner_BX, jnp.ones_like(mask_BX), mask_BX, n),
        kl_N=by(owner_BX, kl_BX, mask_BX, n),
        taught_N=by(owner_BX, p.advantages_BX * seen.correction_BX != 0, mask_BX, n),
        critic_loss=critic_loss,
        nonfinite={
            "logprobs": by_token(~jnp.isfinite(seen.logprobs_BA)),
            "behaviour logprobs": by_token(~jnp.isfinite(r.behaviour_UBA)),
            "advantages": by_agent(~jnp.isfinite(p.advantages_BX)),
        },
    )


def report(sums: Sums, config) -> dict[str, jax.Array]:
    """Means over all minibatches, per agent; the gap is that of the first one."""
    total = jax.tree.map(lambda x: x.sum(0), sums)
    decisions_X = jnp.maximum(total.decisions_X, 1)
    numbers = {
        "entropy": total.entropy_X / decisions_X,
        "approx_kl": total.approx_kl_X / decisions_X,
        "clip_fraction": total.clip_fraction_X / decisions_X,
        "logprob_gap": sums.logprob_gap_X[0] / jnp.maximum(sums.tokens_X[0], 1),
    }
    if config.algo.correction != "none":
        numbers["correction_weight"] = total.correction_X / decisions_X
    if config.critic.mode != "none":
        numbers["critic/loss"] = total.critic_loss / jnp.maximum(total.decisions_X.sum(), 1)
    return numbers
