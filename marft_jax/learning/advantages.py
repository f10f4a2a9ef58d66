"""Advantages along the team's chain of decisions, and their normalisation.

A chain's links are the turns of an episode in acting order (action level) or the action tokens of
all its turns in that order (token level): it runs across agents and across steps. Turns that acted
without seeing each other are a layer, and stand side by side in it. In a game each player has a
chain of its own, and is compared and normalised with nobody else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from marft_jax.config import Algo
from marft_jax.errors import BadInput
from marft_jax.learning.batch import Chain, chain_of_turns
from marft_jax.plugins import load_plugin, shown
from marft_jax.types import Episode


class Layers(NamedTuple):
    """Order of the links by D: behind the last link of a turn comes the next layer."""

    number_EJ: np.ndarray  # of each link's layer
    ends_EJ: np.ndarray  # True for the last link of a turn
    share_EJ: np.ndarray  # 1 / the turns of the layer for the first link of a turn, else 0


def gae(
    rewards_EJ: np.ndarray,
    values_EJ: np.ndarray,
    next_values_EJ: np.ndarray,
    discounts_EJ: np.ndarray,
    gae_lambda: float,
    layers: Layers | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """δ_j = r_j + d_j·V'_j − V_j;  A_j = δ_j + d_j·λ·A_{j+1};  return_j = A_j + V_j.

    Args:
        rewards_EJ: reward of each link.
        values_EJ: V of each link.
        next_values_EJ: V' of what follows it (the next link, or a bootstrap).
        discounts_EJ: γ where the chain goes on after this link, 0 where the episode ends.
        gae_lambda: λ.
        layers: behind the last link of a turn A_{j+1} is the mean over the first links of the next
            layer; without them, it is that of the next link.

    Returns:
        (advantages_EJ, returns_EJ).

    Source: Schulman et al. 2015 (GAE), equation 16; the chain across agents is MARFT's (section
    4.2).
    """
    deltas_EJ = rewards_EJ + discounts_EJ * next_values_EJ - values_EJ
    advantages_EJ = np.zeros(deltas_EJ.shape)
    ahead_E, e = np.zeros(len(deltas_EJ)), np.arange(len(deltas_EJ))
    means_EY = np.zeros((len(e), 2 if layers is None else np.max(layers.number_EJ) + 2))
    for j in reversed(range(deltas_EJ.shape[1])):
        if layers is not None:
            layer_E = layers.number_EJ[:, j]
            ahead_E = np.where(layers.ends_EJ[:, j], means_EY[e, layer_E + 1], ahead_E)
        ahead_E = deltas_EJ[:, j] + discounts_EJ[:, j] * gae_lambda * ahead_E
        advantages_EJ[:, j] = ahead_E
        if layers is not None:
            means_EY[e, layer_E] += layers.share_EJ[:, j] * ahead_E
    return advantages_EJ, advantages_EJ + values_EJ


def gae_by_layer(
    chain: Chain, values_EJ: np.ndarray, gamma: float, gae_lambda: float
) -> tuple[np.ndarray, np.ndarray]:
    """``gae`` along the layers of D: discounts count these, and a layer is paid as a whole.

    Turns of one layer did not see each other. Chained one after another, a turn's δ would hold
    nothing that it did, as the value of its sibling does not depend on it. So V' behind a turn is
    the mean of the next layer's values, and a turn is paid what its siblings are paid, too. Where
    every turn saw the one before it, this is the chain of MARFT.

    Returns:
        (advantages_EJ, returns_EJ).
    """
    real_EJ = chain.mask_EJ > 0
    turn_EJ = np.pad(np.where(real_EJ, chain.turn_EJ, -1), ((0, 0), (1, 1)), constant_values=-1)
    begins_EJ = real_EJ & (turn_EJ[:, 1:-1] != turn_EJ[:, :-2])
    ends_EJ = real_EJ & (turn_EJ[:, 1:-1] != turn_EJ[:, 2:])
    e_E1 = np.arange(len(real_EJ))[:, None]
    turns_EY = np.maximum(_row_sums(begins_EJ, chain.layer_EJ), 1)
    next_EJ = np.pad(values_EJ[:, 1:], ((0, 0), (0, 1)))
    layer_EY = _row_sums(values_EJ * begins_EJ, chain.layer_EJ) / turns_EY
    next_EJ = np.where(ends_EJ, layer_EY[e_E1, chain.layer_EJ + 1], next_EJ)
    siblings_EJ = _row_sums(chain.rewards_EJ, chain.layer_EJ)[e_E1, chain.layer_EJ]
    siblings_EJ = siblings_EJ - _row_sums(chain.rewards_EJ, chain.turn_EJ)[e_E1, chain.turn_EJ]
    rewards_EJ = chain.rewards_EJ + np.where(ends_EJ, siblings_EJ, 0)
    is_last_EJ = ends_EJ & (chain.layer_EJ == chain.layer_EJ.max(1, keepdims=True))
    share_EJ = begins_EJ / turns_EY[e_E1, chain.layer_EJ]
    layers = Layers(chain.layer_EJ, ends_EJ, share_EJ)
    discounts_EJ = gamma * chain.mask_EJ * ~is_last_EJ
    return gae(rewards_EJ, values_EJ, next_EJ, discounts_EJ, gae_lambda, layers)


def _row_sums(x_EJ: np.ndarray, labels_EJ: np.ndarray) -> np.ndarray:
    """Sum of each label of a row, and one label more, whose sum is 0; ``[E, labels + 1]``."""
    sums = np.zeros((len(x_EJ), np.max(labels_EJ) + 2))
    np.add.at(sums, (np.arange(len(x_EJ))[:, None], labels_EJ), x_EJ)
    return sums


def returns_to_go(chain: Chain) -> np.ndarray:
    """Undiscounted sum of a link's reward and of all that follow it in its episode."""
    zeros_EJ = np.zeros_like(chain.rewards_EJ)
    return gae(chain.rewards_EJ, zeros_EJ, zeros_EJ, chain.continues_EJ, 1.0)[0]


