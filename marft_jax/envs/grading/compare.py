"""Decides whether an answer equals the reference, where that needs no algebra.

Most answers are plain numbers, letters or words. They are compared here, exactly, in the calling
process; only the rest goes to a worker with a computer algebra system.
"""

from __future__ import annotations

import re
from fractions import Fraction

from marft_jax.envs.grading import units
from marft_jax.envs.grading.normalize import is_letter, letter, normalize, number, squeeze, words

_BASED = re.compile(r"(-?[0-9A-Z.]+)_\{?(\d{1,2})\}?")  # 1011_2: the base may be left out
_DECIMAL_COMMA = re.compile(r"^(-?\d+),(\d+)$")  # a list would not answer a single number
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = rf"((?:{'|'.join(_MONTHS)})[a-z]{{0,6}})\.?"
_DAY = r"(\d{1,2})(?:st|nd|rd|th)?"
_ISO = re.compile(r"(\d{4})([-/])(0?[1-9]|1[0-2])\2(0?[1-9]|[12]\d|3[01])")
_SLASHED = re.compile(r"(\d{1,2})/(\d{1,2})/(\d{4})")
_NAMED = re.compile(rf"(?:{_MONTH} {_DAY}|{_DAY} {_MONTH}),? (\d{{4}})", re.IGNORECASE)
_BRACKETS = {"(": ")", "[": "]", "\\{": "\\}"}


def quick(reference: str, answer: str) -> bool | None:
    """True or False if that can be said by looking, None if it takes algebra.

    >>> quick("1,000", "$1000"), quick("1/2", "0.25"), quick("x+1", "1+x")
    (True, False, None)
    """
    if is_letter(reference):
        named = letter(answer)
        return named is not None and named == letter(reference)
    if (day := date(reference)) is not None:
        return date(answer) == day
    right, given = normalize(reference), normalize(answer)
    if not given or units.differ(reference, answer):
        return False
    if squeeze(right) == squeeze(given) or _bare(reference) == _bare(answer):
        return True
    if (base := _BASED.fullmatch(squeeze(right))) is not None:
        other_base = _BASED.fullmatch(squeeze(given))
        return base.groups() == other_base.groups() if other_base else base[1] == squeeze(given)
    value = number(right)
    if value is not None:
        if _contradicts_itself(given):
            return False
        chain = given.rpartition("=")[2].strip() if "=" in given else given
        chain = _DECIMAL_COMMA.sub(r"\1.\2", chain)
        other = number(chain)
        return None if other is None else same_number(right, value, chain, other)
    if (said := words(right)) is not None:
        told = words(given)
        return told is not None and (said == told or _same_items(said, told))
    return None


def date(answer: str) -> tuple[int, ...] | None:
    """Year, month and day of a date; never a difference or a quotient.

    >>> date("2020-01-05"), date("5 Jan. 2020"), date("2020-01")
    ((2020, 1, 5), (2020, 1, 5), None)
    """
    text = normalize(answer[:60])
    if match := _ISO.fullmatch(text):
        return int(match[1]), int(match[3]), int(match[4])
    if match := _NAMED.fullmatch(text):
        month = _MONTHS.index((match[1] or match[4])[:3].lower()) + 1
        return int(match[5]), month, int(match[2] or match[3])
    match = _SLASHED.fullmatch(text)  # day or month first: nobody knows
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def same_number(right: str, value: Fraction, given: str, other: Fraction) -> bool:
    """Whether two plain numbers, written and as values, are the same answer.

    Exactly equal, or one of them a rounding of the other fraction to at least six significant
    digits. A percent sign may be missing on either side: ``28%`` is ``28`` and is ``0.28``; but a
    number that carries none is never read as hundredths, nor ``0.5%`` as ``0.5``.
    """
    if value == other or _rounds(right, value, given, other) or _rounds(given, other, right, value):
        return True
    if _percent(right) and not _percent(given):
        return other == value * 100
    if _percent(given) and not _percent(right):
        return abs(value) >= 1 and other * 100 == value
    return False


def brackets(normal: str) -> str:
    """The kind of bracket that encloses an answer as a whole: ``(``, ``[``, ``\\{``, or nothing."""
    for opening, closing in _BRACKETS.items():
        if normal.startswith(opening) and normal.endswith((")", "]", "\\}")) and len(normal) > 2:
            depth = 0
            inner = normal[: -len(closing)]
            for character in inner:
                depth += (character in "([{") - (character in ")]}")
                if depth == 0 and character in ")]}":
                    return ""
            return opening
    return ""


def _contradicts_itself(given: str) -> bool:
    """``3=7``: a chain whose plain numbers are not even nearly the same."""
    values = [value for part in given.split("=") if (value := number(part)) is not None]
    return any(abs(value - values[-1]) > abs(values[-1]) / 50 for value in values)


def _bare(text: str) -> str:
    """Without spaces only: ``100, 200`` is the list ``100,200``, which else reads as a number."""
    return squeeze(re.sub(r"\$|\\!", "", text).strip())


def _percent(text: str) -> bool:
    return text.endswith(("%", "percent"))


def _rounds(exact: str, value: Fraction, rounded: str, other: Fraction) -> bool:
    """Whether ``rounded`` is a decimal of six digits or more that rounds the fraction ``exact``."""
    digits = rounded.lstrip("-0.").replace(".", "")
    is_decimal = re.fullmatch(r"-?\d*\.\d+", rounded) and len(digits) >= 6
    if not is_decimal or not re.search(r"frac|/", exact):
        return False
    unit = Fraction(1, 10 ** len(rounded.partition(".")[2]))
    return abs(value - other) <= unit  # rounded or cut off


def _same_items(said: str, told: str) -> bool:
    return "," in said and sorted(said.split(",")) == sorted(told.split(","))
