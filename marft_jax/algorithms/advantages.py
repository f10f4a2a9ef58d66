"""Generalised advantage estimation along the team's chain of decisions, and normalisation.

A chain's links are the turns of an episode in acting order (action level) or the action tokens of
all its turns in that order (token level): it runs across agents and across steps.
"""

from __future__ import annotations

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


def normalize(advantages, mask, groups=None, n_groups: int = 1):
    """(A − mean) / (std + 1e-8) with mean and population deviation over the masked entries.

    Args:
        advantages: any shape.
        mask: true for entries that count.
        groups: the group (say, the agent) of each entry; statistics are taken per group.
        n_groups: how many groups there are.
    """
    groups = jnp.zeros(advantages.shape, jnp.int32) if groups is None else groups
    member = jax.nn.one_hot(groups, n_groups) * mask[..., None]
    axes = tuple(range(advantages.ndim))
    count_X = jnp.maximum(member.sum(axes), 1)
    mean_X = (member * advantages[..., None]).sum(axes) / count_X
    centred = advantages - mean_X[groups]
    variance_X = (member * jnp.square(centred)[..., None]).sum(axes) / count_X
    return centred / (jnp.sqrt(variance_X)[groups] + 1e-8)
