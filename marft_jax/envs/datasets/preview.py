"""Preview of data before a run reads it: rows, their lengths in tokens, what is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from marft_jax.envs.base import Task
from marft_jax.envs.datasets.load import Rows, sift
from marft_jax.errors import BadInput, one_line

_SHOWN, _FAULTS = 3, 5
_QUANTILES = {"shortest": 0, "median": 50, "95 %": 95, "longest": 100}


def preview(source: str, env: Rows, base: str, length: Callable[[str], int]) -> Iterator[str]:
    """Yields lines about the tasks of a source.

    Args:
        base: the model in whose tokens ``length`` counts.

    Raises:
        BadInput: the source cannot be read; or, after all lines, it has no task.
    """
    found = sift(source, env)
    left_out = [*found.bad, *found.left_out]
    passed = found.rows - len(found.tasks) - len(left_out)
    counts = f"{found.rows} rows, {len(found.tasks)} tasks, {len(left_out)} left out"
    yield f"{source}: {counts}" + (f", {passed} do not fit --env.filters" if passed else "")
    for task in found.tasks[:_SHOWN]:
        yield f"  question: {one_line(task.question)}"
        yield f"  answer:   {one_line(str(task.answer))}"
    yield from _lengths(found.tasks, base, length)
    yield from (f"left out: {one_line(why)}" for why in left_out[:_FAULTS])
    if more := left_out[_FAULTS:]:
        yield f"left out: {len(more)} more"
    if not found.tasks:
        fix = "name the fields (--env.question_field, --env.answer_field) or see --env.filters"
        raise BadInput(f"{source}: expected rows that are tasks, got {counts}; {fix}")


def _lengths(tasks: Sequence[Task], base: str, length: Callable[[str], int]) -> Iterator[str]:
    """A line for questions, and one for answers where they are texts."""
    for what, texts in (
        ("questions", [task.question for task in tasks]),
        ("answers", [task.answer for task in tasks if isinstance(task.answer, str)]),
    ):
        if texts:
            lengths = [length(text) for text in texts]
            figures = (f"{k} {np.percentile(lengths, q):.0f}" for k, q in _QUANTILES.items())
            yield f"{what} in tokens of {base}: {', '.join(figures)}"