def sizes(chain: Chain, values_EJ: np.ndarray | None) -> np.ndarray:
    """Sizes of the numbers that an advantage is computed from: |V| + what its episode adds up.

    The latter is Σ |r|, or what the rewards were added up from where that is larger. Their
    rounding is a millionth of that or less, however much they cancel out.
    """
    values_EJ = np.zeros_like(chain.rewards_EJ) if values_EJ is None else values_EJ
    added_E = np.maximum(np.abs(chain.rewards_EJ).sum(1), chain.size_E)
    return np.abs(values_EJ) + added_E[:, None]


class Cells(NamedTuple):
    """Sets of the entries of an array, for statistics of each set."""

    weights: np.ndarray  # of each entry; 0 for padding
    cells: np.ndarray  # the number of each entry's cell

    def mean(self, x: np.ndarray) -> np.ndarray:
        """Weighted mean of each entry's cell."""
        weights_Z = _sums(self.weights, self.cells)
        sums_Z = _sums(x * self.weights, self.cells)
        return (sums_Z / np.where(weights_Z > 0, weights_Z, 1))[self.cells]

    def rms(self, x: np.ndarray) -> np.ndarray:
        """Weighted root mean square of each entry's cell."""
        return np.sqrt(self.mean(np.square(x)))

    def split(self, labels: np.ndarray) -> Cells:
        """Cells of the entries of one cell that have the same label, a number from 0."""
        return self._replace(cells=self.cells * (np.max(labels) + 1) + labels)

    def is_single(self) -> np.ndarray:
        """True in cells whose weights add up to one: of one turn, or of one episode."""
        return _sums(self.weights, self.cells)[self.cells] < 1.5


def _sums(x: np.ndarray, cells: np.ndarray, least: int = 0) -> np.ndarray:
    """Sum of each cell, ``[Z]``."""
    x, cells = np.broadcast_arrays(np.asarray(x, np.float64), cells)
    return np.bincount(cells.ravel(), x.ravel(), least)


