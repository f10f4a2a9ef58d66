"""Compares an answer with the reference, if that needs no algebra.

Most answers are plain numbers, letters or words. The calling process compares these exactly; all
other answers go to a worker with a computer algebra system.
"""

from __future__ import annotations

import contextlib
import datetime
import re
from fractions import Fraction

from marft_jax.envs.grading import units
from marft_jax.envs.grading.normalize import number, split, without_format
from marft_jax.envs.grading.truth import is_boolean, truth

_BASED = re.compile(r"(-?[0-9A-Z.]+)_\{?(\d{1,2})\}?")  # 1011_2: the base may be left out
_DECIMAL_COMMA = re.compile(r"(-?\d+),(\d+)")  # a list would not answer a single number
_COUNTED = re.compile(r"[\d}%]\s+[A-Za-z]{3}[A-Za-z ]*$")  # 7 eighths: words that are no unit
_DATED = re.compile(r"[\w/.-]{1,12}(?: [\w.]{1,10},?)?(?: \d{4})?", re.ASCII)
_DATES = ("%Y-%m-%d", "%Y/%m/%d", "%m/%d/%Y", "%B %d, %Y", "%d %B %Y", "%b %d, %Y", "%d %b %Y")
_NAMED = r"\W*(?:text\{)?\W*(?:(?i:option|choice|answer)\W+)?"
_LETTER = re.compile(rf"{_NAMED}([A-Ja-j])\W*", re.ASCII)
_RIGHT_LETTER = re.compile(rf"{_NAMED}(?:[A-J]|(?<=[(（])[a-j](?=[)）]))\W*", re.ASCII)
_LEADING_LETTER = re.compile(
    rf"{_NAMED}(?:([A-Ja-j])[).:}}、．]"
    r"|([A-Jb-j])(?:[\s~}]|\\ )+[-–—]?\s*(?=[\d$.(]|\\(?!text|l?or|vee)))"
)
_FIGURES = "zero one two three four five six seven eight nine ten eleven twelve".split()
_MANTISSA = re.compile(r"(\d*)\.(\d+)")
_MIXED = re.compile(
    r"^(\W*(\d+))\s*(?:\\text\{\s*and\s*\}|and)\s*(?=\\[dtc]?frac|\d+ ?[/⁄]|[¼-¾⅐-⅞])"
)
_WORDY = re.compile(r"[A-Za-z]{2}|[A-Za-z]\.|[^\x00-\x7f]|^[A-Z](?:, ?[A-Z])+$")


def quick(reference: str, answer: str) -> bool | None:
    """Compares without algebra.

    Returns:
        True or False if they mean the same or not; None if only algebra can tell.

    >>> quick("1,000", "$1000"), quick("1/2", "0.25"), quick("x+1", "1+x")
    (True, False, None)
    """
    if is_letter(reference):
        return named_letter(answer) == named_letter(reference)
    if is_boolean(reference):
        return truth(answer) == truth(reference)
    readings = (_mixed(reference), answer), (reference, _mixed(answer))
    if any(both != (reference, answer) and _same(*both) for both in readings):
        return True  # 5 and 1/4: a list of two, or 21/4
    return _same(reference, answer)


def _same(reference: str, answer: str) -> bool | None:
    (right, unit), (given, other) = split(reference), split(answer)
    if not unit and units.read(other):
        right, unit = split(reference, True)
    elif not other and units.read(unit):
        given, other = split(answer, True)
    unit, other = _kind(right, unit), _kind(given, other)
    ratio = _ratio(unit, other)
    if ratio is None and "per" in (reference + answer).split() and ("/" in unit) != ("/" in other):
        ratio = _ratio(unit.partition("/")[0], other.partition("/")[0])  # "miles per hour": "miles"
    if not given or ratio is None:
        return False
    if ratio != 1:
        value = number(given)
        return value is not None and number(right) == value * ratio
    if (day := _date(right)) is not None:
        return _date(given) == day
    if right == given or _squeeze(reference) == _squeeze(answer):
        return True
    if base := _BASED.fullmatch(right):
        other_base = _BASED.fullmatch(given)
        return base.groups() == other_base.groups() if other_base else base[1] == given
    if number(right) is not None:
        word = given.lower()
        return _same_number(right, str(_FIGURES.index(word)) if word in _FIGURES else given)
    if (words := _words(right)) is not None:
        return words == _words(given)
    return None


