"""Advantages over further samples: of the same turn, or of the agent alone on the task.

A KL in the reward is charged to the turn that made it, and to no other turn. The KL of a branch's
later turns is not computed, so that of the trunk's other turns must not count either.
"""

from __future__ import annotations

import numpy as np

from marft_jax.learning.advantages import reward_sizes
from marft_jax.learning.chain import Chain
from marft_jax.learning.group_stats import Cells
from marft_jax.learning.layers import turn_sums


def sibling_advantage(chain: Chain, by_step: bool = False) -> np.ndarray:
    """Leave-one-out advantage of a turn: A_i = V_i − mean of V_j over its siblings j ≠ i.

    Siblings are samples of the same turn from the same state: the trunk and its K branches at that
    turn. V of a branch is its return. V of the trunk at turn t is the mean over the samples of the
    turn after it, and so on to the end:

        V_t = (V_{t+1} + Σ returns of the branches at t+1) / (K_{t+1} + 1);  V of the last turn: R

    This is unbiased, also where the number of turns depends on what is sampled; a mean over all
    leaves is not. With ``by_step`` V is the turn's own reward. With a KL in the reward, V_i
    includes −KL of the turn itself. A turn without siblings gets 0, and all siblings get exactly 0
    where every V is the same.

    Sources: leave-one-out credit by replay, C3 (arXiv 2603.06859); AT-GRPO (arXiv 2510.11062).
    """
    paid_EJ = chain.rewards_EJ.astype(np.float64) + chain.kl_EJ
    returns_E, kl_E, sizes_E = paid_EJ.sum(1), chain.kl_EJ.sum(1), reward_sizes(chain)[:, 0]
    trunk_E, branch_E = chain.origin.trunk_E, chain.origin.branch_E
    advantages_EJ = np.zeros_like(chain.rewards_EJ)
    for trunk in np.flatnonzero(branch_E < 0):
        tree_E, later = trunk_E == trunk, returns_E[trunk]
        for turn in reversed(np.unique(branch_E[tree_E & (branch_E >= 0)])):
            siblings = np.flatnonzero(tree_E & (branch_E == turn))
            is_own_J = chain.turn.number_EJ[trunk] == turn
            earned = paid_EJ[trunk, is_own_J].sum() if by_step else later
            later += (returns_E[siblings] - later).sum() / (len(siblings) + 1)
            value = earned - chain.kl_EJ[trunk, is_own_J].sum()
            values = np.asarray([value, *(returns_E - kl_E)[siblings]]) - value
            tree = Cells(np.ones(len(values)), np.zeros(len(values), int))
            values = tree.zero_same(values, sizes_E[tree_E].max())
            apart = values - (values.sum() - values) / len(siblings)
            advantages_EJ[trunk] += apart[0] * is_own_J
            advantages_EJ[siblings] = apart[1:, None]
    return advantages_EJ * chain.mask_EJ


def inverse_chances(chain: Chain) -> np.ndarray:
    """Number of turns of each chain's trunk, divided by its mean over trunks, ``[E, 1]``.

    Where one of T turns was drawn to have branches, T weighs the turn. Else short episodes, such as
    those that end on success, would count more.

    Source: Horvitz and Thompson 1952.
    """
    is_trunk_E, turns_E = chain.origin.branch_E < 0, chain.weight_EJ.sum(1).round()
    return (turns_E[chain.origin.trunk_E] / turns_E[is_trunk_E].mean())[:, None]


def solo_advantage(chain: Chain) -> np.ndarray:
    """A = R − R_solo: the return of the turn's episode minus what its agent earns alone.

    With a KL in the reward, R includes −KL of the turn itself. The advantage is exactly 0 where all
    samples of an agent on a task earn R_solo, and where R_solo is unknown.

    Source: CCPO, arXiv 2603.21563.
    """
    returns_E1 = (chain.rewards_EJ.astype(np.float64) + chain.kl_EJ).sum(1, keepdims=True)
    solo_EJ = chain.turn.solo_return_EJ
    apart_EJ = returns_E1 - solo_EJ - turn_sums(chain.kl_EJ, chain)
    apart_EJ = np.where(np.isnan(solo_EJ), 0, apart_EJ) * chain.mask_EJ
    over = Cells(chain.weight_EJ, chain.group_EJ).split(chain.agent_EJ)
    return over.zero_same(apart_EJ, reward_sizes(chain))
