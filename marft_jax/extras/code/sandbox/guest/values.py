"""Plain values as JSON and back, with their types, between mutually distrusting interpreters.

Only copies of built-in and standard-library types pass, so a value that arrives compares by its
content, whatever its class did. Functions and objects of other classes are refused.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import itertools
from collections.abc import Callable, Iterator
from typing import Any

LONGEST = 100_000
"""Most items that are taken from an iterator."""


def first_items(value: Iterator[Any]) -> list[Any]:
    """Takes the first items of an iterator."""
    return list(itertools.islice(value, LONGEST))


def _pairs(value: Any) -> list[list[Any]]:
    return [list(pair) for pair in value.items()]


_Kind = tuple[type, Callable[[Any], Any], Callable[[Any], Any]]
_VIEWS: dict[str, _Kind] = {
    "keys": (type({}.keys()), list, lambda v: dict.fromkeys(v).keys()),
    "values": (type({}.values()), list, lambda v: dict(enumerate(v)).values()),
    "items": (type({}.items()), lambda v: list(map(list, v)), lambda v: dict(v).items()),
}
_KINDS: dict[str, _Kind] = {
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "counter": (collections.Counter, _pairs, lambda v: collections.Counter(dict(v))),
    "dict": (dict, _pairs, dict),
    "deque": (collections.deque, list, collections.deque),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "complex": (complex, lambda v: [v.real, v.imag], lambda v: complex(*v)),
    "range": (range, lambda v: [v.start, v.stop, v.step], lambda v: range(*v)),
    "fraction": (fractions.Fraction, lambda v: [v.numerator, v.denominator],
                 lambda v: fractions.Fraction(*v)),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "timedelta": (datetime.timedelta, lambda v: [v.days, v.seconds, v.microseconds],
                  lambda v: datetime.timedelta(*v)),
    "iterator": (Iterator, first_items, iter),
    **_VIEWS,
}  # fmt: skip
"""Types, each before its base classes: how a value is written, and how it is rebuilt."""


def dump(value: Any) -> Any:
    """Converts a value to JSON types; ``load`` is the inverse.

    Raises:
        TypeError: the value is, or contains, no plain value.
        RecursionError: the value is nested too deeply, or contains itself.
    """
    if value is None or isinstance(value, (bool, str, float)):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 53 else {"int": hex(value)}
    if isinstance(value, list):
        return [dump(item) for item in value]
    for kind, (plain, write, _) in _KINDS.items():
        if isinstance(value, plain):
            return {kind: dump(write(value))}
    raise TypeError(f"expected a plain value, got a {type(value).__name__}")


def load(sent: Any) -> Any:
    """Rebuilds a value from what ``dump`` returned.

    Raises:
        Exception: of any kind, if ``dump`` did not make it.
    """
    if isinstance(sent, list):
        return [load(item) for item in sent]
    if not isinstance(sent, dict):
        return sent
    ((kind, inner),) = sent.items()
    return int(inner, 16) if kind == "int" else _KINDS[kind][2](load(inner))


def replace(value: Any, new: Any) -> None:
    """Replaces the contents of a list, dict, set and the like by those of another of its type."""
    if type(value) is type(new) and hasattr(value, "clear") and value != new:
        value.clear()
        (value.extend if hasattr(value, "extend") else value.update)(new)


def as_json(value: Any) -> Any:
    """Converts a value that JSON lacks to the closest JSON value, for ``json.dumps``.

    Raises:
        TypeError: there is no close value.
    """
    if isinstance(value, (fractions.Fraction, decimal.Decimal)):
        return float(value)
    views = tuple(kind for kind, _, _ in _VIEWS.values())
    if isinstance(value, (collections.deque, range, Iterator, *views)):
        return first_items(iter(value))
    raise TypeError(f"{type(value).__name__} is not a JSON value")
