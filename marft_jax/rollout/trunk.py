"""Trunk of a branch: the turns of an episode that are played again instead of sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from marft_jax.types import Branch, StepResult, Turn


class Trunk:
    """Turns that a branch repeats, found by their place: the number of the act, and of its call.

    Attributes:
        results: the environment's answer to each step of the trunk.
    """

    def __init__(self, branch: Branch):
        turns = branch.trunk.turns
        places = list(places_of([*(turn.tool is not None for turn in turns), False]))
        self.results: Sequence[StepResult] = branch.trunk.results
        self._turns = dict(zip(places, turns, strict=False))  # one place more: that of a next turn
        self._act, self._call = places[branch.turn]

    def turn(self, act: int, call: int, together: range) -> Turn | None:
        """Returns the turn at this place if the branch repeats it, else None.

        A branch repeats the turns before the one that is sampled anew, and the turns of acts that
        were asked for together with that one.

        Args:
            together: numbers of the acts that were asked for together with this act.
        """
        is_before = act < self._act or act == self._act and call < self._call
        is_beside = act != self._act and self._act in together
        return self._turns.get((act, call)) if is_before or is_beside else None


def places_of(called: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yields the place of each turn of an episode, in acting order: the number of its act, and the
    number of tool calls before it in that act.

    Args:
        called: true for each turn that called a tool, after which the same agent went on.
    """
    act, call = -1, 0
    for again in (False, *called[:-1]):
        act, call = (act, call + 1) if again else (act + 1, 0)
        yield act, call
