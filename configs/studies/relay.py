"""A task that needs a team: each agent sees a part of a sum, and one must give the whole.

``3+5+9=?`` is shown to the speaker as ``3+5+?=?`` and to everyone else as ``?+?+9=?``:

    python -m marft_jax.train --env.name configs.studies.relay:Relay

Whoever answers knows the speaker's digits from its message alone, so that
``evaluate --run DIR --team.workflow configs.studies.relay:muted`` falls to chance. With
``one_digit`` or ``two_digits`` the message is a number of so many digits; ``bound`` says what a
team can reach through it.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence

from marft_jax.envs.arithmetic import eval_tasks, grade, train_task
from marft_jax.envs.base import EVAL_SEEDS
from marft_jax.team import State, Step, Team, Workflow
from marft_jax.types import StepResult, Turn

_HOLDOUT = 0.1
_held_out = functools.cache(eval_tasks)


class Relay:
    """Sums whose first digits only the speaker sees, and whose last ones only the others.

    Args:
        terms: digits of a sum.
        last: how many of them the speaker does not see.
        speaker: the agent that sees the first ones.
    """

    def __init__(self, terms: int = 3, last: int = 1, speaker: str = "planner") -> None:
        self._terms, self._first, self._speaker = terms, terms - last, speaker

    def reset(self, seed: int) -> str:
        if seed < EVAL_SEEDS:
            task = train_task(seed, self._terms, _HOLDOUT)
        else:
            held_out = _held_out(self._terms, _HOLDOUT)
            task = held_out[seed % len(held_out)]
        self._answer = task.answer
        return task.question

    def view(self, agent: str, observation: str) -> str:
        digits = observation.removesuffix("=?").split("+")
        sees = range(self._first) if agent == self._speaker else range(self._first, self._terms)
        shown = [digit if place in sees else "?" for place, digit in enumerate(digits)]
        return "+".join(shown) + "=?"

    def step(self, turns: Sequence[Turn]) -> StepResult:
        found = {turn.name: grade(turn.text, self._answer) for turn in turns if turn.answers}
        verdicts = [{"agent": name, **found[name]._asdict()} for name in found]
        reward = sum(own.score for own in found.values()) / max(len(found), 1)
        return StepResult("", reward, True, {"reference": self._answer, "verdicts": verdicts})


def channel(heard: Callable[[str], str]) -> Callable[[Team, str], Workflow]:
    """The sequential team, in which others are shown of a message what ``heard`` leaves of it."""

    def play(team: Team, observation: str) -> Workflow:
        state = State(observation)
        while True:
            turns: list[Turn] = []
            for agent in range(len(team.profiles)):
                shown = [turn._replace(text=heard(turn.text)) for turn in turns]
                turns += yield [team.act(agent, state, shown)]
            result = yield Step(turns)
            if result.done:
                return
            state = state.after(turns, result)

    return play


def last_digits(text: str, count: int) -> str:
    """As many of the last number's last digits.

    >>> last_digits("9+7=16", 1)
    '6'
    """
    return next(iter(reversed(re.findall("[0-9]+", text))), "")[-count:]


def shuffled_digits() -> Callable[[str], str]:
    """Delivers two digits of the message before: what is usual to say, about another task."""
    waiting = [""]

    def swap(text: str) -> str:
        waiting.append(text)
        return last_digits(waiting.pop(0), 2)

    return swap


muted = channel(lambda text: "")
one_digit = channel(lambda text: last_digits(text, 1))
two_digits = channel(lambda text: last_digits(text, 2))
shuffled = channel(shuffled_digits())


def swapped(team: Team, observation: str) -> Workflow:
    """Each of a pair does the other's work, with its own adapter; the message is one digit."""
    first, second = team.profiles
    state = State(observation)
    team = team._replace(profiles=(second, first))
    [said] = yield [team.act(1, state)]
    told = said._replace(name=first.name, text=last_digits(said.text, 1))
    [answer] = yield [team.act(0, state, [told])]
    answer = answer._replace(answers=True)
    yield Step([said._replace(answers=False), answer], graded=[answer])


def bound(digits: int, first: int = 2) -> float:
    """Success of the best team whose message is so many decimal digits, over all tasks.

    Whoever answers has to know the sum of the ``first`` digits that it does not see; of 10^digits
    messages each can stand for one sum, so the likeliest sums get one.

    >>> [bound(digits) for digits in (0, 1, 2)]
    [0.1, 0.75, 1.0]
    """
    sums = Counter(map(sum, itertools.product(range(10), repeat=first)))
    return sum(count for _, count in sums.most_common(10**digits)) / 10**first
