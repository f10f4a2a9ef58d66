"""Built-in task: add up a few digits. ``3+5+9=?`` has the answer 17."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field

from marft_jax.envs import base
from marft_jax.errors import BadInput

_INTEGER = re.compile(r"(?<![0-9.])-?[0-9]+(?:\.[0-9]+)?")
_TRIES = 10_000  # draws until a task of the wanted side of the split must have come
_CANDIDATES = 100_000  # tasks looked at for the held-out list


@dataclasses.dataclass(frozen=True)
class Settings(base.QuestionSettings):
    """Settings of the built-in task."""

    name: str = "arithmetic"
    difficulty: Annotated[int, Field(ge=2, le=1000)] = 3
    """Numbers that each problem adds up."""
    curriculum: float | None = None
    """Mean reward at which training goes on to problems of one more number, from those of two;
    none: all problems have `difficulty` numbers."""


def source(settings: Settings, split: base.Split) -> base.EnvSource:
    """Makes sums of ``env.difficulty`` digits; a fraction ``env.holdout`` is for evaluation only.

    Raises:
        BadInput: the split leaves no task on the wanted side.
    """
    terms, holdout, horizon = settings.difficulty, settings.holdout, settings.horizon
    if split == "train":
        train_task(0, terms, holdout)  # fails now rather than in the first episode

        def create(terms: int) -> Callable[[], base.Env]:
            return lambda: Addition(lambda seed: train_task(seed, terms, holdout), horizon)

        return base.EnvSource(create(terms), easier=[*map(create, range(2, terms))])
    tasks = eval_tasks(terms, holdout)
    if not tasks:
        raise BadInput(f"--env.holdout: expected tasks to evaluate on, got {holdout}; raise it")
    return base.EnvSource(
        lambda: Addition(lambda seed: tasks[seed % len(tasks)], horizon), len(tasks)
    )


class Addition(base.QuestionEnv):
    """Environment of a sum; for the arguments see ``QuestionEnv``."""

    def __init__(self, pick: Callable[[int], base.Task], horizon: int) -> None:
        super().__init__(pick, grade, horizon)

    def demonstrate(self, agents: Sequence[base.Member]) -> list[dict[str, str]]:
        """Returns the additions as turns, see ``divided``."""
        numbers = [int(digit) for digit in self._task.question.removesuffix("=?").split("+")]
        totals = list(itertools.accumulate(numbers))
        steps = [f"{a}+{b}={c}" for a, b, c in zip(totals, numbers[1:], totals[1:], strict=False)]
        return divided(steps, agents, alone=str(numbers[0]))


def divided(
    steps: Sequence[str], agents: Sequence[base.Member], alone: str = ""
) -> list[dict[str, str]]:
    """Divides the steps of a solution among agents, as turns.

    Answering agents write the last step; the others write all steps before it, or ``alone`` if
    there are none. If every agent answers, each writes all steps."""
    plan, answer = ",".join(steps[:-1]) or alone, steps[-1]
    answer = ",".join(steps) if all(agent.answers for agent in agents) else answer
    return [{"agent": a.name, "text": answer if a.answers else plan} for a in agents]


def task(digits: str) -> base.Task:
    """Makes the task that adds up these digits.

    >>> task("359")
    Task(question='3+5+9=?', answer='17')
    """
    return base.Task("+".join(digits) + "=?", str(sum(map(int, digits))))


def train_task(seed: int, terms: int, holdout: float) -> base.Task:
    """Draws the training task of an integer, again and again while it is a held-out task."""
    for attempt in range(_TRIES):
        drawn = task(_digits(f"{seed} {attempt}", terms))
        if not base.held_out(drawn.question, holdout):
            return drawn
    raise BadInput(f"--env.holdout: expected some tasks left to train on, got {holdout}; lower it")


def eval_tasks(terms: int, holdout: float) -> list[base.Task]:
    """Lists the held-out tasks in a fixed pseudo-random order, among at most 100,000 candidates."""
    if 10**terms <= _CANDIDATES:
        candidates = [f"{number:0{terms}d}" for number in range(10**terms)]
    else:
        candidates = list(dict.fromkeys(_digits(f"eval {i}", terms) for i in range(_CANDIDATES)))
    tasks = filter(lambda made: base.held_out(made.question, holdout), map(task, candidates))
    return sorted(tasks, key=lambda held: hashlib.sha256(held.question.encode()).hexdigest()[16:])


def grade(text: str, reference: str) -> base.Grade:
    """Grades a text as right if its last number is the reference.

    >>> grade("3+5=8, 8+9=17", "17").verdict
    'right'
    """
    numbers = _INTEGER.findall(text)
    if not numbers:
        return base.Grade(0.0, "no answer")
    right = numbers[-1] == reference
    return base.Grade(float(right), "right" if right else "wrong", numbers[-1])


def _digits(key: str, count: int) -> str:
    """Uniform decimal digits from a hash: the same on every machine and Python."""
    number = int.from_bytes(hashlib.shake_128(key.encode()).digest(count // 2 + 9), "big")
    return str(number % 10**count).zfill(count)
