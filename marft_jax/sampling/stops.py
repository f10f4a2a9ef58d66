"""Texts that end an action, found in what is sampled.

The ids up to the first of them are the action, as they were sampled; its text ends before it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Cuts a text before the first stop text in it; true where there is one.

    >>> cut("a. b", ["."])
    ('a', True)
    """
    at = min((text.find(stop) for stop in stops if stop in text), default=-1)
    return (text, False) if at < 0 else (text[:at], True)


def text_of(ids: Sequence[int], stops: Sequence[str], decode: Callable[[list[int]], str]) -> str:
    """Text of an action: without white space around it, and up to the first stop text."""
    return cut(decode([*ids]).lstrip(), stops)[0].strip()


def stopped_at(
    ids: Sequence[int], stops: Sequence[str], decode: Callable[[list[int]], str]
) -> int | None:
    """Number of ids that an action has which a stop text ends; None where there is none."""
    ends: Callable[[int], bool] = lambda n: cut(decode([*ids[:n]]).lstrip(), stops)[1]  # noqa: E731
    if not ends(len(ids)):
        return None
    return bisect.bisect_left(range(len(ids)), True, 1, key=ends)
