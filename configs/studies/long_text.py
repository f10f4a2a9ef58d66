"""More than one context holds: a sum over a text of which an agent sees a window at a time.

``1+2+0+3+3+1+0+2+2=?`` has nine digits and a window three numbers, so that nobody reads it all:

    python -m marft_jax.train --env.name configs.studies.long_text:LongText \\
        --team.file configs/studies/teams/readers.yaml     # map and reduce

The team reads three windows side by side, and one agent adds what they found. One agent alone takes
notes: it reads two digits at a time behind its last result. Both write four times, and never see
more than three numbers. ``truncated`` shows one agent the end of the text alone.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeVar

from configs.studies.relay import last_digits
from marft_jax.envs.arithmetic import grade
from marft_jax.envs.base import EVAL_SEEDS, Member, held_out
from marft_jax.team import State, Step, Team, Workflow
from marft_jax.types import StepResult, Turn

T = TypeVar("T")
_WINDOW, _HOLDOUT = 3, 0.1


class LongText:
    """Sums of nine digits from 0 to ``largest``.

    Args:
        windows: of three digits each.
    """

    def __init__(self, windows: int = 3, largest: int = 3) -> None:
        self._terms, self._largest = windows * _WINDOW, largest

    def reset(self, seed: int) -> str:
        draw = random.Random(f"long text {seed} {self._terms} {self._largest}")
        while True:
            self._digits = [draw.randint(0, self._largest) for _ in range(self._terms)]
            text = _sum(self._digits)
            if held_out(text, _HOLDOUT) == (seed >= EVAL_SEEDS):
                return text

    def step(self, turns: Sequence[Turn]) -> StepResult:
        answer = str(sum(self._digits))
        [last] = [turn.text for turn in turns if turn.answers][-1:]
        own = grade(last, answer)
        return StepResult("", own.score, True, {"answer": answer, "verdict": own.verdict})

    def demonstrate(self, agents: Sequence[Member]) -> list[dict[str, str]]:
        """A team's by map and reduce; one agent's by notes."""
        reader, writer = agents[0].name, agents[-1].name
        if len(agents) == 1:
            return [{"agent": writer, "text": _added(part)} for part in _noted(self._digits)]
        parts = _windows(self._digits, _WINDOW)
        told = [{"agent": reader, "text": _added(part)} for part in parts]
        return [*told, {"agent": writer, "text": _added([sum(part) for part in parts])}]


def map_reduce(team: Team, observation: str) -> Workflow:
    """The first agent reads all windows side by side, the last one adds the results."""
    parts = _windows(observation.removesuffix("=?").split("+"), _WINDOW)
    turns = yield [team.act(0, State(_sum(part))) for part in parts]
    told = State(_sum([_result(turn) for turn in turns]))
    last = team.act(len(team.profiles) - 1, told)._replace(sees=tuple(t.index for t in turns))
    answered = yield [last]
    yield Step([*turns, *answered], graded=answered)


def notes(team: Team, observation: str) -> Workflow:
    """One agent reads on from window to window, with its last result before the new digits."""
    digits = observation.removesuffix("=?").split("+")
    turns = yield [team.act(0, State(_sum(digits[:_WINDOW])))]
    for part in _windows(digits[_WINDOW:], _WINDOW - 1):
        act = team.act(0, State(_sum([_result(turns[-1]), *part])))
        turns += yield [act._replace(sees=tuple(turn.index for turn in turns))]
    yield Step(turns, graded=turns[-1:])


def truncated(team: Team, observation: str) -> Workflow:
    """One agent sees the last window and answers."""
    digits = observation.removesuffix("=?").split("+")
    yield Step((yield [team.act(0, State(_sum(digits[-_WINDOW:])))]))


def bound(windows: int = 3, largest: int = 3) -> float:
    """Success of the best agent that sees the last window: it guesses the likeliest rest.

    >>> round(bound(), 3)
    0.142
    """
    hidden = (windows - 1) * _WINDOW
    sums = Counter(map(sum, itertools.product(range(largest + 1), repeat=hidden)))
    return max(sums.values()) / (largest + 1) ** hidden


def _noted(digits: Sequence[int]) -> Iterator[list[int]]:
    """Numbers that one agent with right notes sees, window by window."""
    yield list(digits[:_WINDOW])
    for start in range(_WINDOW, len(digits), _WINDOW - 1):
        yield [sum(digits[:start]), *digits[start : start + _WINDOW - 1]]


def _added(numbers: Sequence[int]) -> str:
    totals = list(itertools.accumulate(numbers))
    sums = zip(totals, numbers[1:], totals[1:], strict=False)
    return ",".join(f"{a}+{b}={c}" for a, b, c in sums)


def _windows(digits: Sequence[T], size: int) -> list[Sequence[T]]:
    return [digits[start : start + size] for start in range(0, len(digits), size)]


def _result(turn: Turn) -> str:
    return last_digits(turn.text, 2) or "?"


def _sum(numbers: Sequence[object]) -> str:
    return "+".join(map(str, numbers)) + "=?"
