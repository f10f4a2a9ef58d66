"""Preview of data before a run reads it: rows, their lengths in tokens, what is left out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

import numpy as np

from marft_jax.envs.base import Task
from marft_jax.envs.datasets.load import Rows, sift
from marft_jax.errors import BadInput, one_line, reason

_SHOWN, _FAULTS = 3, 5
_QUANTILES = {"shortest": 0, "median": 50, "95 %": 95, "longest": 100}


def preview(source: str, env: Rows, base: str) -> Iterator[str]:
    """Yields lines about the tasks of a source.

    Args:
        base: whose tokens are counted: ``tiny``, a folder with a tokenizer, or a hub id.

    Raises:
        BadInput: the source cannot be read, or there is no such tokenizer.
    """
    tokenizer = _tokenizer(base)
    found = sift(source, env)
    left_out = [*found.bad, *found.left_out]
    passed = found.rows - len(found.tasks) - len(left_out)
    counts = f"{found.rows} rows, {len(found.tasks)} tasks, {len(left_out)} left out"
    yield f"{source}: {counts}" + (f", {passed} do not fit --env.filters" if passed else "")
    for task in found.tasks[:_SHOWN]:
        yield f"  question: {one_line(task.question)}"
        yield f"  answer:   {one_line(str(task.answer))}"
    yield from _lengths(found.tasks, tokenizer, base)
    yield from (f"left out: {one_line(why)}" for why in left_out[:_FAULTS])
    if more := left_out[_FAULTS:]:
        yield f"left out: {len(more)} more"


def _lengths(tasks: Sequence[Task], tokenizer: Any, base: str) -> Iterator[str]:
    """A line for questions, and one for answers where they are texts."""
    for what, texts in (
        ("questions", [task.question for task in tasks]),
        ("answers", [task.answer for task in tasks if isinstance(task.answer, str)]),
    ):
        if texts:
            ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
            lengths = np.array([len(one) for one in ids])
            figures = (f"{k} {np.percentile(lengths, q):.0f}" for k, q in _QUANTILES.items())
            yield f"{what} in tokens of {base}: {', '.join(figures)}"


def _tokenizer(base: str) -> Any:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer  # slow to import, and only needed here

    own = str(resources.files("marft_jax") / "models" / "tokenizers" / "bytes")
    try:
        return AutoTokenizer.from_pretrained(own if base == "tiny" else base)
    except (OSError, ValueError) as error:
        expected = "expected tiny, a folder with a tokenizer, or a hub id"
        why = one_line(reason(error), 120)
        raise BadInput(f"--base {base:.80}: {expected} ({why})") from error
