"""Answers that are true or false, in the words for both."""

from __future__ import annotations

import re

_TRUTH = re.compile(
    r"(?<![\w\\])(?:(?P<yes>yes|true|correct)|false|incorrect|untrue"
    r"|no(?=\W*\Z|\s*[^\w\s]|\s+(?:it|they|this|that|there|he|she|we|you)\b))(?!\w)"
    r"|(?<!\w)(?:(?P<shi>是的?|对的?)|否|不是|不对)(?!\w)|(?P<zheng>正确)|错误?",
    re.I,
)
_NOT = re.compile(r"(?:(?:(?:\b|can)not|n['’]t|\bnever)\s+(?:\w+\s+){0,3}|[不没])[*_]*\Z", re.I)
_DECORATION = re.compile(r"(?:\\(?:text|mathrm|textbf|mathbf)\s*\{|[\W_])*")


def is_boolean(reference: str) -> bool:
    """Recognises an answer that is only true, false, yes, no, or the same in Chinese.

    >>> is_boolean("True"), is_boolean("\\\\text{no}"), is_boolean("是"), is_boolean("I know")
    (True, True, True, False)
    """
    word = _DECORATION.sub("", reference[:40], count=1).rstrip(" .。}*_")
    return _TRUTH.fullmatch(word) is not None


def truth(text: str) -> bool | None:
    """Reads if a text says yes or no: by its first word, else the first word of its last line, else
    the last such word in it.

    >>> truth("Yes, because it is not even."), truth("It isn't true."), truth("I know")
    (True, False, None)
    """
    words = list(_TRUTH.finditer(text))
    if not words:
        return None
    starts = _DECORATION.match(text), _DECORATION.match(text, text.rstrip().rfind("\n") + 1)
    ends = [start.end() for start in starts if start]
    first = next((word for end in ends for word in words if word.start() == end), None)
    match = first or words[-1]
    is_denied = _NOT.search(text[max(match.start() - 40, 0) : match.start()])
    return bool(match["yes"] or match["shi"] or match["zheng"]) != bool(is_denied)
