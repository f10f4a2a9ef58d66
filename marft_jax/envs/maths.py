"""Mathematical questions from rows of data (GSM8K, MATH, AIME, ...), graded by meaning.

Only the answering agents' own texts are graded, never a prompt.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from typing import Any, Literal

from marft_jax.envs.base import EnvSource, Grade, OneOf, QuestionEnv, Split, Task
from marft_jax.envs.datasets import load
from marft_jax.envs.datasets.rows import LeftOut
from marft_jax.envs.grading import GradingPool
from marft_jax.envs.grading.compare import is_letter
from marft_jax.envs.rewards import RowAnswer, weighted_sum
from marft_jax.errors import BadInput
from marft_jax.settings.setting import Seconds

_MARKED_LETTER = re.compile(
    r"[(\[{*]\s*[A-J]\s*[)\]}*]|^\W*[A-J](?:[).:]|\W*$)"
    r"|\b(?i:is|answer|option|choice|choose|pick|select)\W*[A-J]\b",
    re.MULTILINE,
)
"""Letter of a choice in a text, but not a word such as "A" or "I"."""


@dataclasses.dataclass(frozen=True)
class Settings(load.RowSettings):
    """Settings of mathematics."""

    name: str = "math"
    question_field: str | None = None
    """Field of the question; none: the first usual name that a row has."""
    answer_field: str | None = None
    """Field of the answer; none: the first usual name that a row has."""
    extract: Literal["auto", "boxed", "hashes", "letter", "number", "phrase"] = "auto"
    """Form of an answer that counts; auto: the first of these forms that a text has."""
    grade_seconds: Seconds = 10.0
    """Time limit for grading an answer, in seconds. An answer that exceeds it is wrong."""
    reward: tuple[str, ...] = ()
    """Functions of your own, as package.module:function, that pay (text, row) with a number, and
    need no answer in a row. The reward is their sum; `module:function*0.5` has a weight. none:
    answers are compared."""

    def task_of(self, row: Any) -> Task | LeftOut | str:
        """See ``RowSettings``."""
        if self.reward:
            return load.as_task(row, self.question_field, answers="unread")
        return load.as_task(row, self.question_field, self.answer_field)

    def answer_of(self, task: Task, row: Any) -> Any:
        """See ``RowSettings``; a row pays by itself if the settings name reward functions."""
        return RowAnswer(row) if self.reward else task.answer

    def tried(self, task: Task) -> list[str]:
        """See ``RowSettings``."""
        if not self.reward:
            return []
        paid = weighted_sum(self.reward)(text := "The answer is 1.", task.answer)
        return [f"reward:   {paid.score:g} for {text!r}"]


def source(env: Settings, split: Split) -> EnvSource:
    """Makes questions from ``env.data``, or for evaluation from ``env.eval_data``.

    Raises:
        BadInput: data is missing or wrong (see ``load.chooser``), or math-verify is not installed.
    """
    if env.reward:
        for name in ("answer_field", "extract", "grade_seconds", "workers"):
            if (value := getattr(env, name)) != getattr(Settings, name):
                why = "which gets the whole text and the row"
                raise BadInput(f"--env.{name}: not read beside --env.reward, {why}; got {value}")
        pick, size = load.chooser(env, split)
        pays = weighted_sum(env.reward)
        return EnvSource(lambda: QuestionEnv(pick, pays, env.horizon), size)
    if importlib.util.find_spec("math_verify") is None:
        raise BadInput("--env.name math needs the package math-verify: pip install -e .")
    pick, size = load.chooser(env, split)
    pool = GradingPool(env.workers, env.grade_seconds, env.extract)

    def grade(text: str, answer: str | OneOf) -> Grade:
        grades = []
        for reference in answer if isinstance(answer, OneOf) else [answer]:
            grades.append(pool.grade(text, reference))
            decides = is_letter(reference) and _MARKED_LETTER.search(text)
            if grades[-1].verdict == "right" or decides:
                return grades[-1]
        return next((grade for grade in grades if grade.answer), grades[-1])

    return EnvSource(lambda: QuestionEnv(pick, grade, env.horizon), size, pool.close)
