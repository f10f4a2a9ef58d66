"""Losses of one microbatch: gradient sums, and the totals that they and the metrics need."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marft_jax.learning import critic as critic_lib
from marft_jax.learning import logprobs, losses
from marft_jax.learning.estimates import LossWeights
from marft_jax.learning.rows import Rows
from marft_jax.learning.settings import LearnerSettings
from marft_jax.learning.values import LearnerSpec, Scored, values
from marft_jax.models import lora
from marft_jax.models.decoder import Base
from marft_jax.parallel import mesh as mesh_lib


class Targets(NamedTuple):
    """Numbers that losses read besides the rows, None where the settings do not ask for them."""

    advantages_BX: jax.Array  # of each decision
    scored: Scored  # values and reference log-probs before the update
    returns_BX: jax.Array  # divided by the values' scale
    weights: LossWeights  # of the decisions in the policy loss, ``[B, X]``
    proximal_BA: jax.Array | None = None  # log-probs of the policy at the start of the update


class Totals(NamedTuple):
    """Sums over the decisions in the rows of one base in a minibatch, to be divided late.

    Attributes:
        gradient: of each adapter.
        critic_gradient: of each part of the critic.
        by_adapter: ``[N]``: decisions; ``count``, by which the gradient is divided; KL of the
            update; decisions with an advantage that counts; tokens whose gradient is not finite.
        by_agent: ``[P]``: metrics, and how many numbers were not finite.
        critic_loss: of all decisions.
    """

    gradient: lora.Adapters
    critic_gradient: critic_lib.Critic
    by_adapter: dict[str, jax.Array]
    by_agent: dict[str, jax.Array]
    critic_loss: jax.Array


class Stepped(NamedTuple):
    """Numbers of one optimiser step of one base."""

    by_agent: dict[str, jax.Array]  # as of ``Totals``
    critic_loss: jax.Array
    norm_N: jax.Array  # of the gradient of each adapter; not finite where it took no step for that
    critic_norm_M: jax.Array  # of each part of the critic


_MEANS = ("entropy", "approx_kl", "clip_fraction", "correction_weight")  # over decisions
_PER_AGENT = ("decisions", *_MEANS, "tokens", "logprob_gap")
_WATCHED = ("logprobs", "behaviour logprobs", "advantages", "values")  # for what is not finite
_PER_ADAPTER = ("decisions", "count", "kl", "nonzero_advantages", "nonfinite")


def zeros(
    places: int,
    agents: int,
    adapters: Mapping[str, lora.Adapters],
    critic: Mapping[str, critic_lib.Critic],
) -> dict[str, Totals]:
    """Totals of no microbatch for each base, for each place along the mesh's ``data`` axis."""
    found = dict[str, Totals]()
    by_agent: dict[str, jax.Array] = dict.fromkeys((*_PER_AGENT, *_WATCHED), jnp.zeros(agents))
    for base, own in adapters.items():
        by_adapter: dict[str, jax.Array] = dict.fromkeys(
            _PER_ADAPTER, jnp.zeros(lora.shape_of(own)[0])
        )
        found[base] = Totals(own, critic[base], by_adapter, by_agent, jnp.zeros(()))
    return jax.tree.map(lambda x: jnp.zeros((places, *x.shape), x.dtype), found)


def accumulate(
    spec: LearnerSpec,
    places: int,
    *,
    base: Base,
    adapters: lora.Adapters,
    critic: critic_lib.Critic,
    rows: Rows[jax.Array],
    targets: Targets,
    total: Totals,
) -> Totals:
    """Adds a microbatch's gradient sums and totals.

    Each place along the mesh's ``data`` axis, and so each process, sums up the gradients of its own
    rows, on a leading axis that is split over the places; they meet once for each step of the
    optimiser.
    """
    r, t = jax.tree.map(lambda x: x.reshape(places, -1, *x.shape[1:]), (rows, targets))
    everywhere = jax.vmap(
        lambda r, t: gradients(spec, base, adapters, critic, r, t),
        axis_name=mesh_lib.PLACES,
        spmd_axis_name="data",
    )
    return jax.tree.map(jnp.add, total, everywhere(r, t))


