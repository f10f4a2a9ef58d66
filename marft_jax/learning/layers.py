"""GAE (Schulman et al. 2015) along the layers of D, for agents that act in parallel.

A layer is a set of turns in a row, of one step, none of which saw another. Chained one after
another, δ of a turn would hold nothing that the turn did, as the value of its sibling does not
depend on it. So a layer is paid as a whole, and discounts count layers.
"""

from __future__ import annotations

import numpy as np

from marft_jax.learning.chain import Chain


def gae_by_layer(
    chain: Chain, values_EJ: np.ndarray, gamma: float, gae_lambda: float
) -> tuple[np.ndarray, np.ndarray]:
    """GAE in which the next link behind a turn is the mean of the next layer.

        δ_j = r_j + γ·V'_j − V_j;  A_j = δ_j + γ·λ·A'_j

    Within a turn V'_j and A'_j are those of the next link. Behind the last link of a turn, V' and
    A' are the means over the first links of the turns of the next layer, and r_j is the sum over
    the turns of the layer. Where every turn saw the one before it, this is GAE along the chain, bit
    for bit.

    Returns:
        (advantages_EJ, returns_EJ).

    Source: GAE, equation 16; the chain across agents: MARFT, section 4.2.
    """
    layer_EJ, e_E1 = chain.turn.layer_EJ, np.arange(len(values_EJ))[:, None]
    begins_EJ, ends_EJ = _borders(chain)
    turns_EY = np.maximum(_row_sums(begins_EJ, layer_EJ), 1)
    values_EY = _row_sums(values_EJ * begins_EJ, layer_EJ) / turns_EY
    next_EJ = np.pad(values_EJ[:, 1:], ((0, 0), (0, 1)))
    next_EJ = np.where(ends_EJ, values_EY[e_E1, layer_EJ + 1], next_EJ)
    others_EJ = _row_sums(chain.rewards_EJ, layer_EJ)[e_E1, layer_EJ] - turn_sums(
        chain.rewards_EJ, chain
    )
    rewards_EJ = chain.rewards_EJ + np.where(ends_EJ, others_EJ, 0)
    is_last_EJ = ends_EJ & (layer_EJ == layer_EJ.max(1, keepdims=True))
    discounts_EJ = gamma * chain.mask_EJ * ~is_last_EJ
    deltas_EJ = rewards_EJ + discounts_EJ * next_EJ - values_EJ
    share_EJ = begins_EJ / turns_EY[e_E1, layer_EJ]

    advantages_EJ, means_EY = np.zeros(deltas_EJ.shape), np.zeros(turns_EY.shape)
    ahead_E, e = np.zeros(len(deltas_EJ)), np.arange(len(deltas_EJ))
    for j in reversed(range(deltas_EJ.shape[1])):
        ahead_E = np.where(ends_EJ[:, j], means_EY[e, layer_EJ[:, j] + 1], ahead_E)
        ahead_E = deltas_EJ[:, j] + discounts_EJ[:, j] * gae_lambda * ahead_E
        advantages_EJ[:, j] = ahead_E
        means_EY[e, layer_EJ[:, j]] += share_EJ[:, j] * ahead_E
    return advantages_EJ, advantages_EJ + values_EJ


def turn_sums(x_EJ: np.ndarray, chain: Chain) -> np.ndarray:
    """Sum over the links of each link's turn."""
    number_EJ = chain.turn.number_EJ
    return np.take_along_axis(_row_sums(x_EJ, number_EJ), number_EJ, axis=1)


def _borders(chain: Chain) -> tuple[np.ndarray, np.ndarray]:
    """(True at the first link of each turn, True at the last link)."""
    real_EJ = chain.mask_EJ > 0
    numbers = np.where(real_EJ, chain.turn.number_EJ, -1)
    before_EJ = np.pad(numbers[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    after_EJ = np.pad(numbers[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    return real_EJ & (numbers != before_EJ), real_EJ & (numbers != after_EJ)


def _row_sums(x_EJ: np.ndarray, labels_EJ: np.ndarray) -> np.ndarray:
    """Sum of each label of a row, ``[E, labels + 1]``; the last column is 0."""
    sums = np.zeros((len(x_EJ), np.max(labels_EJ) + 2))
    np.add.at(sums, (np.arange(len(x_EJ))[:, None], labels_EJ), x_EJ)
    return sums
