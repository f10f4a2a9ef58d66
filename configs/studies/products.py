"""A number of two digits times one of one digit, by parts: ``46*8=?`` has the answer 368.

A model with a short supervised start learns it (``configs/studies/products.yaml``):

    python -m marft_jax.train --env.name configs.studies.products:Products
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from marft_jax.envs.arithmetic import divided, grade
from marft_jax.envs.base import Member, QuestionEnv, Split, Task, held_out


def by_split(questions: Sequence[str], holdout: float) -> dict[Split, list[str]]:
    """The questions of each split, in a fixed pseudo-random order."""
    found: dict[Split, list[str]] = {"train": [], "eval": []}
    for question in sorted(questions, key=lambda q: hashlib.sha256(q.encode()).hexdigest()[16:]):
        found["eval" if held_out(question, holdout) else "train"].append(question)
    return found


_ALL = [f"{a}*{b}=?" for a in range(11, 100) if a % 10 for b in range(2, 10)]
_QUESTIONS = by_split(_ALL, 0.2)


class Products(QuestionEnv):
    """648 products, a fifth of them for evaluation only."""

    def __init__(self, split: Split = "train") -> None:
        questions = _QUESTIONS[split]
        super().__init__(lambda seed: _task(questions[seed % len(questions)]), grade)

    def demonstrate(self, agents: Sequence[Member]) -> list[dict[str, str]]:
        """The products of tens and ones by those who do not answer, their sum by those who do;
        where everyone answers, all by everyone."""
        number, factor = _factors(self._task.question)
        ones = number % 10
        steps = [f"{part}*{factor}={part * factor}" for part in (number - ones, ones)]
        steps.append(f"{(number - ones) * factor}+{ones * factor}={number * factor}")
        return divided(steps, agents)


def _task(question: str) -> Task:
    number, factor = _factors(question)
    return Task(question, str(number * factor))


def _factors(question: str) -> tuple[int, int]:
    number, factor = question.removesuffix("=?").split("*")
    return int(number), int(factor)
