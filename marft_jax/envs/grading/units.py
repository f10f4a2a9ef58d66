"""Units of physics, money and everyday life: their spellings, sizes and dimensions."""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

_PREFIXES = (
    ("", "", 0), ("T", "tera", 12), ("G", "giga", 9), ("M", "mega", 6), ("k", "kilo", 3),
    ("h", "hecto", 2), ("d", "deci", -1), ("c", "centi", -2), ("m", "milli", -3),
    ("μ", "micro", -6), ("u", "micro", -6), ("n", "nano", -9), ("p", "pico", -12),
    ("f", "femto", -15),
)  # fmt: skip
_LATEX = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\text\{|\\(?:cdot|times)(?![A-Za-z])", " "), (r"\\Omega(?![A-Za-z])", "Ω"),
        (r"\\mu(?![A-Za-z])[\s}]*", "μ"), (r"(?<=[kMGmμ])[\s}]+(?=Ω)", ""),
        (r"(?i:degrees?|deg|°)[\s.]*([CcFf])(?i:elsius|ahrenheit)?\b", r"°\1"),
        (r"\b([apAP])\.\s?[mM]\b", r"\1m"), (r"\^\s*\{?\s*(-?\d)\s*\}?|[{}]", r"\1 "),
    )
]  # fmt: skip
_PART = re.compile(
    r"(?P<per>/|per\b|每)|(?P<before>square|sq|cubic|cu)\b|[\s*.()-]+"
    r"|(?P<name>°?[^\W\d_]+|¢)(?:\s?\^?(?P<power>-?\d)|\s+(?P<after>squared|cubed)\b)?"
)
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}


class Unit(NamedTuple):
    """Unit of measurement.

    Attributes:
        name: the unit in one spelling, which ``read`` reads.
        size: the unit in basic units.
        powers: powers of the basic units, as sorted pairs.
    """

    name: str
    size: Fraction
    powers: tuple[tuple[str, int], ...]


@functools.lru_cache(maxsize=1024)
def read(text: str) -> Unit | None:
    """Reads a unit; returns None if a part of the text is no unit.

    >>> read("square inches").name, read("km per hour")[:2], read("5 apples")
    ('in^2', ('km/h', Fraction(5, 18)), None)
    """
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    sign, before, end, size = 1, 1, 0, Fraction(1)
    powers, above, below = dict[str, int](), list[str](), list[str]()
    while part := _PART.match(text, end):
        end = part.end()
        sign = -1 if part["per"] else sign
        before = _POWERS.get(part["before"], before)
        if not (word := part["name"]):
            continue
        unit = _single(word) or (_single(word.lower()) if len(word) > 1 else None)
        if unit is None or sign < 0 and not above:
            return None
        power = int(part["power"] or _POWERS.get(part["after"], before)) * sign
        size, before = size * unit.size**power, 1
        for base, times in unit.powers:
            powers[base] = powers.get(base, 0) + power * times
        shown = unit.name + (f"^{abs(power)}" if abs(power) > 1 else "")
        (above if power > 0 else below).append(shown)
    if end < len(text) or not above + below:
        return None
    name = " ".join(above) + ("/" + " ".join(below) if below else "")
    return Unit(name, size, tuple(sorted(pair for pair in powers.items() if pair[1])))


@functools.lru_cache(maxsize=1024)
def _single(word: str) -> Unit | None:
    """Finds a unit by its symbol or name, also in the plural and with a prefix."""
    entries = _entries()
    for short, long, exponent in _PREFIXES:
        for start in dict.fromkeys((short, long)):
            stem = word.removeprefix(start)
            name = stem if stem in entries or len(stem) < 3 else stem.removesuffix("s")
            first, definition = entries.get(name, ("", ""))
            symbol = first.rstrip("*")
            is_symbol = name == symbol or len(name) < 3
            fits = not start or first != symbol and is_symbol == (start == short)
            if first and fits and word.startswith(start):
                factor = re.match(r"[\d/]*\d(?=\s)|", definition)[0]  # type: ignore[index]
                base = read(definition[len(factor) :]) or Unit("", Fraction(1), ((symbol, 1),))
                size = base.size * Fraction(factor or 1) * Fraction(10) ** exponent
                return Unit(short + symbol, size, base.powers)
    return None


@functools.cache
def _entries() -> dict[str, tuple[str, str]]:
    """Maps the names in ``units.txt`` to the symbol, with its star, and the definition."""
    text = Path(__file__).with_name("units.txt").read_text(encoding="utf-8")
    lines = (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
    return {
        name.rstrip("*"): (head.split()[0], definition.strip())
        for head, _, definition in lines
        for name in head.split()
    }
