"""Moving means of returns as a baseline, one for each agent or for each of its roles.

Sources: REINFORCE with a baseline, Williams 1992; a mean for each role: RAE of SPIRAL, arXiv
2506.24119, which updates it with each episode and not with each step.
"""

from __future__ import annotations

import numpy as np

from marft_jax.learning.advantages import reward_sizes
from marft_jax.learning.chain import Chain
from marft_jax.learning.group_stats import Cells, sums_of

ROLES = 8
"""Roles of an agent: its first, second, ... turn of an episode, and all turns from the eighth."""


def roles(chain: Chain, baseline: str | None) -> np.ndarray:
    """Number of the moving mean that each link is compared with: its agent's, or its role's."""
    if baseline == "role":
        return chain.agent_EJ * ROLES + np.minimum(chain.turn.agent_turn_EJ, ROLES - 1)
    return chain.agent_EJ


def moving_advantage(
    returns_EJ: np.ndarray, chain: Chain, labels_EJ: np.ndarray, mean_P: np.ndarray
) -> np.ndarray:
    """A_j = R_j − mean of the label of j; exactly 0 for labels that differ by rounding only."""
    over = Cells(chain.weight_EJ, labels_EJ)
    return over.zero_same(returns_EJ - mean_P[labels_EJ], reward_sizes(chain))


def label_means(
    x_EJ: np.ndarray, chain: Chain, labels_EJ: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """(means, turns) of each of ``count`` labels, in which every turn has the weight 1."""
    turns_P = sums_of(chain.weight_EJ, labels_EJ, count)
    x_EJ = np.where(chain.mask_EJ > 0, x_EJ, 0) * chain.weight_EJ
    return sums_of(x_EJ, labels_EJ, count) / np.maximum(turns_P, 1), turns_P