def gradients(
    spec: LearnerSpec,
    base: Base,
    adapters: lora.Adapters,
    critic: critic_lib.Critic,
    r: Rows[jax.Array],
    t: Targets,
) -> Totals:
    """Computes the totals of one microbatch."""
    with jax.named_scope("policy"):
        if spec.learns:
            how = {"alpha": spec.settings.lora.alpha, "r": r}
            states = functools.partial(logprobs.policy_states, spec.graphdef, base, **how)
            policy = functools.partial(_policy_loss, spec, base, r=r, t=t)
            grad_policy, left_BA, (_, (logprobs_BA, seen)) = _isolated(states, policy, adapters)
            seen |= {"nonfinite": left_BA}
        else:
            grad_policy = jax.tree.map(jnp.zeros_like, adapters)
            logprobs_BA, seen = _seen_without_a_pass(spec, r)
    critic_loss, grad_critic, unvalued_BX = jnp.zeros(()), critic, jnp.zeros_like(t.advantages_BX)
    if t.scored.values_BX is not None:
        with jax.named_scope("critic"):
            value = functools.partial(values, spec, base, r=r, features_BXD=t.scored.features_BXD)
            error = functools.partial(_value_loss, spec, r=r, t=t)
            grad_critic, unvalued_BX, (critic_loss, _) = _isolated(value, error, critic)
    by_adapter = _sums_by_adapter(spec, seen, r, t, lora.shape_of(adapters)[0])
    by_agent = _sums_by_agent(spec, logprobs_BA, seen, r, t, unvalued_BX)
    return Totals(grad_policy, grad_critic, by_adapter, by_agent, critic_loss)


def _isolated(
    forward: Callable[[Any], jax.Array], loss: Callable[[jax.Array], tuple[jax.Array, Any]], x: Any
) -> tuple[Any, jax.Array, tuple[jax.Array, Any]]:
    """Gradient of a loss behind ``forward``, without the entries ``[B, ...]`` of its result where
    that is not finite.

    All adapters share one matrix product, in which 0 * NaN of one would be NaN of all.

    Returns:
        (gradient, which entries were left out, what the loss returned).
    """
    y, pull = jax.vjp(forward, x)
    found, d_y = jax.value_and_grad(loss, has_aux=True)(y)
    broken = ~jnp.isfinite(d_y)
    if y.ndim == 3:  # all channels of a token
        broken = broken.any(-1, keepdims=True)
    [gradient] = pull(jnp.where(broken, 0, d_y))
    return gradient, broken.reshape(y.shape[:2]), found


