"""Advantages along the team's chain of decisions, and their normalisation.

A chain's links are the turns of an episode in acting order (action level) or the action tokens of
all its turns in that order (token level): it runs across agents and across steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from marft_jax.errors import BadInput
from marft_jax.learning.batch import Chain
from marft_jax.plugins import imported
from marft_jax.user_code import shown


def gae(
    rewards_EJ: np.ndarray,
    values_EJ: np.ndarray,
    next_values_EJ: np.ndarray,
    discounts_EJ: np.ndarray,
    gae_lambda: float,
) -> tuple[np.ndarray, np.ndarray]:
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


def following(values_EJ: np.ndarray) -> np.ndarray:
    """V' of each link: the value of the next one, 0 behind the last."""
    return np.pad(values_EJ[:, 1:], ((0, 0), (0, 1)))


def returns_to_go(chain: Chain) -> np.ndarray:
    """Undiscounted sum of a link's reward and of all that follow it in its episode."""
    nothing_EJ = np.zeros_like(chain.rewards_EJ)
    return gae(chain.rewards_EJ, nothing_EJ, nothing_EJ, chain.continues_EJ, 1.0)[0]


def sizes(chain: Chain, values_EJ: np.ndarray | None) -> np.ndarray:
    """Sizes of the numbers that an advantage is computed from: |V| + Σ |r| of its episode.

    Their rounding is a millionth of that or less, however much they cancel out.
    """
    total_E1 = np.abs(chain.rewards_EJ).sum(1, keepdims=True)
    return np.abs(np.zeros_like(chain.rewards_EJ) if values_EJ is None else values_EJ) + total_E1


def minus_like(returns_EJ: np.ndarray, sizes_EJ: np.ndarray, chain: Chain) -> np.ndarray:
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


def minus_own(
    returns_EJ: np.ndarray, sizes_EJ: np.ndarray, chain: Chain, mean_X: np.ndarray
) -> np.ndarray:
    """Returns minus a mean of each agent's; 0 where an agent's differ from it by rounding only."""
    change_EJ = returns_EJ - mean_X[chain.agent_EJ]
    return but_rounding(change_EJ, chain.weight_EJ, chain.agent_EJ, returns_EJ.size, sizes_EJ)


def agent_means(x_EJ: np.ndarray, chain: Chain, agents: int) -> tuple[np.ndarray, np.ndarray]:
    """(means, turns) of each agent; every turn weighs one."""
    turns_X = _total(chain.weight_EJ, chain.agent_EJ, agents)
    total_X = _total(x_EJ * chain.weight_EJ, chain.agent_EJ, agents)
    return total_X / np.maximum(turns_X, 1), turns_X


def normalize_chain(
    advantages_EJ: np.ndarray,
    chain: Chain,
    how: str,
    sizes_EJ: np.ndarray | None = None,
    compared: bool = False,
) -> np.ndarray:
    """Advantages with deviation 1 within what ``how`` (``algo.normalize``) names, and mean 0.

    Advantages that were ``compared`` with like turns are divided by their root mean square and not
    shifted again, so that a place where all samples earn the same stays exactly 0 whatever others
    earned.
    """
    return find_normalizer(how)(advantages_EJ, chain, sizes_EJ, compared)


Normalizer = Callable[[np.ndarray, Chain, np.ndarray | None, bool], np.ndarray]
"""(advantages_EJ, chain, sizes_EJ, compared) to advantages_EJ, see ``normalize_chain``."""


def _over(weights: str, cells: str | None) -> Normalizer:
    """Statistics over cells of the chain; in ``episode``, every episode weighs one."""

    def normalizer(
        advantages_EJ: np.ndarray, chain: Chain, sizes_EJ: np.ndarray | None, compared: bool
    ) -> np.ndarray:
        weights_EJ = episode_weights(chain) if weights == "episode" else chain.weight_EJ
        cells_EJ = None if cells is None else getattr(chain, cells)
        most, shift = advantages_EJ.size, not compared
        return normalize(advantages_EJ, weights_EJ, cells_EJ, most, sizes_EJ, shift)

    return normalizer


def _by_place(
    advantages_EJ: np.ndarray, chain: Chain, sizes_EJ: np.ndarray | None, compared: bool
) -> np.ndarray:
    """Each agent's n-th turn in a group; a place with one turn is scaled with its group."""
    rest = advantages_EJ, chain, sizes_EJ, compared
    alone_EJ = _is_alone(chain.weight_EJ, chain.cell_EJ)
    return np.where(alone_EJ, _over("episode", "group_EJ")(*rest), _over("turn", "cell_EJ")(*rest))