def _mixed(answer: str) -> str:
    """Reads ``5 and 1/4`` as ``5 1/4``; whatever is no mixed number stays."""
    if (match := _MIXED.match(answer)) is None:
        return answer
    mixed = _MIXED.sub(r"\1 ", answer)
    value = number(split(mixed)[0])
    return mixed if value is not None and abs(value) // 1 == int(match[2]) else answer


def is_letter(reference: str) -> bool:
    """Recognises a choice letter: ``B``, ``(b)``, ``\\textbf{(B)}``, ``\\textbf{(B)} 42``.

    ``b`` is a variable.
    """
    letter = without_format(reference)
    return len(letter) <= 40 and _RIGHT_LETTER.fullmatch(letter) is not None


def named_letter(answer: str) -> str | None:
    """Reads the choice letter that an answer names: of ``(B)``, ``B.`` or ``B) 42``."""
    answer = without_format(answer[:200])[:40]
    match = _LETTER.fullmatch(answer) or _LEADING_LETTER.match(answer)
    return match[match.lastindex or 1].upper() if match else None


def _kind(value: str, unit: str) -> str:
    """Returns the unit, or the thing that is counted; for a percentage, ``%``."""
    return "%" if value.endswith("%") else unit


def _ratio(unit: str, other: str) -> Fraction | None:
    """Divides one unit by another; None for different units or different counted things. A missing
    word is no difference."""
    words, others = set(unit.split()), set(other.split())
    one, two = units.read(unit), units.read(other)
    if any({unit, other} <= {"degree", f"°{scale}", scale} for scale in "CF"):
        return Fraction(1)
    if one and two:
        return two.size / one.size if one.powers == two.powers else None
    return Fraction(1) if words <= others or others <= words else None


def _date(value: str) -> datetime.date | None:
    """Reads a date, so that it is not taken for a difference or a quotient."""
    if _DATED.fullmatch(value) and re.search(r"\d", value):
        text = re.sub(r"(?<=\d)(?:st|nd|rd|th)\b", "", value.replace(".", ""))
        for form in _DATES:
            with contextlib.suppress(ValueError):
                return datetime.datetime.strptime(text, form).date()
    return None


def _same_number(right: str, given: str) -> bool | None:
    """Compares plain numbers; the given number may be the end of a chain, ``2+5=7``.

    Numbers must be equal, or a fraction and its decimal to six significant digits. A percent sign
    may be missing on either side: ``28%`` equals ``28`` and ``0.28``. But a reference without a
    percent sign is never read as hundredths, and ``0.5%`` is not ``0.5``.
    """
    *before, last = (_DECIMAL_COMMA.sub(r"\1.\2", part.strip()) for part in given.split("="))
    value, other = number(right), number(last)
    if value is None or other is None:
        return False if _COUNTED.search(last) else None
    chain = [link for part in before if (link := number(part)) is not None]
    if any(abs(link - other) > abs(other) / 50 for link in chain):
        return False  # 3=7
    if value == other:
        return True
    percent, other_percent = (text.endswith(("%", "percent")) for text in (right, last))
    if percent != other_percent:
        return other == value * 100 if percent else abs(value) >= 1 and other * 100 == value
    rounded = ("\\frac" in right or "/" in right) != ("\\frac" in last or "/" in last)
    decimal, exact = (right, other) if "frac" in last or "/" in last else (last, value)
    return rounded and _rounds(decimal, exact)


def _rounds(decimal: str, exact: Fraction) -> bool:
    """True for a decimal of six significant digits or more that rounds, or cuts, an exact number.

    >>> _rounds("0.666667", Fraction(2, 3)), _rounds("0.000001", Fraction(1, 1000001))
    (True, False)
    """
    mantissa, value = _MANTISSA.search(decimal), number(decimal)
    digits = mantissa[1] + mantissa[2] if mantissa else ""
    if not value or len(digits.lstrip("0")) < 6:
        return False
    last = abs(value) / int(digits)  # the size of the last digit
    return abs(value - exact) < last


def _words(value: str) -> list[str] | None:
    """Splits an answer in words into sorted lower-case parts: ``4:30 p.m.`` is ``4:30pm``."""
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", value)
    if re.search(r"[\\^_{}=<>+*/]", text) or not _WORDY.search(text):
        return None
    return sorted(re.sub(r"[\s.\"'“”()-]+", "", text).casefold().split(","))


def _squeeze(text: str) -> str:
    """Removes spaces without a meaning: ``100, 200`` is the list ``100,200``, not a number."""
    return re.sub(r"\$|\\!|(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])", "", text.strip())
