"""Advantages along the team's chain of decisions, and their normalisation.

A chain's links are the turns of an episode in acting order (action level) or the action tokens of
all its turns in that order (token level): it runs across agents and across steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np


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

    Source: Schulman et al. 2015 (GAE), equation 16; the chain across agents is MARFT's (section
    4.2).
    """
    deltas_EJ = rewards_EJ + discounts_EJ * next_values_EJ - values_EJ
    advantages_EJ = np.zeros(deltas_EJ.shape)
    ahead_E = np.zeros(len(deltas_EJ))
    for j in reversed(range(deltas_EJ.shape[1])):
        ahead_E = deltas_EJ[:, j] + discounts_EJ[:, j] * gae_lambda * ahead_E
        advantages_EJ[:, j] = ahead_E
    return advantages_EJ, advantages_EJ + values_EJ


def following(values_EJ):
    """V' of each link: the value of the next one, 0 behind the last."""
    return np.pad(values_EJ[:, 1:], ((0, 0), (0, 1)))


def returns_to_go(chain):
    """Undiscounted sum of a link's reward and of all that follow it in its episode."""
    nothing_EJ = np.zeros_like(chain.rewards_EJ)
    return gae(chain.rewards_EJ, nothing_EJ, nothing_EJ, chain.continues_EJ, 1.0)[0]


def sizes(chain, values_EJ):
    """How large the numbers are that an advantage is computed from: |V| + Σ |r| of its episode.

    Their rounding is a millionth of that or less, however much they cancel out.
    """
    total_E1 = np.abs(chain.rewards_EJ).sum(1, keepdims=True)
    return np.abs(np.zeros_like(chain.rewards_EJ) if values_EJ is None else values_EJ) + total_E1


def minus_like(returns_EJ, sizes_EJ, chain):
    """Returns minus the mean of what they are compared with: turns of the same place.

    A place is (task, agent, n), the agent's n-th turn of its episode, so that turns which are paid
    differently by their place are not compared. A turn whose place no other sample reached is
    compared with all turns of its task, where every episode weighs one; a sample that is the only
    one of its task, with nothing.
    """
    everywhere, weights_EJ = returns_EJ.size, episode_weights(chain)
    by_place_EJ = centred(returns_EJ, chain.weight_EJ, chain.cell_EJ, everywhere, sizes_EJ)
    by_group_EJ = centred(returns_EJ, weights_EJ, chain.group_EJ, everywhere, sizes_EJ)
    by_group_EJ = np.where(_is_alone(weights_EJ, chain.group_EJ), 0, by_group_EJ)
    return np.where(_is_alone(chain.weight_EJ, chain.cell_EJ), by_group_EJ, by_place_EJ)


def minus_own(returns_EJ, sizes_EJ, chain, mean_X):
    """Returns minus a mean of each agent's; 0 where an agent's differ from it by rounding only."""
    change_EJ = returns_EJ - mean_X[chain.agent_EJ]
    return but_rounding(change_EJ, chain.weight_EJ, chain.agent_EJ, returns_EJ.size, sizes_EJ)


def agent_means(x_EJ, chain, agents: int):
    """(means, turns) of each agent; every turn weighs one."""
    turns_X = _total(chain.weight_EJ, chain.agent_EJ, agents)
    total_X = _total(x_EJ * chain.weight_EJ, chain.agent_EJ, agents)
    return total_X / np.maximum(turns_X, 1), turns_X