NORMALIZERS: dict[str, Normalizer] = {
    "batch": _over("turn", None),
    "agent": _over("turn", "agent_EJ"),
    "group": _over("episode", "group_EJ"),
    "group_turn": _by_place,
    "none": lambda advantages_EJ, *_: advantages_EJ,
}
"""Every turn weighs one, however many tokens it has; in ``group`` every episode.

Sources: batch: MARFT; agent: Dr. MAS; group: GRPO (Shao et al. 2024); group_turn: AT-GRPO.
"""


def find_normalizer(name: str) -> Normalizer:
    """A normaliser of the table, or your ``f(advantages_EJ, chain)``, as ``package.module:f``.

    Raises:
        BadInput: there is none.
    """
    if name in NORMALIZERS:
        return NORMALIZERS[name]
    function = imported(name, "--algo.normalize", ["auto", *NORMALIZERS])
    if not callable(function):
        raise BadInput(f"--algo.normalize: {name!r} is no function; name one")

    def normalizer(advantages_EJ: np.ndarray, chain: Chain, *_: Any) -> np.ndarray:
        return like(advantages_EJ, function(advantages_EJ, chain), f"--algo.normalize {name}")

    return normalizer


def like(x: np.ndarray, value: Any, what: str) -> np.ndarray:
    """Checks what a user's function returned: numbers of the shape of ``x``.

    Raises:
        BadInput: it is something else.
    """
    try:
        numbers = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        numbers = None
    if numbers is None or numbers.shape != x.shape:
        raise BadInput(f"{what}: expected an array of shape {x.shape}, got {shown(value)}")
    return numbers


def episode_weights(chain: Chain) -> np.ndarray:
    """Weights of the links such that those of an episode add up to one."""
    turns_E1 = np.maximum(chain.weight_EJ.sum(1, keepdims=True), 1)
    return chain.weight_EJ / turns_E1


def normalize(
    x: np.ndarray,
    weights: np.ndarray,
    cells: np.ndarray | None = None,
    n_cells: int = 1,
    sizes: np.ndarray | None = None,
    shift: bool = True,
) -> np.ndarray:
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


def centred(
    x: np.ndarray, weights: np.ndarray, cells: np.ndarray, n_cells: int, sizes: np.ndarray
) -> np.ndarray:
    """x minus the weighted mean of its cell; exactly 0 in a cell without spread.

    ``sizes`` says how large the numbers are that x was computed from.
    """
    return but_rounding(x - mean_by(x, weights, cells, n_cells), weights, cells, n_cells, sizes)


_ROUNDING = 1e-5  # of the numbers they come from: differences up to this are none


def but_rounding(
    change: np.ndarray, weights: np.ndarray, cells: np.ndarray, n_cells: int, sizes: np.ndarray
) -> np.ndarray:
    """Differences; exactly 0 in cells where their rms is no more than 1e-5 of the sizes'.

    Otherwise a mean that misses by one rounding would be divided by a deviation of rounding, and
    Adam would take a full step for it. What is not finite stays.
    """
    own, behind = (_rms_by(y, weights, cells, n_cells) for y in (change, sizes))
    return np.where(own <= _ROUNDING * behind, 0, change)


def mean_by(x: np.ndarray, weights: np.ndarray, cells: np.ndarray, n_cells: int) -> np.ndarray:
    """For each entry, the weighted mean of its cell: exactly x where all entries are equal.

    The cell's maximum is subtracted before, and added after averaging, because a weighted mean of
    equal numbers misses them by a rounding.
    """
    top_X = np.full(n_cells, -np.inf)
    np.maximum.at(top_X, np.ravel(cells), np.ravel(np.where(weights > 0, x, -np.inf)))
    top = np.where(np.isfinite(top_X), top_X, 0)[cells]
    return top + _mean_by(x - top, weights, cells, n_cells)


def _rms_by(x: np.ndarray, weights: np.ndarray, cells: np.ndarray, n_cells: int) -> np.ndarray:
    """For each entry, the weighted root mean square of its cell."""
    return np.sqrt(_mean_by(np.square(x), weights, cells, n_cells))


def _mean_by(x: np.ndarray, weights: np.ndarray, cells: np.ndarray, n_cells: int) -> np.ndarray:
    count_X = _total(weights, cells, n_cells)
    return (_total(x * weights, cells, n_cells) / np.where(count_X > 0, count_X, 1))[cells]


def _is_alone(weights: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """True in cells whose weights add up to one: of one turn, or of one episode."""
    return _total(weights, cells, weights.size)[cells] < 1.5


def _total(x: np.ndarray, cells: np.ndarray, n_cells: int) -> np.ndarray:
    """The sum of each cell."""
    x, cells = np.broadcast_arrays(np.asarray(x, np.float64), cells)
    return np.bincount(cells.ravel(), x.ravel(), n_cells)
