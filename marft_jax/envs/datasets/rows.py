"""Rows out of files and out of the hub, each with its place, as error messages name it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from marft_jax.errors import BadInput, reason
from marft_jax.formats import foreign

SUFFIXES = (".json", ".jsonl", ".parquet")
_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:/(?P<subset>[\w.-]+))?(?::(?P<split>.+))?")


class LeftOut(NamedTuple):
    """A sound row whose task cannot be set here, with the reason."""

    why: str


def rows_of(source: str) -> Iterator[tuple[str, Any]]:
    """Reads every row, with its place; a ``ValueError`` in place of a line that is not JSON.

    Args:
        source: a ``.json`` (a list, or ``{"data": [...]}``), ``.jsonl`` or ``.parquet`` file, or
            ``owner/name[/subset][:split]`` on the hub; the split is ``train`` by default.

    Raises:
        BadInput: the file is missing or broken as a whole, or the hub cannot be reached.
    """
    path = Path(source).expanduser()
    if path.suffix in SUFFIXES or path.exists():
        reader = {".json": _json, ".jsonl": _jsonl, ".parquet": _parquet}.get(path.suffix)
        if reader is None or path.is_dir():
            raise BadInput(f"{source}: expected a file {', '.join(SUFFIXES)}, or a hub id")
        try:
            yield from reader(path)
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
            raise BadInput(f"{source!r}: cannot be read ({reason(error)})") from error
    elif match := _HUB.fullmatch(source):
        yield from _hub(source, match["name"], match["subset"], match["split"] or "train")
    else:
        raise BadInput(
            f"{source}: no such file; expected {', '.join(SUFFIXES)} or owner/name[:split]"
        )


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    row = foreign.loads(line)
                except ValueError as error:
                    row = ValueError(f"not JSON: {getattr(error, 'msg', error)}")
                yield f"{path} line {number}", row


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    text = path.read_text(encoding="utf-8-sig")
    try:
        rows = foreign.loads(text)
    except json.JSONDecodeError as error:
        raise BadInput(f"{path} line {error.lineno}: not JSON: {error.msg}") from error
    if isinstance(rows, Mapping):
        rows = rows.get("data")
    if not isinstance(rows, list):
        raise BadInput(f'{path}: expected a list of rows, or {{"data": [...]}}')
    for number, row in enumerate(rows, 1):
        yield f"{path} row {number}", row


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise BadInput(f"{path}: reading it needs pyarrow: pip install pyarrow") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", row
    except pyarrow.ArrowException as error:
        raise BadInput(f"{path}: not a Parquet file: {reason(error)}") from error


def _hub(source: str, name: str, subset: str | None, split: str) -> Iterator[tuple[str, Any]]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise BadInput(f"{source}: the hub needs datasets: pip install datasets") from error
    try:
        rows = datasets.load_dataset(name, subset, split=split)  # pyright: ignore
    except Exception as error:  # offline, unknown name, missing subset, unknown split, ...
        raise BadInput(
            f"{source}: no such file, and as a hub id it cannot be loaded: {reason(error)}"
        ) from error
    for number, row in enumerate(rows, 1):
        yield f"{source} row {number}", row
