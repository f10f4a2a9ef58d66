"""Advantages along the team's chain of decisions, and their normalisation.

A chain's links are the turns of an episode in acting order (action level) or the action tokens of
all its turns in that order (token level): it runs across agents and across steps.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def gae(rewards_EJ, values_EJ, next_values_EJ, discounts_EJ, gae_lambda: float):
    """δ_j = r_j + d_j·V'_j − V_j;  A_j = δ_j + d_j·λ·A_{j+1};  return_j = A_j + V_j.

    Args:
        rewards_EJ: reward of each link.
        values_EJ: V of each link.
        next_values_EJ: V' of what follows it (the next link, or a bootstrap).
        discounts_EJ: γ where the chain goes on after this link, 0 where the episode ends.
        gae_lambda: λ.

    Returns:
        (advantages_EJ, returns_EJ).

    Computed as one associative scan, so its depth is logarithmic in the chain's length. Source:
    Schulman et al. 2015 (GAE), equation 16; the chain across agents is MARFT's (section 4.2).
    """
    deltas_EJ = rewards_EJ + discounts_EJ * next_values_EJ - values_EJ
    decays_EJ = discounts_EJ * gae_lambda

    def compose(later, earlier):
        """Both map the advantage behind their span to the one at its start."""
        return earlier[0] + earlier[1] * later[0], earlier[1] * later[1]

    advantages_EJ, _ = jax.lax.associative_scan(
        compose, (deltas_EJ, decays_EJ), axis=1, reverse=True
    )
    return advantages_EJ, advantages_EJ + values_EJ


def following(values_EJ):
    """V' of each link: the value of the next one, 0 behind the last."""
    return jnp.pad(values_EJ[:, 1:], ((0, 0), (0, 1)))


def returns_to_go(chain):
    """Undiscounted sum of a link's reward and of all that follow it in its episode."""
    nothing_EJ = jnp.zeros_like(chain.rewards_EJ)
    return gae(chain.rewards_EJ, nothing_EJ, nothing_EJ, chain.continues_EJ, 1.0)[0]


def group_mean(x_EJ, chain):
    """The mean over the samples of a link's task: every episode weighs one."""
    return mean_by(x_EJ, episode_weights(chain), chain.group_EJ, x_EJ.size)


def agent_means(x_EJ, chain, agents: int):
    """(means, turns) of each agent; every turn weighs one."""
    turns_X = jax.ops.segment_sum(chain.weight_EJ.ravel(), chain.agent_EJ.ravel(), agents)
    total_X = jax.ops.segment_sum((x_EJ * chain.weight_EJ).ravel(), chain.agent_EJ.ravel(), agents)
    return total_X / jnp.maximum(turns_X, 1), turns_X


def normalize_chain(advantages_EJ, chain, how: str):
    """Advantages with mean 0 and deviation 1 within what ``algo.normalize`` names.

    Statistics weigh every turn once, however many tokens it has; in ``group`` every episode once.
    Sources: batch: MARFT; agent: Dr. MAS; group: GRPO (Shao et al. 2024); group_turn: AT-GRPO.
    """
    if how == "none":
        return advantages_EJ
    weights_EJ = episode_weights(chain) if how == "group" else chain.weight_EJ
    cells_EJ = {
        "batch": None,
        "agent": chain.agent_EJ,
        "group": chain.group_EJ,
        "group_turn": chain.cell_EJ,
    }[how]
    return normalize(advantages_EJ, weights_EJ, cells_EJ, advantages_EJ.size)


def episode_weights(chain):
    """Weights of the links such that those of an episode add up to one."""
    turns_E1 = jnp.maximum(chain.weight_EJ.sum(1, keepdims=True), 1)
    return chain.weight_EJ / turns_E1


def normalize(x, weights, cells: Any = None, n_cells: int = 1):
    """(x − mean) / (std + 1e-8) with the weighted mean and population deviation.

    Args:
        x: any shape.
        weights: how much each entry counts; 0 for padding.
        cells: the cell (say, the agent) of each entry; statistics are taken per cell.
        n_cells: an upper bound of their numbers.
    """
    cells = jnp.zeros(x.shape, jnp.int32) if cells is None else cells
    centred = x - mean_by(x, weights, cells, n_cells)
    variance = mean_by(jnp.square(centred), weights, cells, n_cells)
    return centred / (jnp.sqrt(variance) + 1e-8)


def mean_by(x, weights, cells, n_cells: int):
    """For each entry, the weighted mean of its cell."""
    weights = jnp.asarray(weights, x.dtype)

    def total(y):
        return jax.ops.segment_sum(jnp.ravel(y), jnp.ravel(cells), n_cells)

    count_X = total(weights)
    mean_X = total(x * weights) / jnp.where(count_X > 0, count_X, 1)
    return mean_X[cells]
