"""Reads rows from files and from the hub, each with its place for error messages."""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from marft_jax.errors import BadInput, reason
from marft_jax.formats import foreign
from marft_jax.plugins import given_object

SUFFIXES = (".json", ".jsonl", ".parquet", ".csv")
_COLUMN = re.compile(r"([A-J])|(?i:option|choice|op)[ _]?([A-Ja-j])")
_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:/(?P<subset>[\w.-]+))?(?::(?P<split>.+))?")


class LeftOut(NamedTuple):
    """Sound row that cannot be a task here, with the reason."""

    why: str


def rows_of(source: str) -> Iterator[tuple[str, Any]]:
    """Yields the place and the value of every row; a faulty line yields a ``ValueError``.

    Args:
        source: a ``.json`` (a list, or ``{"data": [...]}``), ``.jsonl``, ``.parquet`` or ``.csv``
            file (names in its first line), or ``owner/name[/subset][:split]`` on the hub; the split
            is ``train`` by default.

    Raises:
        BadInput: the whole file is missing or broken, or the hub cannot be reached.
    """
    if (given := given_object(source, "--env.data")) is not None:
        yield from ((f"row {i}", row) for i, row in enumerate(given, 1))
        return
    path = Path(source).expanduser()
    if path.suffix in SUFFIXES or path.exists():
        readers = {".json": _json, ".jsonl": _jsonl, ".parquet": _parquet, ".csv": _csv}
        reader = readers.get(path.suffix)
        if reader is None or path.is_dir():
            raise BadInput(f"{source}: expected a file {', '.join(SUFFIXES)}, or a hub id")
        try:
            yield from reader(path)
        except (
            OSError,
            ValueError,
            csv.Error,
        ) as error:  # ValueError: not UTF-8, a NUL in the name
            raise BadInput(f"{source!r}: cannot be read ({reason(error)})") from error
    elif match := _HUB.fullmatch(source):
        yield from _hub(source, match["name"], match["subset"], match["split"] or "train")
    else:
        raise BadInput(
            f"{source}: no such file; expected {', '.join(SUFFIXES)} or owner/name[:split]"
        )


def spelled(row: Mapping[str, Any]) -> dict[str, Any] | ValueError:
    """Rewrites a row with the names of our tables of fields; returns an error if two fields get the
    same name.

    Names become lower case. A chat, which is a list of messages with ``role`` and ``content``,
    becomes a text: the user's message, or several messages with their roles, without the system's.
    If the chat ends with an assistant's message, this is ``completion``. verl's ``reward_model:
    {ground_truth: ...}`` is ``ground_truth``. Columns ``A``, ``B``, ... or ``option_a``, ... are
    ``choices``.

    >>> spelled({"Prompt": [{"role": "user", "content": "1+1"}]})
    {'prompt': '1+1'}
    """
    found: dict[str, Any] = {}
    keys = [key for name in row if (key := name.strip().lower()) != name]
    if twice := {key for key in keys if keys.count(key) > 1} - row.keys():
        return ValueError(f"expected fields of different names, got several {min(twice)!r:.60}")
    columns = {m[1] or m[2].upper(): row[k] for k in row if (m := _COLUMN.fullmatch(k.strip()))}
    labels = itertools.takewhile(lambda label: columns.get(label) not in (None, ""), "ABCDEFGHIJ")
    if len(choices := {label: columns[label] for label in labels}) > 1:
        found["choices"] = choices
    for name, value in sorted(row.items(), key=lambda item: item[0] == item[0].lower()):
        key = name.strip().lower()
        if key == "reward_model" and isinstance(value, Mapping) and "ground_truth" in value:
            found["ground_truth"] = value["ground_truth"]
        elif turns := _chat(value):
            *before, (role, last) = turns
            if role == "assistant":
                found |= {"completion": last}
                turns = before
            several = [f"{role}: {text}" for role, text in turns] if len(turns) > 1 else None
            text = "\n".join(several or (text for _, text in turns))
            found |= {key: text} if text else {}
        else:
            found[key] = value
    return found


def _chat(value: Any) -> list[tuple[str, str]]:
    """Reads role and text of each message but the system's; returns nothing if it is no chat."""
    found = []
    for message in value if isinstance(value, list) else ():
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            return []
        content = message["content"]
        if isinstance(content, list):  # parts of text
            content = "".join(
                part.get("text") or "" for part in content if isinstance(part, Mapping)
            )
        if message["role"] != "system":
            found.append((str(message["role"]), str(content or "")))
    return found


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        first = lines.readline()
        lines.seek(0)
        separator = max(",;\t", key=first.count)
        reader = csv.DictReader(lines, delimiter=separator, strict=True)
        foreign.distinct([(name, None) for name in reader.fieldnames or () if name.strip()])
        for row in reader:
            place, names = f"{path} line {reader.line_num}", reader.fieldnames or ()
            if None in row or None in row.values():
                cells = sum(value is not None for value in row.values())
                more = " or more" if None in row else ""
                yield place, ValueError(f"expected {len(names)} cells, got {cells}{more}")
            else:
                yield place, row


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    row = foreign.loads(line, foreign.distinct)
                except ValueError as error:
                    row = ValueError(f"not JSON: {getattr(error, 'msg', error)}")
                yield f"{path} line {number}", row


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    text = path.read_text(encoding="utf-8-sig")
    try:
        rows = foreign.loads(text, foreign.distinct)
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
            foreign.distinct([(name, None) for name in file.schema_arrow.names])
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
