"""Procedural tasks of the package reasoning-gym, by name.

A seed makes a task, so no data is needed. The reward comes from the task's own scorer, which often
gives a small reward for the right form.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sys
from typing import NamedTuple

from marft_jax.envs import base
from marft_jax.envs.base import EnvSource, Grade, Split, Task
from marft_jax.envs.grading.extract import boxed_answer
from marft_jax.envs.workers import Workers
from marft_jax.errors import BadInput
from marft_jax.settings.setting import Count, Seconds

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.S | re.I)
_ASK = "\nWrite the final answer between <answer> and </answer>."
_DRAWS = 1000  # seeds tried for a task of the wanted side
_MAKE_SECONDS = 60.0


class _Answer(NamedTuple):
    """Answer of a task, as its scorer needs it."""

    seed: int
    text: str

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Settings(base.QuestionSettings):
    """Settings of a task of reasoning-gym."""

    name: str = "reasoning_gym"
    task: str = ""
    """Name of the task, such as countdown."""
    options: tuple[str, ...] = ()
    """Settings of the task, as `name=value`."""
    workers: Count = 2
    """Answers that are graded at the same time."""
    grade_seconds: Seconds = 10.0
    """Time limit for grading an answer, in seconds. An answer that exceeds it is wrong."""


def source(env: Settings, split: Split) -> EnvSource:
    """Makes tasks ``env.task`` with ``env.options``; a fraction ``env.holdout`` is for evaluation.

    Raises:
        BadInput: the package is not installed, there is no such task, or it refuses the options.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise BadInput(
            '--env.name reasoning_gym needs its package: pip install -e ".[reasoning-gym]"'
        )
    settings = dict(map(base.read_option, env.options))
    command = (sys.executable, "-m", "marft_jax.extras.gym.worker", env.task, json.dumps(settings))
    workers = Workers(env.workers, command)
    tasks = _Tasks(workers, env.holdout, split, env.grade_seconds)
    try:
        tasks.pick(0)
    except RuntimeError as error:
        workers.close()
        known = "--env.task takes the names of datasets of the package reasoning-gym"
        raise BadInput(f"--env.task {env.task or 'none'}: {error}; {known}") from error
    return EnvSource(
        lambda: base.QuestionEnv(tasks.pick, tasks.grade, env.horizon), close=workers.close
    )


def read(text: str) -> str:
    """Finds the answer in a text: the last ``<answer>`` tag, else the last box, else all of it.

    >>> read("so <answer> 1 </answer>"), read("\\\\boxed{2}"), read(" LURD ")
    ('1', '2', 'LURD')
    """
    tagged = _TAGGED.findall(text)
    return (tagged[-1] if tagged else boxed_answer(text) or text).strip()


class _Tasks:
    def __init__(self, workers: Workers, holdout: float, split: Split, seconds: float) -> None:
        self._workers, self._seconds = workers, seconds
        self._holdout, self._held = holdout, split == "eval"

    def pick(self, seed: int) -> Task:
        """Makes the task of a seed: the first of its draws that is on this side of the split."""
        first = seed * _DRAWS + (base.EVAL_SEEDS if self._held and not self._holdout else 0)
        for drawn in range(first, first + _DRAWS):
            drawn %= 1 << 32
            made = self._workers.ask({"seed": drawn}, _MAKE_SECONDS)
            if not isinstance(made, dict):
                raise RuntimeError(f"making the task of seed {drawn}: {made}")
            question = made["question"].strip()
            if not self._holdout or base.held_out(question, self._holdout) == self._held:
                return Task(question + _ASK, _Answer(drawn, made["answer"]))
        raise RuntimeError(
            f"none of {_DRAWS} tasks is on this side of --env.holdout {self._holdout}"
        )

    def grade(self, text: str, answer: _Answer) -> Grade:
        given = read(text)
        if not given:
            return Grade(0.0, "no answer")
        request = {"seed": answer.seed, "text": given[-10_000:]}
        scored = self._workers.ask(request, self._seconds)
        if not isinstance(scored, dict):
            return Grade(0.0, scored, given)
        return Grade(scored["score"], "right" if scored["score"] >= 1 else "wrong", given)
