"""Finds the fields of a row by their usual names, and reads their values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from marft_jax.envs.base import OneOf
from marft_jax.envs.datasets.rows import structured
from marft_jax.envs.grading.extract import boxed_answer
from marft_jax.envs.grading.normalize import number, split
from marft_jax.plugins import shown

Row = Mapping[str, Any]
WORD = re.compile(r"(?<![\\\w])[^\W\d_]{2}")  # no command of LaTeX

_WITH_UNIT = re.compile(r"\A(-?[\d.,/]+) \([a-z][a-z ]*\)\Z", re.I)  # 9 (apples)


def squashed(name: str) -> str:
    """Spells a name as rows are searched: ``Answer Key``, ``answer_key``, ``answerKey`` are one."""
    return re.sub(r"[\s_-]", "", name).lower()


def first(named: Row, fields: Sequence[str]) -> Any:
    """Finds the first of these fields with a value that is not blank, in a row whose names are
    ``squashed``."""
    values = (named.get(squashed(field)) for field in fields)
    return next((value for value in values if not is_blank(value)), None)


def is_blank(value: Any) -> bool:
    """True for None, NaN, which tables have for None, and what is empty."""
    if isinstance(value, float | Decimal):
        return not math.isfinite(value)
    empty = isinstance(value, (list, Mapping)) and (not value or value == ["None"])
    return value is None or empty or isinstance(value, str) and not value.strip()


def as_text(value: Any) -> str:
    """Reads an answer as text: ``"... #### 18"`` is ``18``, ``142.0`` ``142``, a list ``a, b``."""
    if isinstance(value, list):
        return ", ".join(map(as_text, value))
    if isinstance(value, float | Decimal):
        digits = f"{Decimal(str(value)) if value else 0:f}"
        return digits.rstrip("0").rstrip(".") if "." in digits else digits
    if value is None or isinstance(value, Mapping | bytes):
        raise ValueError(f"expected an answer of text or numbers, got {shown(value)}")
    text = str(value)
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0]
    return (boxed_answer(text) or text).strip()


def names(value: Any) -> str | OneOf:
    """Reads an answer that may have several names: ``{value, aliases}``, ``{text: [...]}``, or a
    list; a list of different numbers is one answer."""
    parsed = structured(value)
    is_list = isinstance(parsed, list) and all(isinstance(item, str) for item in parsed)
    answers: Any = parsed if is_list or isinstance(parsed, Mapping) else value
    several = [
        answers[key]
        for key in ("aliases", "text")
        if isinstance(answers, Mapping) and key in answers
    ]
    if is_thing := bool(several) and isinstance(several[0], list):
        answers = [name for name in (answers.get("value"), *several[0]) if name is not None]
    if not isinstance(answers, list):
        return _WITH_UNIT.sub(r"\1", as_text(answers))
    answers = [item.get("text") if isinstance(item, Mapping) else item for item in answers]
    texts = list(dict.fromkeys(map(as_text, answers)))
    numbers = {number(split(text)[0]) for text in texts} - {None}
    if is_thing or len(numbers) < 2 and any(map(WORD.search, texts)):
        return OneOf(texts) if len(texts) > 1 else "".join(texts)
    return as_text(answers)
