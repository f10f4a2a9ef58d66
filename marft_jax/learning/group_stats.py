"""Statistics of sets of decisions, in which equal numbers have a spread of exactly 0.

The mean of equal numbers may miss them by one rounding. Divided by a deviation that is rounding as
well, that error would become an advantage of size 1, and Adam would take a full step for it. So
``Cells.zero_same`` sets such differences to exactly 0: identical samples teach nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

SAME = 1e-5
"""Numbers that differ by less than this part of what they were added up from are the same."""


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

    def zero_same(self, differences: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Sets the differences of a cell to exactly 0 where their rms is rounding.

        Args:
            differences: of the numbers of a cell from a baseline; what is not finite stays.
            sizes: sizes of the numbers, finite: 1e-5 of their rms counts as rounding.
        """
        return np.where(self.rms(differences) < SAME * self.rms(sizes), 0, differences)


def sums_of(x: np.ndarray, labels: np.ndarray, least: int = 0) -> np.ndarray:
    """Sum of the entries of each label, ``[max(labels + 1, least)]``."""
    x, labels = np.broadcast_arrays(np.asarray(x, np.float64), labels)
    return np.bincount(labels.ravel(), x.ravel(), least)
