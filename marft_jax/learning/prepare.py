"""From rewards to advantages: the part of a training step that no gradient passes through."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from marft_jax.learning import advantages as adv
from marft_jax.learning import critic as critic_lib
from marft_jax.learning import logprobs, losses
from marft_jax.learning.algorithms import Algorithm, normalized_advantages

FROZEN = ("shared", "heads")  # modes of a critic that reads the base without adapters


class Prepared(NamedTuple):
    """What ``update`` needs besides the rows; X is K at the action level, A at the token level.

    What the settings do not ask for is None.

    Attributes:
        advantages_UBX, returns_UBX: of each decision.
        values_UBX: the critic's, before the update.
        features_UBXD: what a critic without adapters reads.
        reference_UBA: log-probs of the base without adapters, for a KL in the loss.
        proximal_UBA: log-probs of the policy at the start of the update.
    """

    advantages_UBX: Any
    returns_UBX: Any
    values_UBX: Any = None
    features_UBXD: Any = None
    reference_UBA: Any = None
    proximal_UBA: Any = None


class Moving(NamedTuple):
    """A moving average per agent: ``total / weight``; 0 before the first number."""

    total_X: jax.Array
    weight_X: jax.Array

    @property
    def mean_X(self):
        return self.total_X / jnp.where(self.weight_X > 0, self.weight_X, 1)

    def moved(self, mean_X, count_X, decay: float) -> Moving:
        """After one more number for each agent with a count; one that is not finite has none."""
        counts_X = (count_X > 0) & jnp.isfinite(mean_X)
        keep_X, mean_X = jnp.where(counts_X, decay, 1.0), jnp.where(counts_X, mean_X, 0.0)
        return Moving(
            keep_X * self.total_X + (1 - keep_X) * mean_X,
            keep_X * self.weight_X + (1 - keep_X),
        )


def prepare(
    *,
    graphdef,
    config,
    algorithm: Algorithm,
    agents: int,
    base,
    critic: critic_lib.Critic,
    adapters,
    baseline: Moving,
    rows,
    chain,
    prompts=None,
) -> tuple[Prepared, Moving, dict[str, jax.Array]]:
    """Values, reference log-probs, rewards, advantages and returns of every decision.

    Args:
        prompts: what a critic reads instead of the rows, where ``reads_prompts``.

    Returns:
        (what the update needs, the moved baseline, metrics).
    """
    algo, level, report = config.algo, algorithm.level, {}
    read = rows if prompts is None else prompts.rows
    features_UBXD, reference_UBA = _frozen(graphdef, config, level, base, read)
    if prompts is not None:
        features_UBXD = _at(features_UBXD, prompts.unit_UBK)
    values_UBX = _values(graphdef, config, level, base, critic, rows, features_UBXD)
    proximal_UBA = None
    if algo.correction != "none":
        proximal_UBA = _proximal(graphdef, config, base, adapters, rows)
    if reference_UBA is not None:
        with jax.named_scope("reference_kl"):
            kl_UBA = losses.reference_kl(rows.behaviour_UBA, reference_UBA, algo.kl_estimator)
            kl_UBA = kl_UBA * rows.mask_UBA
            report["ref_kl"] = _by_agent(kl_UBA, rows, agents)
            if algo.kl_in == "reward":
                penalty_EJ = _to_chain(_sum_per_unit(kl_UBA, rows, level), chain)
                chain = chain._replace(rewards_EJ=chain.rewards_EJ - algo.kl_coef * penalty_EJ)
    with jax.named_scope("advantages"):
        values_EJ = (
            jnp.zeros_like(chain.rewards_EJ) if values_UBX is None else _to_chain(values_UBX, chain)
        )
        advantages_EJ, returns_EJ = normalized_advantages(
            algo, algorithm, chain, values_EJ, baseline.mean_X
        )
        if algo.baseline == "moving":
            baseline = baseline.moved(
                *adv.agent_means(returns_EJ, chain, agents), algo.baseline_decay
            )
    mask_UBX, _, _ = logprobs.unit_labels(rows, level)
    advantages_UBX, returns_UBX = (
        x_EJ.reshape(-1)[chain.link_UBX] * mask_UBX for x_EJ in (advantages_EJ, returns_EJ)
    )
    if values_UBX is not None:
        report["critic/explained_variance"] = _explained(values_UBX, returns_UBX, mask_UBX)
    prepared = Prepared(
        advantages_UBX,
        returns_UBX,
        values_UBX,
        features_UBXD,
        reference_UBA if algo.kl_in == "loss" else None,
        proximal_UBA,
    )
    return prepared, baseline, report


def value_features(graphdef, config, level, base, critic: critic_lib.Critic, r):
    """What the head reads of a microbatch, ``[B, X, D]``: through the critic's adapters, if any."""
    return logprobs.hidden_states(
        graphdef,
        base,
        r,
        logprobs.unit_index(r, level),
        critic.adapters or None,
        r.agents_UBT,
        config.lora.alpha,
    )