def normalize_chain(advantages_EJ, chain, how: str, sizes_EJ=None, compared: bool = False):
    """Advantages with deviation 1 within what ``algo.normalize`` names, and mean 0.

    Advantages that were ``compared`` with like turns are divided by their root mean square and not
    shifted again, so that a place where all samples earn the same stays exactly 0 whatever others
    earned. In ``group_turn``, a place with one turn is scaled with its group.

    Statistics weigh every turn once, however many tokens it has; in ``group`` every episode once.
    Sources: batch: MARFT; agent: Dr. MAS; group: GRPO (Shao et al. 2024); group_turn: AT-GRPO.
    """
    if how == "none":
        return advantages_EJ

    def over(weights_EJ, cells_EJ):
        n_cells, shift = advantages_EJ.size, not compared
        return normalize(advantages_EJ, weights_EJ, cells_EJ, n_cells, sizes_EJ, shift)

    if how == "batch":
        return over(chain.weight_EJ, None)
    if how == "agent":
        return over(chain.weight_EJ, chain.agent_EJ)
    by_group_EJ = over(episode_weights(chain), chain.group_EJ)
    if how == "group":
        return by_group_EJ
    by_place_EJ = over(chain.weight_EJ, chain.cell_EJ)
    return np.where(_is_alone(chain.weight_EJ, chain.cell_EJ), by_group_EJ, by_place_EJ)


def episode_weights(chain):
    """Weights of the links such that those of an episode add up to one."""
    turns_E1 = np.maximum(chain.weight_EJ.sum(1, keepdims=True), 1)
    return chain.weight_EJ / turns_E1


def normalize(
    x, weights, cells: Any = None, n_cells: int = 1, sizes: Any = None, shift: bool = True
):
    """(x − mean) / (std + 1e-8) with the weighted mean and population deviation.

    A set without spread (see ``centred``) becomes exactly 0.

    Args:
        x: any shape.
        weights: how much each entry counts; 0 for padding.
        cells: the cell (say, the agent) of each entry; statistics are taken per cell.
        n_cells: an upper bound of their numbers.
        sizes: how large the numbers are that x was computed from; |x| by default.
        shift: subtract the mean; else it counts as 0.
    """
    cells = np.zeros(x.shape, int) if cells is None else cells
    if shift:
        x = centred(x, weights, cells, n_cells, x if sizes is None else sizes)
    return x / (_rms_by(x, weights, cells, n_cells) + 1e-8)


def centred(x, weights, cells, n_cells: int, sizes):
    """x minus the weighted mean of its cell; exactly 0 in a cell without spread.

    ``sizes`` says how large the numbers are that x was computed from.
    """
    return but_rounding(x - mean_by(x, weights, cells, n_cells), weights, cells, n_cells, sizes)


_ROUNDING = 1e-5  # of the numbers they come from: differences up to this are none


def but_rounding(change, weights, cells, n_cells: int, sizes):
    """Differences; exactly 0 in cells where their rms is no more than 1e-5 of the sizes'.

    Otherwise a mean that misses by one rounding would be divided by a deviation of rounding, and
    Adam would take a full step for it. What is not finite stays.
    """
    own, behind = (_rms_by(y, weights, cells, n_cells) for y in (change, sizes))
    return np.where(own <= _ROUNDING * behind, 0, change)


def mean_by(x, weights, cells, n_cells: int):
    """For each entry, the weighted mean of its cell: exactly x where all entries are equal.

    The cell's maximum is subtracted before, and added after averaging, because a weighted mean of
    equal numbers misses them by a rounding.
    """
    top_X = np.full(n_cells, -np.inf)
    np.maximum.at(top_X, np.ravel(cells), np.ravel(np.where(weights > 0, x, -np.inf)))
    top = np.where(np.isfinite(top_X), top_X, 0)[cells]
    return top + _mean_by(x - top, weights, cells, n_cells)


def _rms_by(x, weights, cells, n_cells: int):
    """For each entry, the weighted root mean square of its cell."""
    return np.sqrt(_mean_by(np.square(x), weights, cells, n_cells))


def _mean_by(x, weights, cells, n_cells: int):
    count_X = _total(weights, cells, n_cells)
    return (_total(x * weights, cells, n_cells) / np.where(count_X > 0, count_X, 1))[cells]


def _is_alone(weights, cells):
    """True in cells whose weights add up to one: of one turn, or of one episode."""
    return _total(weights, cells, weights.size)[cells] < 1.5


def _total(x, cells, n_cells: int):
    """The sum of each cell."""
    x, cells = np.broadcast_arrays(np.asarray(x, np.float64), cells)
    return np.bincount(cells.ravel(), x.ravel(), n_cells)
