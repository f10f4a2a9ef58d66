"""A number of two digits times one of one digit, by parts: ``46*8=?`` has the answer 368.

A model with a short supervised start learns it (``configs/studies/products.yaml``):

    python -m marft_jax.train --env.name configs.studies.products:Products
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from marft_jax.envs.arithmetic import divided, grade
from marft_jax.envs.base import Member, QuestionEnv, Split, Task, held_out

_QUESTIONS = [f"{a}*{b}=?" for a in range(11, 100) if a % 10 for b in range(2, 10)]
_QUESTIONS.sort(key=lambda question: hashlib.sha256(question.encode()).hexdigest()[16:])
_HELD_OUT = [question for question in _QUESTIONS if held_out(question, 0.2)]
_TRAIN = [question for question in _QUESTIONS if question not in _HELD_OUT]


class Products(QuestionEnv):
    """648 products, a fifth of them for evaluation only."""

    def __init__(self, split: Split = "train") -> None:
        questions = _TRAIN if split == "train" else _HELD_OUT
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
