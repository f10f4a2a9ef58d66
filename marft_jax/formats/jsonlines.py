"""Writes strict JSON Lines, and replaces files atomically."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from marft_jax.formats.foreign import DEEPEST, loads

_HOLDING = (Mapping, list, tuple, set, frozenset)


def dumps(value: Any) -> str:
    """Converts a value to a line of strict JSON.

    Arrays and their scalars become lists and numbers, a number that is not finite becomes
    ``null``, and a value of another type becomes its text.
    """
    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False)


def write(path: Path, lines: Iterable[str]) -> None:
    """Replaces a file by these lines; if the process dies meanwhile, the old file stays."""
    with draft_of(path) as draft:
        append(draft, lines)


@contextlib.contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Gives a file to write, which replaces ``path`` if the block ends without an exception."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)  # of a dead process with the same number
    try:
        yield draft
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def append(path: Path, lines: Iterable[str]) -> None:
    """Appends lines to a file; they are on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())


def objects(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yields the objects of a file, one per line, of no file none; other lines, such as a last one
    that is being written, are left out."""
    text = path.read_text("utf-8", "replace") if path.is_file() else ""
    for line in text.split("\n"):  # an object may hold other ends of lines
        row = None
        with contextlib.suppress(ValueError):
            row = loads(line)
        if isinstance(row, dict):
            yield row


def keep_steps_before(path: Path, step: int) -> None:
    """Deletes the objects of this ``step`` and later ones, and an incomplete last line.

    A run that continues from a checkpoint reports these steps again.
    """
    keep(path, lambda row: float(row["step"]) < step)


def keep(
    path: Path, wanted: Callable[[Any], bool], before: Callable[[], object] = lambda: None
) -> None:
    """Deletes every line of a file that is not a wanted object; calls ``before`` if there are any,
    before the file changes."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    kept = []
    for line in text.split("\n"):  # an object may hold other ends of lines
        with contextlib.suppress(ValueError, KeyError, TypeError):
            kept += [line] if wanted(loads(line)) else []
    if "".join(f"{line}\n" for line in kept) != text:
        before()
        write(path, kept)


def plain(value: Any, most: float = math.inf, deepest: int = DEEPEST) -> Any:
    """Converts a value to plain Python values, which JSON can hold; see ``dumps``.

    Raises:
        ValueError: the value has more than ``deepest`` levels, contains itself, or has more than
            ``most`` parts.
    """
    parts = itertools.count(1)

    def walk(value: Any, left: int) -> Any:
        if left < isinstance(value, _HOLDING):
            raise ValueError(f"more than {deepest} levels, or in itself")
        if next(parts) > most:
            raise ValueError("too many parts")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):  # lone surrogates, which no file can hold, spelled out
            return str.encode(value, "utf-8", "backslashreplace").decode()
        if isinstance(value, Mapping):
            return {walk(str(k), left): walk(v, left - 1) for k, v in value.items()}
        if isinstance(value, _HOLDING):
            return [walk(item, left - 1) for item in value]
        if isinstance(value, numbers.Integral):
            return int(value) if abs(int(value)) < 1 << 1024 else hex(int(value))
        if isinstance(value, numbers.Real):
            return float(value) if math.isfinite(value) else None
        if hasattr(value, "tolist"):  # an array of NumPy or JAX, of any rank
            return walk(value.tolist(), left - 1)
        return walk(str(value), left)

    return walk(value, deepest)
