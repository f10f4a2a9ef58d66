"""Reads files of other programs: JSON within bounds, and one line for any fault of a file."""

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
"""Most levels of nesting in what is read and written, because functions recurse over values. An
environment's info has at most half of them, because a transcript adds levels around it."""

_LARGEST = 1 << 28  # bytes of a file of settings


def distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a mapping; raises ``ValueError`` if a key occurs twice."""
    if len(mapping := dict(pairs)) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {key!r:.60} stands twice")
    return mapping


def loads(
    text: str,
    strict: bool = True,
    pairs: Callable[[Sequence[tuple[str, Any]]], Any] | None = None,
    constant: Callable[[str], Any] | None = None,
) -> Any:
    """Parses JSON of an unknown author.

    Args:
        strict: refuse line breaks and tabs within texts.
        pairs: makes objects of their keys and values, such as ``distinct``; None: the last of
            equal keys counts.
        constant: what ``NaN``, ``Infinity`` and ``-Infinity`` are; None: numbers.

    Raises:
        ValueError: the text is not JSON, is nested deeper than ``DEEPEST``, or has a number of
            thousands of digits.
    """
    try:
        value = json.loads(text, strict=strict, object_pairs_hook=pairs, parse_constant=constant)
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} deep") from None
    if text.count("[") + text.count("{") > DEEPEST:
        check_depth(value)
    return value


def check_depth(value: Any, left: int = DEEPEST) -> None:
    """Raises ``ValueError`` for lists and objects that are nested deeper than ``left``."""
    if isinstance(value, (list, dict)):
        if not left:
            raise ValueError(f"nested more than {DEEPEST} deep")
        for item in value.values() if isinstance(value, dict) else value:
            check_depth(item, left - 1)


def check_memo(program: bytes) -> None:
    """Checks that the memo of a pickle has no large gaps. The unpickler allocates memory up to the
    highest index, so ten bytes can ask for gigabytes.

    Raises:
        ValueError: the memo has a gap, or the bytes are no pickle.
    """
    for operation, place, _ in pickletools.genops(program):
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and (place or 0) > len(program):
            raise ValueError(f"a pickle that remembers something in place {place}")


def open_regular(file: Path) -> BinaryIO:
    """Opens a regular file; raises ``OSError`` for a pipe or a device, which may never end."""
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "not a regular file")
    return file.open("rb")


def read_settings(file: Path) -> dict[str, Any]:
    """Reads the JSON object in a file.

    Raises:
        BadInput: the file cannot be read, or holds no JSON object.
    """
    with readable(file, "JSON file"), open_regular(file) as stream:
        if len(raw := stream.read(_LARGEST + 1)) > _LARGEST:
            raise ValueError(f"more than {_LARGEST >> 20} MiB")
        settings = loads(raw.decode("utf-8-sig"))
        if not isinstance(settings, dict):
            raise ValueError("expected names and values")
    return settings


@contextlib.contextmanager
def readable(source: object, kind: str) -> Iterator[None]:
    """Turns any exception about a file into a ``BadInput`` of one line.

    Args:
        source: name of the file in messages.
        kind: expected kind of the file, such as "GGUF file".
    """
    try:
        yield
    except BadInput:
        raise
    except BaseException as error:  # libraries raise what they like; Rust's panics are no Exception
        if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
            raise
        raise BadInput(f"{source}: not a readable {kind} ({reason(error)})") from error
