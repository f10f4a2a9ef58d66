"""Trunk of a branch: the turns of an episode that are played again instead of sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from marft_jax.types import Branch, StepResult, Turn


class Trunk:
    """Turns that a branch repeats, found by their place: number of the act, and of its call.

    Attributes:
        results: of the steps of the trunk.
    """

    def __init__(self, branch: Branch):
        turns = branch.trunk.turns
        places = list(places_of([*(turn.tool is not None for turn in turns), False]))
        self.results: Sequence[StepResult] = branch.trunk.results
        self._turns = dict(zip(places, turns, strict=False))  # the last one is that behind them
        self._act, self._call = places[branch.turn]

    def turn(self, act: int, call: int, beside: range) -> Turn | None:
        """Returns the turn at this place where the branch repeats it: one before the turn that is
        sampled anew, or of an act that was asked for together with it (``beside``)."""
        is_before = act < self._act or act == self._act and call < self._call
        is_beside = act != self._act and self._act in beside
        return self._turns.get((act, call)) if is_before or is_beside else None


def places_of(called: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yields the place of each turn of an episode, in acting order: the number of its act, and how
    many tools that act had called before.

    Args:
        called: true for each turn that called a tool, after which the same agent went on.
    """
    act, call = -1, 0
    for again in (False, *called[:-1]):
        act, call = (act, call + 1) if again else (act + 1, 0)
        yield act, call
