"""Normalisers: advantages to mean 0 and deviation 1 over a set of turns.

Every turn has the weight 1 however many tokens it has; in ``group`` every episode has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from marft_jax.errors import BadInput
from marft_jax.learning.advantages import (
    group_advantage,
    returns_to_go,
    reward_sizes,
    samples_of_task,
    turns_of_place,
)
from marft_jax.learning.chain import Chain
from marft_jax.learning.group_stats import Cells
from marft_jax.plugins import load_function, shown

Normalizer = Callable[[np.ndarray, Chain, bool], np.ndarray]
"""(advantages_EJ, chain, compared) to normalised advantages_EJ.

Advantages that were ``compared`` with turns of the same place have the mean 0 already. They are
divided and not shifted, so that a place where all samples earn the same stays exactly 0 whatever
others earned.
"""


def normalize(x: np.ndarray, over: Cells) -> np.ndarray:
    """(x − mean) / (std + 1e-8) with each cell's weighted mean and population deviation.

    A cell without spread becomes exactly 0.
    """
    return scale(group_advantage(x, over), over)


def scale(x: np.ndarray, over: Cells) -> np.ndarray:
    """x / (rms + 1e-8), with the root mean square of each cell."""
    return x / (over.rms(x) + 1e-8)


def _normalize_by(
    cells_of: Callable[[Chain], Cells], advantages_EJ: np.ndarray, chain: Chain, compared: bool
) -> np.ndarray:
    """``normalize``, times min(1, σ(R) / σ(A)) unless the advantages were ``compared``.

    σ is a cell's deviation around the mean of each place (an agent's n-th turn), and R the
    returns-to-go. Advantages contain the critic's errors. Where these are larger than the
    differences in what was earned, deviation 1 would make a full step of the errors. The factor is
    1 where the critic explains anything, and exactly 0 where all earned the same.
    """
    over = cells_of(chain)
    if compared:
        return scale(advantages_EJ, over)
    normal_EJ = normalize(advantages_EJ, over)
    place = over.split(chain.place_EJ)
    spread_EJ = over.rms(advantages_EJ - place.mean(advantages_EJ))
    return normal_EJ * np.minimum(1, over.rms(_earned(chain, place)) / (spread_EJ + 1e-8))


def _earned(chain: Chain, place: Cells) -> np.ndarray:
    """Returns-to-go minus the mean of each place; exactly 0 where a place earned the same."""
    return group_advantage(returns_to_go(chain), place, reward_sizes(chain))


def earns_differ(chain: Chain) -> bool:
    """True where any turn earned another return-to-go than the same turn of other episodes."""
    place = _players(chain).split(chain.place_EJ)
    return bool((_earned(chain, place) * chain.mask_EJ).any())


def _normalize_in_group(
    cells_of: Callable[[Chain], Cells], advantages_EJ: np.ndarray, chain: Chain, compared: bool
) -> np.ndarray:
    """``_normalize_by`` cells of a group; a cell of a single turn is scaled with its group."""
    by_group_EJ = _normalize_by(samples_of_task, advantages_EJ, chain, compared)
    by_cell_EJ = _normalize_by(cells_of, advantages_EJ, chain, compared)
    return np.where(cells_of(chain).is_single(), by_group_EJ, by_cell_EJ)


def _players(chain: Chain) -> Cells:
    return Cells(chain.weight_EJ, chain.player_EJ)


NORMALIZERS: dict[str, Normalizer] = {
    "batch": functools.partial(_normalize_by, _players),
    "agent": functools.partial(_normalize_by, lambda c: Cells(c.weight_EJ, c.agent_EJ)),
    "group": functools.partial(_normalize_by, samples_of_task),
    "group_turn": functools.partial(_normalize_in_group, turns_of_place),
    "group_agent": functools.partial(
        _normalize_in_group, lambda c: Cells(c.weight_EJ, c.group_EJ).split(c.agent_EJ)
    ),
    "none": lambda advantages_EJ, *_: advantages_EJ,
}
"""Name to normaliser.

Sources: batch: MARFT; agent: Dr. MAS; group: GRPO (Shao et al. 2024); group_turn: AT-GRPO
(arXiv 2510.11062); group_agent: the same with all turns of an agent together.
"""


def find_normalizer(name: str) -> Callable[..., np.ndarray]:
    """Finds a normaliser of the table, or your ``f(advantages_EJ, chain)``: ``package.module:f``.

    Raises:
        BadInput: there is none.
    """
    return load_function(name, "--algo.normalize", NORMALIZERS)


def check_shape(x: np.ndarray, value: Any, what: str) -> np.ndarray:
    """Checks that a user's function returned numbers of the shape of ``x``.

    Raises:
        BadInput: it returned something else.
    """
    try:
        numbers = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        numbers = None
    if numbers is None or numbers.shape != x.shape:
        raise BadInput(f"{what}: expected an array of shape {x.shape}, got {shown(value)}")
    return numbers
