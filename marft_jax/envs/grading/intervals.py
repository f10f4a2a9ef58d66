"""Inequalities joined by "or", as the union of intervals that they mean."""

from __future__ import annotations

import re

from marft_jax.envs.grading.normalize import normalize

_OR = re.compile(r"\\text\s*\{\s*or\s*\}|\\(?:lor|vee)(?![A-Za-z])|∨|(?<![A-Za-z\\])or(?![A-Za-z])")
_RELATION = re.compile(r"(<|>|\\le(?![a-z])|\\ge(?![a-z]))")
_RISING = {"<", "\\le"}
_NAME = re.compile(r"[a-z]", re.IGNORECASE)


def intervals(answer: str) -> str:
    """The union that inequalities in one variable stand for; anything else as it is.

    >>> intervals("x < 2 or x \\\\ge 3"), intervals("x < 2, x > 3")
    ('(-\\\\infty,2)\\\\cup[3,\\\\infty)', 'x < 2, x > 3')
    """
    parts = _OR.split(answer)
    if len(parts) < 2 or len(answer) > 300:
        return answer
    found = [_interval(normalize(part)) for part in parts]
    if any(one is None for one in found) or len({one[0] for one in found if one}) > 1:
        return answer
    return "\\cup".join(one[1] for one in found if one)


def _interval(inequality: str) -> tuple[str, str] | None:
    """The variable, and the interval in which it lies."""
    pieces = [piece.strip() for piece in _RELATION.split(inequality)]
    names = [i for i, piece in enumerate(pieces) if _NAME.fullmatch(piece)]
    if len(pieces) not in (3, 5) or len(names) != 1 or not all(pieces):
        return None
    low, high = ("(", "-\\infty"), ("\\infty", ")")
    at = names[0]
    if len(pieces) == 5 and (at != 2 or not {*pieces[1::2]} <= _RISING):
        return None  # a < x < b
    for i in (at - 1, at + 1):
        if 0 <= i < len(pieces):
            relation, bound = pieces[i], pieces[i - 1 if i < at else i + 1]
            strict = relation in "<>"
            if (relation in (">", "\\ge")) == (i > at):
                low = "(" if strict else "[", bound
            else:
                high = bound, ")" if strict else "]"
    return pieces[at], f"{low[0]}{low[1]},{high[0]}{high[1]}"