def subtract_mean(x: np.ndarray, over: Cells, sizes: np.ndarray) -> np.ndarray:
    """Subtracts the weighted mean of each cell; exactly 0 in a cell without spread.

    The cell's maximum is subtracted first, because a weighted mean of equal numbers misses them by
    a rounding.

    Args:
        sizes: how large the numbers are that x was computed from.
    """
    top_Z = np.full(np.max(over.cells) + 1, -np.inf)
    np.maximum.at(top_Z, np.ravel(over.cells), np.ravel(np.where(over.weights > 0, x, -np.inf)))
    top = np.where(np.isfinite(top_Z), top_Z, 0)[over.cells]
    return zero_rounding(x - (top + over.mean(x - top)), over, sizes)


ROUNDING = 1e-5  # differences up to this part of the numbers that they come from are none


def zero_rounding(change: np.ndarray, over: Cells, sizes: np.ndarray) -> np.ndarray:
    """Sets differences to exactly 0 in cells where their rms is at most 1e-5 of the sizes'.

    Otherwise a mean that misses by one rounding would be divided by a deviation of rounding, and
    Adam would take a full step for it. What is not finite stays.
    """
    return np.where(is_rounding(over.rms(change), over.rms(sizes)), 0, change)


def is_rounding(spread: np.ndarray, size: np.ndarray) -> np.ndarray:
    """True where a spread is at most 1e-5 of a size; both are finite."""
    return (spread <= ROUNDING * size) & np.isfinite(spread) & np.isfinite(size)


def minus_place_mean(returns_EJ: np.ndarray, sizes_EJ: np.ndarray, chain: Chain) -> np.ndarray:
    """Returns minus the mean of the turns of the same place, with which they are compared.

    A place is (task, agent, n), the agent's n-th turn of its episode, so that turns which are paid
    differently by their place are not compared. A turn whose place no other sample reached is
    compared with all turns of its task, where every episode weighs one; a sample that is the only
    one of its task, with nothing.
    """
    place, group = _places(chain), _groups(chain)
    by_group_EJ = np.where(group.is_single(), 0, subtract_mean(returns_EJ, group, sizes_EJ))
    by_place_EJ = subtract_mean(returns_EJ, place, sizes_EJ)
    chosen_EJ = np.where(place.is_single(), by_group_EJ, by_place_EJ)
    return np.where(chain.mask_EJ > 0, chosen_EJ, 0)  # padding counts as a link of the first group


def minus_siblings(chain: Chain, by_step: bool = False) -> np.ndarray:
    """Leave-one-out advantage of a turn over its siblings: A_i = V_i − mean of V_j over j ≠ i.

    Siblings are samples of the same turn from the same state: the trunk and its branches at that
    turn. V of a branch is its return. V of the trunk at turn t is the mean return of the trunk and
    of all branches at later turns. With ``by_step`` V is the turn's own reward. A turn without
    siblings gets 0, and all get exactly 0 where every sibling is worth the same.

    A KL in the reward is charged to the turn that made it, −kl_i in V_i, and to no other: of a
    branch's later turns nobody knows the KL, so the trunk's other turns do not count either.

    Sources: leave-one-out credit by replay, C3 (arXiv 2603.06859); AT-GRPO (arXiv 2510.11062).
    """
    paid_EJ = chain.rewards_EJ.astype(np.float64) + chain.kl_EJ
    returns_E, kl_E, sizes_E = paid_EJ.sum(1), chain.kl_EJ.sum(1), sizes(chain, None)[:, 0]
    advantages_EJ = np.zeros_like(chain.rewards_EJ)
    for trunk in np.flatnonzero(chain.branch_E < 0):
        tree_E = chain.trunk_E == trunk
        for turn in np.unique(chain.branch_E[tree_E & (chain.branch_E >= 0)]):
            siblings = np.flatnonzero(tree_E & (chain.branch_E == turn))
            leaves_E = tree_E & ((chain.branch_E < 0) | (chain.branch_E > turn))
            is_own_J = chain.turn_EJ[trunk] == turn
            own = paid_EJ[trunk, is_own_J].sum(keepdims=True) if by_step else returns_E[leaves_E]
            value = own[0] + (own - own[0]).mean() - chain.kl_EJ[trunk, is_own_J].sum()
            values = np.asarray([value, *(returns_E - kl_E)[siblings]]) - value
            if is_rounding(np.abs(values).max(), sizes_E[tree_E].max()):
                continue
            apart = values - (values.sum() - values) / len(siblings)
            advantages_EJ[trunk] += apart[0] * is_own_J
            advantages_EJ[siblings] = apart[1:, None]
    return advantages_EJ * chain.mask_EJ


