"""Advantages as in the papers: differences within a group.

Arrays ``x_EJ`` have one row per chain, which is an episode or, in a game, one player of it. Its J
links are the decisions in acting order: turns (action level) or action tokens (token level), across
agents and steps. ``layers.py`` holds generalised advantage estimation, ``siblings.py`` and
``moving.py`` other baselines, ``normalizers.py`` the scale.
"""

from __future__ import annotations

import numpy as np

from marft_jax.learning.chain import Chain
from marft_jax.learning.group_stats import SAME, Cells


def group_advantage(
    returns: np.ndarray, over: Cells, sizes: np.ndarray | None = None
) -> np.ndarray:
    """A_i = R_i − Σ_j w_j·R_j / Σ_j w_j over all j of the cell of i; 0 where all R are the same.

    The cell's maximum is subtracted first, which leaves the difference as it is: the mean of equal
    numbers misses them by a rounding, that of zeros does not.

    Args:
        returns: R.
        over: the groups, and the weight of each return.
        sizes: of the returns, as of ``Cells.zero_same``; |R| by default.

    Source: GRPO, Shao et al. 2024, section 4.1.2, without the division by the deviation.
    """
    apart = returns - over.max(returns)
    return over.zero_same(apart - over.mean(apart), returns if sizes is None else sizes)


def returns_to_go(chain: Chain) -> np.ndarray:
    """R_j = r_j + R_{j+1}: undiscounted sum of the rewards from each link on."""
    return np.cumsum(chain.rewards_EJ[:, ::-1], axis=1, dtype=np.float64)[:, ::-1]


def reward_sizes(chain: Chain) -> np.ndarray:
    """Σ_j |r_j| of each chain, ``[E, 1]``, of which ``SAME`` counts as rounding: of rewards that
    cancel out, or of log-probs in a KL that is part of the reward."""
    finite_EJ = np.where(np.isfinite(chain.rewards_EJ), np.abs(chain.rewards_EJ), 0)
    return (finite_EJ.sum(1) + chain.kl_noise_E / SAME)[:, None]


def samples_of_task(chain: Chain) -> Cells:
    """Cells of the samples of one task, in which every chain has the weight 1."""
    turns_E1 = np.maximum(chain.weight_EJ.sum(1, keepdims=True), 1)
    return Cells(chain.weight_EJ / turns_E1, chain.group_EJ)


def turns_of_place(chain: Chain) -> Cells:
    """Cells of the turns of one task and place: an agent's n-th turn of its episode."""
    return Cells(chain.weight_EJ, chain.group_EJ).split(chain.place_EJ)


def place_advantage(returns_EJ: np.ndarray, chain: Chain) -> np.ndarray:
    """``group_advantage`` among turns of the same place; 0 for padding.

    Turns of different places may be paid differently, so they are not compared. A turn whose place
    no other sample reached is compared with all turns of its task, where every episode has the
    weight 1. A sample that is the only one of its task has the advantage 0.
    """
    place, group, sizes_E1 = turns_of_place(chain), samples_of_task(chain), reward_sizes(chain)
    by_place_EJ = group_advantage(returns_EJ, place, sizes_E1)
    by_group_EJ = group_advantage(returns_EJ, group, sizes_E1)
    by_group_EJ = np.where(group.is_single(), 0, by_group_EJ)
    chosen_EJ = np.where(place.is_single(), by_group_EJ, by_place_EJ)
    return np.where(chain.mask_EJ > 0, chosen_EJ, 0)
