"""Constraints of actions: which token may come next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Constraint = Callable[[Sequence[int]], np.ndarray | None]
"""The ids that were sampled so far to the tokens that may come next, ``bool [V]``; None for any. It
is called once for each token of an action, in order."""


def one_of(choices: Sequence[tuple[int, ...]], vocabulary: int) -> Constraint:
    """Allows these actions, each given as its ids with the end-of-turn token."""

    def allowed(ids: Sequence[int]) -> np.ndarray | None:
        n, begun = len(ids), tuple(ids)
        left = {choice[n] for choice in choices if len(choice) > n and choice[:n] == begun}
        return np.isin(np.arange(vocabulary), list(left)) if left else None  # none: finished

    return allowed