def minus_alone(chain: Chain) -> np.ndarray:
    """Return of each turn's episode minus what its agent earns alone on the task.

    Exactly 0 where all samples of an agent on a task earn that, or nobody knows it. A KL in the
    reward is charged to its own turn, as in ``minus_siblings``: nobody knows it of agents alone.

    Source: CCPO, arXiv 2603.21563.
    """
    returns_E1 = (chain.rewards_EJ.astype(np.float64) + chain.kl_EJ).sum(1, keepdims=True)
    kl_EK = _row_sums(chain.kl_EJ, chain.turn_EJ)
    apart_EJ = returns_E1 - chain.alone_EJ - np.take_along_axis(kl_EK, chain.turn_EJ, axis=1)
    apart_EJ = np.where(np.isnan(chain.alone_EJ), 0, apart_EJ) * chain.mask_EJ
    over = Cells(chain.weight_EJ, chain.group_EJ).split(chain.agent_EJ)
    return zero_rounding(apart_EJ, over, sizes(chain, None))


def groups_with_signal(
    episodes: Sequence[Episode], rewards: Sequence[np.ndarray], algo: Algo | None = None
) -> set[int]:
    """Finds the groups in which turns that are compared differ in return-to-go.

    Others would teach nothing.

    Args:
        rewards: of the turns of each episode.
        algo: the settings that credited them; by default nothing was added to a reward.
    """
    chain = chain_of_turns(episodes, rewards, algo)
    differences_EJ = minus_place_mean(returns_to_go(chain), sizes(chain, None), chain)
    differ_E = np.any(differences_EJ, axis=1)
    return {episodes[e].group for e in chain.episode_E[differ_E]}


def minus_moving_mean(
    returns_EJ: np.ndarray, sizes_EJ: np.ndarray, over: Cells, mean_P: np.ndarray
) -> np.ndarray:
    """Returns minus a given mean of each cell; 0 in a cell that differs from it by rounding."""
    return zero_rounding(returns_EJ - mean_P[over.cells], over, sizes_EJ)


ROLES = 8  # of an agent: its first, second, ... turn of an episode, and all from the eighth on


def roles(chain: Chain, baseline: str | None) -> np.ndarray:
    """Number of the moving mean that each link is compared with: its agent's, or its role's."""
    if baseline == "role":
        return chain.agent_EJ * ROLES + np.minimum(chain.nth_EJ, ROLES - 1)
    return chain.agent_EJ


