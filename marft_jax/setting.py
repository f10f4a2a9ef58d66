"""A setting: its default, its bounds, and its value in words.

rounds: int = setting(2, least=1)
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
_LARGEST = 2**31 - 1  # of whole numbers: what a device counts with


def setting(
    default: T, *, least: float | None = None, above: float | None = None, most: float | None = None
) -> T:
    """A field of a section.

    Args:
        least, above, most: bounds of a number, or of each in a tuple. A number is finite, and a
            whole one from 0 to what a device can count, unless these say otherwise.
    """
    metadata = dict(least=least, above=above, most=most)
    return dataclasses.field(default=default, metadata=metadata)  # type: ignore[return-value]


def fault(field: dataclasses.Field[Any], value: Any) -> str | None:
    """The fault of a field's value, such as ``expected a number at least 1, got 0``; else None."""
    if value == field.default:
        return None
    for part in value if isinstance(value, tuple) else (value,):
        wrong = None
        if isinstance(part, str):
            wrong = _text_fault(part)
        elif isinstance(part, (int, float)) and not isinstance(part, bool):
            wrong = _number_fault(part, *map(field.metadata.get, ("least", "above", "most")))
        if wrong:
            return wrong
    return None


def _number_fault(
    value: float, least: float | None, above: float | None, most: float | None
) -> str | None:
    if not math.isfinite(value):
        return f"expected a number, got {value}"
    if isinstance(value, int):
        least, most = least or 0, most or _LARGEST
    bounds = {"more than": above, "at least": least, "at most": most}
    low, high = -math.inf if least is None else least, math.inf if most is None else most
    if low <= value <= high and (above is None or value > above):
        return None
    words = " and ".join(f"{how} {bound}" for how, bound in bounds.items() if bound is not None)
    return f"expected a number {words}, got {value!r:.40}"


def _text_fault(value: str) -> str | None:
    if not value.strip():
        return "expected a text, got an empty one; leave it out"
    if "\0" in value or any("\ud800" <= c <= "\udfff" for c in value):
        return f"expected text in UTF-8 without NUL, got {value!r:.60}"
    return None


def kind_of(field: dataclasses.Field[Any]) -> str:
    """The type of a field as its source spells it."""
    kind: Any = field.type
    if isinstance(kind, str):
        return kind
    return kind.__name__ if type(kind) is type else str(kind).replace("typing.", "")


def value_of(kind: str, words: Sequence[str]) -> Any:
    """A value of the type of a field from words; raises ``ValueError`` where they mean none."""
    if kind.startswith("tuple["):
        item = kind.removeprefix("tuple[").removesuffix(", ...]")
        none = len(words) == 1 and words[0].lower() in _NONE
        return () if none else tuple(value_of(item, [word]) for word in words)
    [word] = words
    for part in reversed(kind.split(" | ")):  # of `float | None` the none first
        with contextlib.suppress(ValueError):
            return _choice(part, word) if part.startswith("Literal") else _READ[part](word)
    raise ValueError


def _choice(kind: str, word: str) -> str:
    choices = _choices(kind)
    return choices[choices.index(word)]


def _choices(kind: str) -> list[str]:
    return ast.literal_eval(kind.removeprefix("Literal"))


def expected(kind: str) -> str:
    """The values of a type, in words: ``a number or none``."""
    if kind.startswith("Literal") and " | " not in kind:
        return f"one of {', '.join(_choices(kind))}"
    return " or ".join(_IN_WORDS.get(p) or " or ".join(_choices(p)) for p in kind.split(" | "))


def _none(word: str) -> None:
    if word.lower() not in _NONE:
        raise ValueError


_NONE = ("none", "null")
_READ: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": lambda word: ("false", "true").index(word.lower()) == 1,
    "None": _none,
}
_IN_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "None": "none",
    "tuple[int, ...]": "whole numbers",
    "tuple[float, ...]": "numbers",
    "tuple[str, ...]": "words",
}
