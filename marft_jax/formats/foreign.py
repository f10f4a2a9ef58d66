"""Files that others wrote: JSON within bounds, and one line for whatever is wrong with a file."""

from __future__ import annotations

import contextlib
import errno
import json
import pickletools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from marft_jax.errors import BadInput, reason

DEEPEST = 64
"""Levels of nesting that are read and written: whoever walks a value may recurse. What an
environment adds has half of them, since a transcript puts more around it."""

_LARGEST = 1 << 28  # bytes of a file of settings


def distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a mapping of names that each stand once, or raises ``ValueError``."""
    if len(found := dict(pairs)) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {key!r:.60} stands twice")
    return found


def loads(text: str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parses JSON that anyone may have written; ``pairs`` as ``json``'s ``object_pairs_hook``.

    Raises:
        ValueError: it is not JSON, is nested deeper than ``DEEPEST``, or has a number of thousands
            of digits.
    """
    try:
        value = json.loads(text, object_pairs_hook=pairs)
        if text.count("[") + text.count("{") > DEEPEST:
            _check_depth(value, DEEPEST)
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} deep") from None
    return value


def _check_depth(value: Any, left: int) -> None:
    if isinstance(value, (list, dict)):
        if not left:
            raise RecursionError
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, left - 1)


def check_memo(program: bytes) -> None:
    """Checks that a pickle remembers things in places without gaps: the unpickler makes room for
    all up to the highest, and ten bytes can ask for gigabytes.

    Raises:
        ValueError: it does not, or it is no pickle.
    """
    for operation, place, _ in pickletools.genops(program):
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and (place or 0) > len(program):
            raise ValueError(f"a pickle that remembers something in place {place}")


def open_regular(file: Path) -> BinaryIO:
    """Opens a file that ends; raises ``OSError`` also for a pipe or a device."""
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "not a regular file")
    return file.open("rb")


def read_settings(file: Path) -> dict[str, Any]:
    """Reads the JSON object in a file.

    Raises:
        BadInput: it cannot be read, or is something else.
    """
    with readable(file, "JSON file"), open_regular(file) as stream:
        if len(raw := stream.read(_LARGEST + 1)) > _LARGEST:
            raise ValueError(f"more than {_LARGEST >> 20} MiB")
        settings = loads(raw.decode())
        if not isinstance(settings, dict):
            raise ValueError("expected names and values")
    return settings


@contextlib.contextmanager
def readable(source: object, kind: str) -> Iterator[None]:
    """Turns whatever a strange file makes its readers raise into one line.

    Args:
        source: the file, as the user knows it.
        kind: what it should be, such as "GGUF file".

    Raises:
        BadInput: something failed.
    """
    try:
        yield
    except BadInput:
        raise
    except BaseException as error:  # libraries raise what they like; Rust's panics are no Exception
        if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
            raise
        raise BadInput(f"{source}: not a readable {kind} ({reason(error)})") from error
