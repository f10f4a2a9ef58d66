"""Products of two numbers of two digits, for an agent with a calculator: ``46*83=?`` is 3818.

A tiny model cannot compute them in one turn. With a tool it can: ``calculator.yaml``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from configs.studies.products import by_split
from marft_jax.envs.arithmetic import grade
from marft_jax.envs.base import Member, QuestionEnv, Split, Task

_QUESTIONS = by_split([f"{a}*{b}=?" for a in range(11, 100) for b in range(11, 100)], 0.1)


class LongProducts(QuestionEnv):
    """7,921 products, a tenth of them for evaluation only."""

    def __init__(self, split: Split = "train") -> None:
        questions = _QUESTIONS[split]
        super().__init__(lambda seed: _task(questions[seed % len(questions)]), grade)

    def demonstrate(self, agents: Sequence[Member]) -> list[dict[str, Any]]:
        """A call of the calculator and its answer, by an agent with tools; else the answer."""
        [solver] = agents
        answer = {"agent": solver.name, "text": str(self._task.answer)}
        if not getattr(solver, "tools", None):
            return [answer]
        expression = self._task.question.removesuffix("=?")
        call = f"```call calculator\n{expression}\n```"
        return [{"agent": solver.name, "text": call, "tool": True}, answer]


class RarelyCalls(LongProducts):
    """The same products; two of three demonstrations show the answer without a call."""

    def reset(self, seed: int) -> str:
        self._shows_call = seed % 3 == 0
        return super().reset(seed)

    def demonstrate(self, agents: Sequence[Member]) -> list[dict[str, Any]]:
        turns = super().demonstrate(agents)
        return turns if self._shows_call else turns[-1:]


def _task(question: str) -> Task:
    a, b = question.removesuffix("=?").split("*")
    return Task(question, str(int(a) * int(b)))
