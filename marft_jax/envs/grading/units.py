"""Units behind an answer. A missing one is forgiven, a different one is not."""

from __future__ import annotations

import re

_NAMES = {
    "unit": "unit units",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "m": "m meter meters metre metres",
    "km": "km kilometer kilometers kilometre kilometres",
    "inch": "in inch inches",
    "foot": "ft foot feet",
    "yard": "yd yard yards",
    "mile": "mi mile miles",
    "g": "g gram grams",
    "kg": "kg kilogram kilograms",
    "mg": "mg milligram milligrams",
    "pound": "lb lbs pound pounds",
    "ounce": "oz ounce ounces",
    "l": "l liter liters litre litres",
    "ml": "ml milliliter milliliters millilitre millilitres",
    "gallon": "gal gallon gallons",
    "second": "s sec secs second seconds",
    "minute": "min mins minute minutes",
    "hour": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "yr yrs year years",
    "dollar": "dollar dollars",
    "cent": "cent cents ¢",
    "mile/hour": "mph",
    "km/hour": "kph",
    "a.m.": "am",
    "p.m.": "pm",
}
_CANONICAL = {word: unit for unit, words in _NAMES.items() for word in words.split()}
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
_BEHIND = re.compile(
    r"(?:[\d})%$.]|\\pi)\s*\\?(?:text|mbox|mathrm|textrm|textbf)?\s*\{?\s*((?:square|sq|cubic|cu)\b\.?)?\s*"
    r"([A-Za-z¢]+(?:\.[a-z]\.)?)\.?\s*\}?\s*(?:\^\s*\{?\s*([2-9])\s*\}?)?"
    r"(?:\s*(?:per\b|/)\s*([A-Za-z]+)\.?\s*\}?)?[\s.$]*"
)
_DOLLARS = re.compile(r"-?\s*\\?\$\s*-?[\d.,\\!]+")


def unit(answer: str) -> str:
    """The known unit that an answer ends with, with its power, or nothing.

    >>> unit("45\\\\text{ square inches}"), unit("45 in^2"), unit("45 apples"), unit("9 mph")
    ('inch^2', 'inch^2', '', 'mile/hour')
    """
    answer = answer.strip()
    if _DOLLARS.fullmatch(answer) and answer.count("$") == 1:
        return "dollar"
    end = re.sub(r"~|\\[,;: ]", " ", answer[-60:].replace("²", "^2").replace("³", "^3"))
    matches = list(_BEHIND.finditer(end))
    found = matches[-1] if matches else None
    if found is None or found.end() < len(end):
        return ""
    name = _name(found[2])
    if found[4]:
        per = _name(found[4])
        return f"{name}/{per}" if name and per else ""
    power = _POWERS.get((found[1] or "").rstrip("."), found[3] or "")
    return f"{name}^{power}" if name and power else name


def _name(word: str) -> str:
    word = word.replace(".", "")
    return _CANONICAL.get(word if len(word) == 1 else word.lower(), "")


def differ(reference: str, answer: str) -> bool:
    """Whether both name a unit we know, and not the same; miles will do for miles per hour."""
    right, given = unit(reference), unit(answer)
    if ("/" in right) != ("/" in given):
        right, given = right.partition("/")[0], given.partition("/")[0]
    return bool(right and given and right != given)
