"""Losses of one microbatch: gradient sums, and the totals that they and the metrics need."""

from __future__ import annotations

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
from marft_jax.learning.values import LearnerSpec, values
from marft_jax.models import lora
from marft_jax.models.decoder import Base
from marft_jax.parallel import mesh as mesh_lib


class CriticTargets(NamedTuple):
    """Numbers that the critic's loss reads."""

    returns_BX: jax.Array  # divided by the values' scale
    values_BX: jax.Array  # the critic's outputs before the update
    features_BXD: jax.Array | None  # input of a critic without adapters


class Targets(NamedTuple):
    """Numbers that losses read besides the rows, None where the settings do not ask for them."""

    advantages_BX: jax.Array  # of each decision
    weights: LossWeights | None = None  # of the decisions in the policy loss, ``[B, X]``
    critic: CriticTargets | None = None
    reference_BA: jax.Array | None = None  # log-probs of the reference, for a KL in the loss
    proximal_BA: jax.Array | None = None  # log-probs of the policy at the start of the update


class AdapterSums(NamedTuple):
    """Sums over the decisions of each adapter of one base."""

    decisions_N: jax.Array
    count_N: jax.Array  # the gradient is divided by this
    kl_N: jax.Array  # of the update
    nonzero_advantages_N: jax.Array  # decisions with an advantage that counts


class TeamSums(NamedTuple):
    """Sums over the decisions in the rows of one base, or over all decisions of the team."""

    per_agent: dict[str, jax.Array]  # metrics, ``[P]``
    critic_loss: jax.Array
    nonfinite: dict[str, jax.Array]  # per tensor and agent: how many numbers were not finite


class Totals(NamedTuple):
    """Sums over the rows of one base in a minibatch, to be divided late."""

    gradient: lora.Adapters
    adapters: AdapterSums
    critic_gradient: critic_lib.Critic
    team: TeamSums


class Stepped(NamedTuple):
    """Numbers of one optimiser step of one base."""

    team: TeamSums
    broken: dict[str, jax.Array]  # per tensor: 1 for each adapter whose gradient is not finite, [N]
    critic_broken: dict[str, jax.Array]  # the same for the critic as a whole, if there is one
    norm_N: jax.Array  # of the gradient of each adapter
    critic_norm_M: jax.Array  # of each part of the critic


_MEANS = ("entropy", "approx_kl", "clip_fraction", "correction_weight")  # over decisions
_PER_AGENT = ("decisions", *_MEANS, "tokens", "logprob_gap")
_WATCHED = ("logprobs", "behaviour logprobs", "advantages")


def zeros(
    places: int,
    agents: int,
    adapters: Mapping[str, lora.Adapters],
    critic: Mapping[str, critic_lib.Critic],
) -> dict[str, Totals]:
    """Totals of no microbatch for each base."""
    return {base: _zeros(places, agents, own, critic[base]) for base, own in adapters.items()}


def _zeros(places: int, agents: int, adapters: lora.Adapters, critic: critic_lib.Critic) -> Totals:
    """Totals of no microbatch, for each place along the mesh's ``data`` axis."""
    zeros_P, zeros_N = jnp.zeros(agents), jnp.zeros(lora.shape_of(adapters)[0])
    per_agent = {name: zeros_P for name in _PER_AGENT}
    nonfinite = {name: zeros_P for name in _WATCHED}
    team = TeamSums(per_agent, jnp.zeros(()), nonfinite)
    total = Totals(adapters, AdapterSums(*[zeros_N] * 4), critic, team)
    return jax.tree.map(lambda x: jnp.zeros((places, *x.shape), x.dtype), total)


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
    """Computes the totals of one microbatch.

    A decision whose loss has a gradient that is not finite makes the gradient of its own adapter
    NaN, and changes no other: it stops where the loss ends, as behind it, in the products that all
    adapters share, 0 * NaN is NaN.
    """
    broken_BA = jnp.zeros_like(r.actions.mask_BA)
    mask_BA, _, owner_BA = logprobs.decision_labels(r, "token")
    with jax.named_scope("policy"):
        policy = jax.grad(functools.partial(_policy_loss, spec, base, r=r, t=t), (0, 1), True)
        (grad_policy, broken_BA), (logprobs_BA, seen) = policy(adapters, broken_BA)
        count = lora.shape_of(adapters)[0]
        grad_policy = _void(grad_policy, _sums_by(owner_BA, mask_BA, count)(broken_BA))
    critic_loss, grad_critic = jnp.zeros(()), critic
    if t.critic is not None:
        mask_BX, agent_BX, _ = logprobs.decision_labels(r, spec.algorithm.level)
        with jax.named_scope("critic"):
            value = functools.partial(_value_loss, spec, base, r=r, t=t.critic)
            critic_loss, (grad_critic, broken_BX) = jax.value_and_grad(value, (0, 1))(
                critic, jnp.zeros_like(mask_BX)
            )
            broken_P = _sums_by(agent_BX, mask_BX, spec.agents)(broken_BX)
            broken = critic_lib.decisions(critic, broken_P)
            grad_critic = critic_lib.Critic(*map(_void, grad_critic, broken))
    own = _adapter_sums(spec, seen, r, t, count)
    team = _team_sums(spec, logprobs_BA, seen, r, t, critic_loss)
    return Totals(grad_policy, own, grad_critic, team)


