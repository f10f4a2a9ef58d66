"""Reward functions of a user's own for rows of data: (text, row) to a number."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from marft_jax.background import finished
from marft_jax.envs.base import Grade
from marft_jax.errors import BadInput, place
from marft_jax.plugins import load_function, number_of

_WEIGHTED = re.compile(r"(.+:.+?)(?:\s*\*\s*([-+]?[\d.]+(?:e[-+]?\d+)?))?")


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
        return Grade(sum(w * _paid(what, f, text, answer.row) for what, f, w in functions), "")

    return grade


def _load(name: str) -> tuple[str, Callable[..., Any], float]:
    match = _WEIGHTED.fullmatch(name)
    spelled, weight = match.groups() if match else (name, None)
    found = load_function(spelled, what := "--env.reward", {})
    try:
        scale = float(weight or 1)
    except ValueError as error:
        raise BadInput(f"{what}: expected a weight behind *, got {name!r:.80}") from error
    try:
        with contextlib.suppress(ValueError):  # Python does not know its signature
            inspect.signature(found).bind("text", {})
    except TypeError as error:
        wrong = f"{error}{place(found)}"
        raise BadInput(f"{what} {spelled}: expected a function (text, row): {wrong}") from error
    return f"{what} {spelled}{place(found)}", found, scale


def _paid(what: str, function: Callable[..., Any], text: str, row: Mapping[str, Any]) -> float:
    return number_of(what, finished(function(text, dict(row))))