def role_means(
    x_EJ: np.ndarray, chain: Chain, labels_EJ: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """(means, turns) of each of so many labels; every turn weighs one."""
    turns_P = _sums(chain.weight_EJ, labels_EJ, count)
    return _sums(x_EJ * chain.weight_EJ, labels_EJ, count) / np.maximum(turns_P, 1), turns_P


def _groups(chain: Chain) -> Cells:
    """Samples of one task; the links of an episode weigh one together."""
    turns_E1 = np.maximum(chain.weight_EJ.sum(1, keepdims=True), 1)
    return Cells(chain.weight_EJ / turns_E1, chain.group_EJ)


def _places(chain: Chain) -> Cells:
    """Turns of one place in the samples of one task."""
    return Cells(chain.weight_EJ, chain.group_EJ).split(chain.place_EJ)


def normalize(
    x: np.ndarray, over: Cells, sizes: np.ndarray | None = None, shift: bool = True
) -> np.ndarray:
    """(x − mean) / (std + 1e-8) with each cell's weighted mean and population deviation.

    A cell without spread (see ``subtract_mean``) becomes exactly 0.

    Args:
        sizes: how large the numbers are that x was computed from; |x| by default.
        shift: subtract the mean; else it counts as 0.
    """
    if shift:
        x = subtract_mean(x, over, x if sizes is None else sizes)
    return x / (over.rms(x) + 1e-8)


Normalizer = Callable[[np.ndarray, Chain, np.ndarray | None, bool], np.ndarray]
"""(advantages_EJ, chain, sizes_EJ, compared) to advantages_EJ of mean 0 and deviation 1, or less
where a critic's errors are larger than the differences in what was earned.

Advantages that were ``compared`` with turns of the same place are divided by their root mean square
and not shifted again, so that a place where all samples earn the same stays exactly 0 whatever
others earned.
"""


def _normalize_by(
    cells_of: Callable[[Chain], Cells],
    advantages_EJ: np.ndarray,
    chain: Chain,
    sizes_EJ: np.ndarray | None,
    compared: bool,
) -> np.ndarray:
    """``normalize``; times min(1, σ(R) / σ(A)) unless they were ``compared``.

    σ is a cell's deviation around the mean of each place (an agent's n-th turn), R the
    returns-to-go: turns that are paid differently by their place have not earned more or less. A
    critic's errors are in the advantages, too, and where they are larger than the differences in
    what was earned, deviation 1 would make a full step of them. The factor is 1 where the critic
    explains anything, and exactly 0 where all earned the same.
    """
    over = cells_of(chain)
    normal_EJ = normalize(advantages_EJ, over, sizes_EJ, shift=not compared)
    if compared:
        return normal_EJ
    place = over.split(chain.place_EJ)
    earned_EJ = _earned(chain, place)
    spread_EJ = over.rms(advantages_EJ - place.mean(advantages_EJ))
    return normal_EJ * np.minimum(1, over.rms(earned_EJ) / (spread_EJ + 1e-8))


def _earned(chain: Chain, place: Cells) -> np.ndarray:
    """Returns-to-go minus the mean of each place; exactly 0 where a place earned the same."""
    return subtract_mean(returns_to_go(chain), place, sizes(chain, None))


def earns_differ(chain: Chain) -> bool:
    """True where any turn earned another return-to-go than the same turn of other episodes."""
    place = Cells(chain.weight_EJ, chain.player_EJ).split(chain.place_EJ)
    return bool((_earned(chain, place) * chain.mask_EJ).any())


def _normalize_in_group(
    cells_of: Callable[[Chain], Cells], advantages_EJ: np.ndarray, chain: Chain, *how: Any
) -> np.ndarray:
    """``_normalize_by`` cells of a group; one of a single turn is scaled with its group."""
    by_group_EJ = _normalize_by(_groups, advantages_EJ, chain, *how)
    by_cell_EJ = _normalize_by(cells_of, advantages_EJ, chain, *how)
    return np.where(cells_of(chain).is_single(), by_group_EJ, by_cell_EJ)


NORMALIZERS: dict[str, Normalizer] = {
    "batch": functools.partial(
        _normalize_by, lambda chain: Cells(chain.weight_EJ, chain.player_EJ)
    ),
    "agent": functools.partial(_normalize_by, lambda c: Cells(c.weight_EJ, c.agent_EJ)),
    "group": functools.partial(_normalize_by, _groups),
    "group_turn": functools.partial(_normalize_in_group, _places),
    "group_agent": functools.partial(
        _normalize_in_group, lambda c: Cells(c.weight_EJ, c.group_EJ).split(c.agent_EJ)
    ),
    "none": lambda advantages_EJ, *_: advantages_EJ,
}
"""Every turn weighs one, however many tokens it has; in ``group`` every episode.

Sources: batch: MARFT; agent: Dr. MAS; group: GRPO (Shao et al. 2024); group_turn: AT-GRPO
(arXiv 2510.11062); group_agent: the same with all turns of an agent together.
"""


def find_normalizer(name: str) -> Normalizer:
    """Finds a normaliser of the table, or your ``f(advantages_EJ, chain)``: ``package.module:f``.

    Raises:
        BadInput: there is none.
    """
    if name in NORMALIZERS:
        return NORMALIZERS[name]
    function = load_plugin(name, "--algo.normalize", NORMALIZERS)
    if not callable(function):
        raise BadInput(f"--algo.normalize: {name!r} is no function; name one")

    def normalizer(advantages_EJ: np.ndarray, chain: Chain, *_: Any) -> np.ndarray:
        return check_shape(
            advantages_EJ, function(advantages_EJ, chain), f"--algo.normalize {name}"
        )

    return normalizer


def check_shape(x: np.ndarray, value: Any, what: str) -> np.ndarray:
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