def _seen_without_a_pass(
    spec: LearnerSpec, r: Rows[jax.Array]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What ``_policy_loss`` returns besides the loss, for a base on which nobody learns: the
    log-probs of sampling, and zeros for metrics that only a pass through the base would give."""
    mask_BX, _, _ = logprobs.decision_labels(r, spec.algorithm.level)
    seen: dict[str, jax.Array] = dict.fromkeys(_MEANS, jnp.zeros_like(mask_BX))
    return r.actions.behaviour_BA, seen | {"nonfinite": jnp.zeros_like(r.actions.mask_BA)}


def _sums_by(labels: jax.Array, mask: jax.Array, size: int) -> Callable[[jax.Array], jax.Array]:
    """Sums up the numbers of each label; a NaN is in no other label's sum."""
    is_own = jax.nn.one_hot(labels, size, dtype=bool) & (mask[..., None] > 0)
    return lambda x: jnp.where(is_own, x[..., None], 0).sum((0, 1), dtype=jnp.float32)


def _policy_loss(
    spec: LearnerSpec, base: Base, hidden_BAD: jax.Array, *, r: Rows[jax.Array], t: Targets
) -> tuple[jax.Array, tuple[jax.Array, dict[str, jax.Array]]]:
    """Σ over decisions of correction · policy loss − entropy_coef · entropy + kl_coef · KL.

    Args:
        hidden_BAD: last hidden states of the policy where action tokens are predicted.

    Returns:
        (loss, (logprobs_BA, numbers of each decision that metrics are means of)).
    """
    settings, algo, level = spec.settings, spec.settings.algo, spec.algorithm.level
    mask_BX, _, _ = logprobs.decision_labels(r, level)
    logprobs_BA, entropy_BA = logprobs.score_actions(
        spec.graphdef, base, hidden_BAD, r, algo.entropy_coef != 0
    )

    def log_prob(x_BA: jax.Array) -> jax.Array:
        return logprobs.per_decision(x_BA, r, level, r.turns.divisor_BK)

    def mean(x_BA: jax.Array) -> jax.Array:
        return logprobs.per_decision(x_BA, r, level, r.turns.tokens_BK)

    new_BX, old_BX = log_prob(logprobs_BA), log_prob(r.actions.behaviour_BA)
    correction_BX = jnp.ones_like(mask_BX)
    if t.proximal_BA is not None:
        behaviour_BX, old_BX = old_BX, log_prob(t.proximal_BA)
        stale = (old_BX, behaviour_BX)
        if algo.correction_of == "sequence":  # the log-probs of an action, for all its tokens
            old, behaviour = t.proximal_BA, r.actions.behaviour_BA
            stale = (logprobs.turn_sums(old, r), logprobs.turn_sums(behaviour, r))
        correction_BX = losses.correction_weight(
            *stale, settings.correction, algo.correction_cap, algo.correction_floor
        )
    loss_BX = spec.algorithm.policy_loss(algo, new_BX, old_BX, t.advantages_BX) * correction_BX
    entropy_BX = mean(entropy_BA)
    loss_BX = loss_BX - t.weights.entropy * entropy_BX
    if algo.kl_in == "loss" and t.scored.reference_BA is not None:
        kl_BA = losses.reference_kl(logprobs_BA, t.scored.reference_BA, algo.estimator)
        loss_BX = loss_BX + algo.kl_coef * mean(kl_BA * r.actions.mask_BA)
    loss_BX += jnp.where(jnp.isfinite(loss_BX), 0, jnp.nan) * new_BX  # its gradient is not finite
    seen = {
        "entropy": entropy_BX,
        "approx_kl": losses.approx_kl(new_BX, old_BX),
        "clip_fraction": losses.clip_fraction(new_BX, old_BX, algo.clip, algo.clip_high),
        "correction_weight": correction_BX,
    }
    return jnp.sum(loss_BX * t.weights.weight * mask_BX), (logprobs_BA, seen)


def _value_loss(
    spec: LearnerSpec, values_BX: jax.Array, *, r: Rows[jax.Array], t: Targets
) -> tuple[jax.Array, None]:
    """Sum over decisions of the critic's error."""
    assert t.scored.values_BX is not None
    algo, level = spec.settings.algo, spec.algorithm.level
    mask_BX, _, _ = logprobs.decision_labels(r, level)
    error_BX = losses.value_loss(
        values_BX, t.scored.values_BX, t.returns_BX, algo.value_clip, algo.huber_delta
    )
    return jnp.sum(error_BX * mask_BX), None


def _sums_by_adapter(
    spec: LearnerSpec, seen: dict[str, jax.Array], r: Rows[jax.Array], t: Targets, adapters: int
) -> dict[str, jax.Array]:
    """Sums up the numbers of a microbatch's decisions by adapter."""
    mask_BX, _, owner_BX = logprobs.decision_labels(r, spec.algorithm.level)
    by_owner = _sums_by(owner_BX, mask_BX, adapters)
    by_token = _sums_by(logprobs.of_turn(r.turns.owner_BK, r), r.actions.mask_BA, adapters)
    advantages_BX = t.advantages_BX * t.weights.weight * seen["correction_weight"]
    return {
        "decisions": by_owner(jnp.ones_like(mask_BX)),
        "count": by_owner(t.weights.count),
        "kl": by_owner(seen["approx_kl"]),
        "nonzero_advantages": by_owner(advantages_BX != 0),
        "nonfinite": by_token(seen["nonfinite"]),
    }


def _sums_by_agent(
    spec: LearnerSpec,
    logprobs_BA: jax.Array,
    seen: dict[str, jax.Array],
    r: Rows[jax.Array],
    t: Targets,
    unvalued_BX: jax.Array,
) -> dict[str, jax.Array]:
    """Sums up the numbers of a microbatch's decisions by agent."""
    mask_BX, agent_BX, _ = logprobs.decision_labels(r, spec.algorithm.level)
    by_agent = _sums_by(agent_BX, mask_BX, spec.agents)
    by_token = _sums_by(logprobs.token_agents(r), r.actions.mask_BA, spec.agents)
    return {name: by_agent(seen[name]) for name in _MEANS} | {
        "decisions": by_agent(jnp.ones_like(mask_BX)),
        "tokens": by_token(jnp.ones_like(r.actions.mask_BA)),
        "logprob_gap": by_token(jnp.abs(logprobs_BA - r.actions.behaviour_BA)),
        "logprobs": by_token(~jnp.isfinite(logprobs_BA)),
        "behaviour logprobs": by_token(~jnp.isfinite(r.actions.behaviour_BA)),
        "advantages": by_agent(~jnp.isfinite(t.advantages_BX)),
        "values": by_agent(unvalued_BX),
    }


def report(
    settings: LearnerSettings,
    owners: Sequence[tuple[str, int]],
    stepped: Sequence[Mapping[str, Stepped]],
) -> dict[str, Any]:
    """Metrics of a training step, per agent: means over all minibatches.

    ``logprob_gap`` is that of the first minibatch. ``decisions`` and ``decisions_min`` are the mean
    and the smallest number of decisions behind an optimiser step. Agents that share an adapter
    report the same ``grad_norm``.

    Args:
        owners: the base of each agent, and the number of its adapter there.
        stepped: what ``optimiser.apply`` returned for each minibatch.
    """
    bases: dict[str, Stepped] = jax.tree.map(lambda *x: jnp.stack(x), *stepped)
    team = [(own.by_agent, own.critic_loss) for own in bases.values()]
    sums, critic_loss = functools.reduce(functools.partial(jax.tree.map, jnp.add), team)
    first, total = (jax.tree.map(pick, sums) for pick in (lambda x: x[0], lambda x: x.sum(0)))
    norms = jnp.stack([bases[base].norm_N[:, n] for base, n in owners], axis=1)
    critic_norms = jnp.concatenate([own.critic_norm_M for own in bases.values()], axis=1)
    nonfinite = {name: sums[name] for name in _WATCHED} | {
        "gradient": ~jnp.isfinite(norms),
        "critic gradient": ~jnp.isfinite(critic_norms).all(1),
    }
    decisions_P = jnp.maximum(total["decisions"], 1)
    numbers = {name: total[name] / decisions_P for name in _MEANS}
    numbers |= {
        "decisions": sums["decisions"].mean(0),
        "decisions_min": sums["decisions"].min(0),
        "logprob_gap": first["logprob_gap"] / jnp.maximum(first["tokens"], 1),
        "grad_norm": norms.mean(0),
        "nonfinite": {name: x.sum(0) for name, x in nonfinite.items()},
    }
    if settings.correction == "none":
        del numbers["correction_weight"]
    if "clip" not in {field.name for field in dataclasses.fields(settings.algo)}:
        del numbers["clip_fraction"]
    if settings.critic is not None:
        decisions = jnp.maximum(total["decisions"].sum(), 1)
        numbers |= {
            "critic/loss": critic_loss.sum(0) / decisions,
            "critic/grad_norm": critic_norms.mean(),
        }
    return numbers
