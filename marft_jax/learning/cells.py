"""Statistics of sets of decisions, in which equal numbers have a spread of exactly 0.

The mean of equal numbers may miss them by one rounding. Divided by a deviation that is rounding as
well, that error would become an advantage of size 1, and Adam would take a full step for it. So a
difference that is rounding is set to exactly 0: identical samples teach nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ROUNDING = 1e-5
"""Largest spread that counts as rounding, as a part of the numbers that were added up."""


class Cells(NamedTuple):
    """Partition of the entries of an array into numbered cells.

    Attributes:
        weights: weight of each entry; 0 for padding.
        cells: number of each entry's cell, from 0; of the shape of ``weights``.
    """

    weights: np.ndarray
    cells: np.ndarray

    def mean(self, x: np.ndarray) -> np.ndarray:
        """Weighted mean of each entry's cell: Σ w·x / Σ w."""
        weights_Z = sums_of(self.weights, self.cells)
        sums_Z = sums_of(np.where(self.weights > 0, x, 0) * self.weights, self.cells)
        return (sums_Z / np.where(weights_Z > 0, weights_Z, 1))[self.cells]

    def rms(self, x: np.ndarray) -> np.ndarray:
        """Weighted root mean square of each entry's cell."""
        return np.sqrt(self.mean(np.square(x)))

    def max(self, x: np.ndarray) -> np.ndarray:
        """Maximum of each entry's cell; 0 where that is not finite."""
        max_Z = np.full(np.max(self.cells) + 1, -np.inf)
        np.maximum.at(max_Z, self.cells.ravel(), np.where(self.weights > 0, x, -np.inf).ravel())
        return np.where(np.isfinite(max_Z), max_Z, 0)[self.cells]

    def split(self, labels: np.ndarray) -> Cells:
        """Splits each cell into the sets of its entries with the same label, a number from 0."""
        return self._replace(cells=self.cells * (np.max(labels) + 1) + labels)

    def is_single(self) -> np.ndarray:
        """True in cells whose weights add up to one: of one turn, or of one episode."""
        return sums_of(self.weights, self.cells)[self.cells] < 1.5


def sums_of(x: np.ndarray, labels: np.ndarray, least: int = 0) -> np.ndarray:
    """Sum of the entries of each label, ``[max(labels + 1, least)]``."""
    x, labels = np.broadcast_arrays(np.asarray(x, np.float64), labels)
    return np.bincount(labels.ravel(), x.ravel(), least)


def zero_rounding(change: np.ndarray, over: Cells, magnitudes: np.ndarray) -> np.ndarray:
    """Sets differences to exactly 0 in each cell whose rms is rounding; see ``is_rounding``.

    Args:
        change: differences; entries that are not finite stay.
        over: the cells.
        magnitudes: absolute values of the numbers that the differences were computed from.
    """
    return np.where(is_rounding(over.rms(change), over.rms(magnitudes)), 0, change)


def is_rounding(spread: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    """True where a spread is at most 1e-5 of a magnitude, and both are finite."""
    return (spread <= ROUNDING * magnitude) & np.isfinite(spread) & np.isfinite(magnitude)
