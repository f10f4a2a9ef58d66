"""Values as JSON and back, with their types and their identity, between two that do not trust.

Values of the language's own types travel as copies, so what arrives compares as it looks, however
its class at home compares. Lists, dicts and the like lie on a heap of their own and are named by
their place there: so one that a function changed can be changed in the same way where it came from,
and a list may hold itself. Anything else stays where it is and is named by a number.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import itertools
from collections.abc import Callable, Iterator
from typing import Any

LONGEST = 100_000
"""Items taken from an iterator that is given to a program."""

_HEAP: dict[str, type] = {
    "list": list, "counter": collections.Counter, "ordered": collections.OrderedDict,
    "default": collections.defaultdict, "dict": dict, "set": set, "deque": collections.deque,
    "bytearray": bytearray,
}  # fmt: skip
"""Types that can be changed, each before its own base."""
_VIEWS: dict[str, type] = {"keys": type({}.keys()), "values": type({}.values()),
                           "items": type({}.items())}  # fmt: skip
_SIMPLE: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "complex": (complex, lambda v: [v.real, v.imag], lambda v: complex(float(v[0]), float(v[1]))),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "range": (range, lambda v: [v.start, v.stop, v.step], lambda v: range(*v)),
    "slice": (slice, lambda v: [v.start, v.stop, v.step], lambda v: slice(*v)),
    "fraction": (fractions.Fraction, lambda v: [hex(v.numerator), hex(v.denominator)],
                 lambda v: fractions.Fraction(int(v[0], 16), int(v[1], 16))),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "timedelta": (datetime.timedelta, lambda v: [v.days, v.seconds, v.microseconds],
                  lambda v: datetime.timedelta(*v)),
    "ellipsis": (type(...), lambda v: 0, lambda v: ...),
}  # fmt: skip
"""Types that cannot be changed: how each is written, and made again."""


class Heap:
    """The values of one question and of its answer.

    Args:
        name: gives what does not travel a tag of its own.
        resolve: turns such a tag into what it stands for; raises for any other.
    """

    def __init__(self, name: Callable[[Any], dict[str, Any]], resolve: Callable[[Any], Any]):
        self._name, self._resolve = name, resolve
        self._objects: list[Any] = []
        self._places: dict[int, int] = {}
        self._known: list[Any] = []  # contents as both sides know them

    def dump(self, value: Any) -> dict[str, Any]:
        """A value for the other side, with all on the heap that is new or has changed."""
        tagged = self._tag(value)
        contents = [self._content(item) for item in self._objects]  # which grow while it runs
        both = itertools.zip_longest(contents, self._known)
        self._known = contents
        return {"value": tagged, "heap": [None if new == old else new for new, old in both]}

    def load(self, sent: Any) -> Any:
        """The value of the other side's ``dump``; what it changed is changed here.

        Raises:
            ValueError, TypeError, KeyError, LookupError: it is none.
        """
        contents = sent["heap"]
        for content in contents[len(self._objects) :]:
            kind = _HEAP[content[0]]
            self._keep(kind(maxlen=content[2]) if content[0] == "deque" else kind())
        if len(contents) != len(self._objects):
            raise ValueError("a heap does not shrink")
        for place, content in enumerate(contents):
            if content is not None:
                self._fill(place, content)
        both = itertools.zip_longest(contents, self._known)
        self._known = [old if new is None else new for new, old in both]
        return self._value(sent["value"])

    def _keep(self, value: Any) -> int:
        self._places[id(value)] = len(self._objects)
        self._objects.append(value)
        return len(self._objects) - 1

    def _tag(self, value: Any) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, int):
            value = int.__index__(value)
            return value if abs(value) < 1 << 53 else {"int": hex(value)}
        if isinstance(value, tuple):
            items = [self._tag(item) for item in tuple.__iter__(value)]
            fields = getattr(type(value), "_fields", None)
            return {"named": [type(value).__name__, list(fields), items]} if fields else items
        if isinstance(value, tuple(_HEAP.values())):
            place = self._places.get(id(value))
            return {"at": self._keep(value) if place is None else place}
        if isinstance(value, frozenset):
            return {"frozenset": [self._tag(item) for item in frozenset.__iter__(value)]}
        for kind, plain in _VIEWS.items():
            if isinstance(value, plain):
                return {kind: [self._tag(item) for item in value]}
        for kind, (plain, write, _) in _SIMPLE.items():
            if isinstance(value, plain):
                return {kind: write(value)}
        if isinstance(value, type) and getattr(builtins, value.__name__, None) is value:
            return {"type": value.__name__}
        return self._name(value)

    def _content(self, value: Any) -> list[Any]:
        kind, plain = next(entry for entry in _HEAP.items() if isinstance(value, entry[1]))
        if kind == "bytearray":
            return [kind, value.hex()]
        if issubclass(plain, dict):
            pairs = [[self._tag(k), self._tag(v)] for k, v in plain.items(value)]
            return [kind, pairs, self._tag(getattr(value, "default_factory", None))]
        items = [self._tag(item) for item in plain.__iter__(value)]
        return [kind, items, value.maxlen] if kind == "deque" else [kind, items]

    def _fill(self, place: int, content: Any) -> None:
        """Gives the object there these contents; its type never changes."""
        kind, inner = content[0], content[1]
        value = self._objects[place]
        if not isinstance(value, _HEAP[kind]):
            raise TypeError(f"expected a {type(value).__name__}, got a {kind}")
        if kind == "bytearray":
            value[:] = bytes.fromhex(inner)
        elif issubclass(_HEAP[kind], dict):
            pairs = [(self._value(k), self._value(v)) for k, v in inner]
            value.clear()
            for key, item in pairs:
                value[key] = item
            if kind == "default":
                value.default_factory = self._value(content[2])
        else:
            items = [self._value(item) for item in inner]
            value.clear()
            (value.update if kind == "set" else value.extend)(items)

    def _value(self, tagged: Any) -> Any:
        if isinstance(tagged, list):
            return tuple(self._value(item) for item in tagged)
        if not isinstance(tagged, dict):
            return tagged
        ((kind, inner),) = tagged.items()
        if kind == "at":
            return self._objects[inner]
        if kind == "int":
            return int(inner, 16)
        if kind in _SIMPLE:
            return _SIMPLE[kind][2](inner)
        if kind == "type":
            if isinstance(found := getattr(builtins, inner), type):
                return found
            raise TypeError(f"{inner} is no type")
        if kind == "named":
            made = collections.namedtuple(inner[0], inner[1])  # noqa: PYI024
            return made(*(self._value(item) for item in inner[2]))
        if kind not in ("frozenset", *_VIEWS):
            return self._resolve(tagged)
        items = [self._value(item) for item in inner]
        if kind == "frozenset":
            return frozenset(items)
        if kind == "values":
            return dict(enumerate(items)).values()
        return dict(items).items() if kind == "items" else dict.fromkeys(items).keys()


def first_items(value: Iterator[Any]) -> list[Any]:
    """The first items of an iterator."""
    return list(itertools.islice(value, LONGEST))


def as_json(value: Any) -> Any:
    """A value that JSON has no word for, as what comes closest: for ``json.dumps``.

    Raises:
        TypeError: nothing comes close.
    """
    if isinstance(value, (fractions.Fraction, decimal.Decimal)):
        return float(value)
    if isinstance(value, (collections.deque, range, Iterator, *_VIEWS.values())):
        return first_items(iter(value))
    raise TypeError(f"{type(value).__name__} is not a JSON value")
