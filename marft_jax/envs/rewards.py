"""Reward functions of a user's own for rows of data: (text, row) to a number."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from marft_jax.background import finished
from marft_jax.envs.base import Grade
from marft_jax.errors import place
from marft_jax.plugins import check_takes, load_function, number_of

_WEIGHTED = re.compile(r"(.+:.+?)\s*\*\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)")


class RowAnswer(NamedTuple):
    """Row as it was read, which is what a reward function needs of a task."""

    row: Mapping[str, Any]

    def __str__(self) -> str:
        return "none: --env.reward pays"


def weighted_sum(names: Sequence[str]) -> Callable[[str, RowAnswer], Grade]:
    """Makes a grader of functions: the score is the sum of weight * function(text, row).

    Args:
        names: ``package.module:function``, or ``package.module:function*0.5`` with a weight.

    Raises:
        BadInput: there is no such function, or it does not take a text and a row.
    """
    functions = [_load(name) for name in names]

    def grade(text: str, answer: RowAnswer) -> Grade:
        score = 0.0
        for what, function, weight in functions:
            paid = finished(function(text, dict(answer.row)))
            score += weight * number_of(what, paid)
        return Grade(score, "")

    return grade


def _load(name: str) -> tuple[str, Callable[..., Any], float]:
    match = _WEIGHTED.fullmatch(name)
    function_name, weight = match.groups() if match else (name, 1)
    what = f"--env.reward {function_name}"
    function = load_function(function_name, "--env.reward", {})
    check_takes(function, what, "text", "row")
    return f"{what}{place(function)}", function, float(weight)
