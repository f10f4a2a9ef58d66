"""Plain values as JSON text and back, with their types: tuples, sets, bytes and huge integers too.

Only values of the language's own types travel, so what arrives compares as it looks; anything else
is named by a number and stays where it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

LONGEST = 100_000
"""Items taken from an iterator."""
_PLAIN = (str, float, bool, type(None))
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def dumps(value: Any, name: Callable[[Any], int] | None = None) -> str:
    """A value as one line of text.

    Args:
        value: any value.
        name: gives a number to what is not plain.

    Raises:
        TypeError: something is not plain and there is no ``name``.
        RecursionError: too deep, or in a circle.
    """
    return json.dumps(_tagged(value, name))


def loads(text: str, resolve: Callable[[int], Any]) -> Any:
    """The value of ``dumps``; ``resolve`` turns numbers into what they stand for."""
    return _value(json.loads(text), resolve)


def _tagged(value: Any, name: Callable[[Any], int] | None) -> Any:
    if value is None or isinstance(value, bool):
        return value
    for plain in (str, float):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 53 else {"int": hex(value)}
    if isinstance(value, list):
        return [_tagged(item, name) for item in value]
    if isinstance(value, dict):
        return {"dict": [[_tagged(k, name), _tagged(v, name)] for k, v in value.items()]}
    for kind, plain in _SEQUENCES.items():
        if isinstance(value, plain):
            return {kind: [_tagged(item, name) for item in value]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, Iterator):
        items = [item for item, _ in zip(value, range(LONGEST), strict=False)]
        return {"iterator": [_tagged(item, name) for item in items]}
    if name is None:
        raise TypeError(f"{type(value).__name__} is not a plain value")
    return {"ref": name(value)}


def _value(tagged: Any, resolve: Callable[[int], Any]) -> Any:
    if isinstance(tagged, list):
        return [_value(item, resolve) for item in tagged]
    if not isinstance(tagged, dict):
        return tagged
    ((kind, inner),) = tagged.items()
    if kind == "ref":
        return resolve(inner)
    if kind == "int":
        return int(inner, 16)
    if kind == "bytes":
        return bytes.fromhex(inner)
    items = [_value(item, resolve) for item in inner]
    if kind == "dict":
        return dict(items)
    if kind == "complex":
        return complex(*items)
    if kind == "range":
        return range(*items)
    return iter(items) if kind == "iterator" else _SEQUENCES[kind](items)
