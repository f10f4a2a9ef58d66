"""Mathematical questions from rows of data (GSM8K, MATH, AIME, ...), graded by meaning.

Only the answering agents' own texts are graded, never a prompt.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from typing import Any, Literal

from marft_jax.envs.base import EnvSource, Grade, OneOf, Split, Task, question_source
from marft_jax.envs.datasets import load
from marft_jax.envs.datasets.rows import LeftOut
from marft_jax.envs.grading import GradingPool
from marft_jax.envs.grading.compare import is_letter
from marft_jax.errors import BadInput
from marft_jax.setting import Seconds

_MARKED_LETTER = re.compile(
    r"[(\[{*]\s*[A-J]\s*[)\]}*]|^\W*[A-J](?:[).:]|\W*$)"
    r"|\b(?i:is|answer|option|choice|choose|pick|select)\W*[A-J]\b",
    re.MULTILINE,
)
"""Letter of a choice in a text, but not a word such as "A" or "I"."""


@dataclasses.dataclass(frozen=True)
class Settings(load.Rows):
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

    def task_of(self, row: Any) -> Task | LeftOut | str:
        """See ``Rows``."""
        return load.as_task(row, self.question_field, self.answer_field)


def source(env: Settings, split: Split) -> EnvSource:
    """Makes questions from ``env.data``, or for evaluation from ``env.eval_data``.

    Raises:
        BadInput: data is missing or wrong (see ``load.chooser``), or math-verify is not installed.
    """
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

    return question_source(pick, grade, env.horizon, size, pool.close)