def reads_prompts(config, level) -> bool:
    """Whether the frozen base is to read what stands before each action, and no action: for the
    value of an action as a whole, and not for a reference."""
    return level == "action" and config.critic.mode in FROZEN and config.algo.kl_coef == 0


def _frozen(graphdef, config, level, base, rows):
    """(features_UBXD, reference_UBA) from one pass through the base; None what nobody reads."""
    with_features = config.critic.mode in FROZEN
    with_reference = config.algo.kl_coef > 0
    if not (with_features or with_reference):
        return None, None
    index_UBX = logprobs.unit_index(rows, level)
    b, size = index_UBX.shape[1:]
    zeros = (
        jnp.zeros((b, size, logprobs.width_of(graphdef, base)), logprobs.dtype_of(base)),
        jnp.zeros(rows.mask_UBA.shape[1:]),
    )
    zeros = zeros[0] if with_features else None, zeros[1] if with_reference else None

    def micro(one):
        r, index_BX = one

        def run():
            wanted = [index_BX, *([r.index_UBA] if with_reference else [])]
            hidden = logprobs.hidden_states(graphdef, base, r, jnp.concatenate(wanted, axis=1))
            reference = None
            if with_reference:
                reference = logprobs.score_actions(graphdef, base, hidden[:, size:], r)[0]
            return hidden[:, :size] if with_features else None, reference

        return logprobs.unless_empty(r, run, zeros)

    with jax.named_scope("frozen_base"):
        return jax.lax.map(micro, (rows, index_UBX))


def _values(graphdef, config, level, base, critic, rows, features_UBXD):
    """V of every decision; None without a critic."""
    if config.critic.mode == "none":
        return None
    _, agent_UBX, _ = logprobs.unit_labels(rows, level)
    if features_UBXD is not None:
        return critic_lib.values(critic.head, features_UBXD, agent_UBX)

    def micro(one):
        r, agent_BX = one

        def run():
            features = value_features(graphdef, config, level, base, critic, r)
            return critic_lib.values(critic.head, features, agent_BX)

        return logprobs.unless_empty(r, run, jnp.zeros(agent_BX.shape))

    with jax.named_scope("critic"):
        return jax.lax.map(micro, (rows, agent_UBX))


def _proximal(graphdef, config, base, adapters, rows):
    """Log-probs of the policy as it is now."""

    def micro(r):
        def run():
            return logprobs.action_logprobs(graphdef, base, adapters, config.lora.alpha, r)[0]

        return logprobs.unless_empty(r, run, jnp.zeros(r.mask_UBA.shape))

    with jax.named_scope("proximal"):
        return jax.lax.map(micro, rows)


def _at(x_UBXD, places):
    """What stands at these flat positions, wherever on the mesh."""
    x_UBXD = jax.lax.with_sharding_constraint(x_UBXD, P())
    return x_UBXD.reshape(-1, x_UBXD.shape[-1])[places]


def _sum_per_unit(x_UBA, rows, level):
    ones_UBK = jnp.ones_like(rows.divisor_UBK)
    return jax.vmap(lambda x, r, ones: logprobs.per_unit(x, r, level, ones))(x_UBA, rows, ones_UBK)


def _to_chain(x_UBX, chain):
    """What is known of each decision, in acting order."""
    return x_UBX.reshape(-1)[chain.unit_EJ] * chain.mask_EJ


def _by_agent(x_UBA, rows, agents: int):
    """The mean over each agent's action tokens."""
    labels = jax.nn.one_hot(logprobs.token_agents(rows), agents) * rows.mask_UBA[..., None]
    total_X = jnp.einsum("ubax,uba->x", labels, x_UBA)
    return total_X / jnp.maximum(labels.sum((0, 1, 2)), 1)


def _explained(values, returns, mask):
    """1 − Var(returns − values) / Var(returns) over the masked entries."""
    count = jnp.maximum(mask.sum(), 1)

    def variance(x):
        mean = jnp.sum(x * mask) / count
        return jnp.sum(jnp.square(x - mean) * mask) / count

    return 1 - variance(returns - values) / jnp.maximum(variance(returns), 1e-8)