_LARGEST = 1e18  # the square of a gradient beyond it, and so its norm, may overflow


@jax.custom_vjp
def _bounded(x: jax.Array, broken: jax.Array) -> jax.Array:
    """x, whose gradient becomes 0 where it is not finite or beyond 1e18; that of ``broken`` is 1
    there and 0 elsewhere."""
    return x


def _bounded_backward(_: None, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    is_sound = jnp.abs(gradient) < _LARGEST
    return jnp.where(is_sound, gradient, 0), (~is_sound).astype(gradient.dtype)


_bounded.defvjp(lambda x, broken: (x, None), _bounded_backward)


def _void(gradient: Any, broken_M: jax.Array) -> Any:
    """Makes the gradients of members with anything broken NaN; leading axis M."""

    def void(leaf: jax.Array) -> jax.Array:
        return jnp.where(broken_M.reshape(-1, *[1] * (leaf.ndim - 1)) > 0, jnp.nan, leaf)

    return jax.tree.map(void, gradient)


def _sums_by(labels: jax.Array, mask: jax.Array, size: int) -> Callable[[jax.Array], jax.Array]:
    """Sums up the numbers of each label; a NaN is in no other label's sum."""
    is_own = jax.nn.one_hot(labels, size, dtype=bool) & (mask[..., None] > 0)
    return lambda x: jnp.where(is_own, x[..., None], 0).sum((0, 1), dtype=jnp.float32)


def _policy_loss(
    spec: LearnerSpec,
    base: Base,
    adapters: lora.Adapters,
    broken_BA: jax.Array,
    *,
    r: Rows[jax.Array],
    t: Targets,
) -> tuple[jax.Array, tuple[jax.Array, dict[str, jax.Array]]]:
    """Σ over decisions of correction · policy loss − entropy_coef · entropy + kl_coef · KL.

    Args:
        broken_BA: zeros; its gradient is 1 at tokens where that of the loss is not finite.

    Returns:
        (loss, (logprobs_BA, numbers of each decision that metrics are means of)).
    """
    settings, algo, level = spec.settings, spec.settings.algo, spec.algorithm.level
    mask_BX, _, _ = logprobs.decision_labels(r, level)
    logprobs_BA, entropy_BA = logprobs.action_logprobs(
        spec.graphdef, base, adapters, settings.lora.alpha, r, algo.entropy_coef != 0
    )
    logprobs_BA = _bounded(logprobs_BA, broken_BA)

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
    bonus_BX = algo.entropy_coef if t.weights is None else t.weights.entropy
    entropy_BX = mean(entropy_BA)
    loss_BX = loss_BX - bonus_BX * entropy_BX
    if t.reference_BA is not None:
        kl_BA = losses.reference_kl(logprobs_BA, t.reference_BA, algo.estimator)
        loss_BX = loss_BX + algo.kl_coef * mean(kl_BA * r.actions.mask_BA)
    if t.weights is not None:
        loss_BX = loss_BX * t.weights.weight
    seen = {
        "entropy": entropy_BX,
        "approx_kl": losses.approx_kl(new_BX, old_BX),
        "clip_fraction": losses.clip_fraction(new_BX, old_BX, algo.clip, algo.clip_high),
        "correction_weight": correction_BX,
    }
    return jnp.sum(loss_BX * mask_BX), (logprobs_BA, seen)


def _value_loss(
    spec: LearnerSpec,
    base: Base,
    critic: critic_lib.Critic,
    broken_BX: jax.Array,
    *,
    r: Rows[jax.Array],
    t: CriticTargets,
) -> jax.Array:
    """Sum over decisions of the critic's error; ``broken_BX`` as of ``_policy_loss``."""
    algo, level = spec.settings.algo, spec.algorithm.level
    mask_BX, _, _ = logprobs.decision_labels(r, level)
    values_BX = _bounded(values(spec, base, critic, r, t.features_BXD), broken_BX)
    error_BX = losses.value_loss(
        values_BX, t.values_BX, t.returns_BX, algo.value_clip, algo.huber_delta
    )
    return jnp.sum(error_BX * mask_BX)


def _adapter_sums(
    spec: LearnerSpec, seen: dict[str, jax.Array], r: Rows[jax.Array], t: Targets, adapters: int
) -> AdapterSums:
    """Sums up the numbers of a microbatch's decisions by adapter."""
    mask_BX, _, owner_BX = logprobs.decision_labels(r, spec.algorithm.level)
    by_owner = _sums_by(owner_BX, mask_BX, adapters)
    ones_BX = count_BX = jnp.ones_like(mask_BX)
    advantages_BX = t.advantages_BX
    if t.weights is not None:
        count_BX, advantages_BX = t.weights.count, advantages_BX * t.weights.weight
    return AdapterSums(
        decisions_N=by_owner(ones_BX),
        count_N=by_owner(count_BX),
        kl_N=by_owner(seen["approx_kl"]),
        nonzero_advantages_N=by_owner(advantages_BX * seen["correction_weight"] != 0),
    )


def _team_sums(
    spec: LearnerSpec,
    logprobs_BA: jax.Array,
    seen: dict[str, jax.Array],
    r: Rows[jax.Array],
    t: Targets,
    critic_loss: jax.Array,
) -> TeamSums:
    """Sums up the numbers of a microbatch's decisions by agent."""
    mask_BX, agent_BX, _ = logprobs.decision_labels(r, spec.algorithm.level)
    by_agent = _sums_by(agent_BX, mask_BX, spec.agents)
    by_token = _sums_by(logprobs.token_agents(r), r.actions.mask_BA, spec.agents)
    return TeamSums(
        per_agent={name: by_agent(seen[name]) for name in _MEANS}
        | {
            "decisions": by_agent(jnp.ones_like(mask_BX)),
            "tokens": by_token(jnp.ones_like(r.actions.mask_BA)),
            "logprob_gap": by_token(jnp.abs(logprobs_BA - r.actions.behaviour_BA)),
        },
        critic_loss=critic_loss,
        nonfinite={
            "logprobs": by_token(~jnp.isfinite(logprobs_BA)),
            "behaviour logprobs": by_token(~jnp.isfinite(r.actions.behaviour_BA)),
            "advantages": by_agent(~jnp.isfinite(t.advantages_BX)),
        },
    )


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
    team = [(own.team, own.critic_broken) for own in bases.values()]
    sums, nonfinite = functools.reduce(functools.partial(jax.tree.map, jnp.add), team)
    first, total = (jax.tree.map(pick, sums) for pick in (lambda x: x[0], lambda x: x.sum(0)))

    def of_agents(read: Callable[[Stepped], jax.Array]) -> jax.Array:
        return jnp.stack([read(bases[base])[:, n] for base, n in owners], axis=1)

    for tensor in next(iter(bases.values())).broken:
        nonfinite[tensor] = of_agents(lambda own, tensor=tensor: own.broken[tensor])
    critic_norms = [own.critic_norm_M for own in bases.values()]
    decisions_P = jnp.maximum(total.per_agent["decisions"], 1)
    numbers = {name: total.per_agent[name] / decisions_P for name in _MEANS}
    numbers |= {
        "decisions": sums.per_agent["decisions"].mean(0),
        "decisions_min": sums.per_agent["decisions"].min(0),
        "logprob_gap": first.per_agent["logprob_gap"] / jnp.maximum(first.per_agent["tokens"], 1),
        "grad_norm": of_agents(lambda own: own.norm_N).mean(0),
        "nonfinite": jax.tree.map(lambda x: x.sum(0), sums.nonfinite | nonfinite),
    }
    if settings.correction == "none":
        del numbers["correction_weight"]
    if settings.critic is not None:
        decisions = jnp.maximum(total.per_agent["decisions"].sum(), 1)
        numbers |= {
            "critic/loss": total.critic_loss / decisions,
            "critic/grad_norm": jnp.concatenate(critic_norms, axis=1).mean(),
        }
    return numbers
