"""Reads rows from files and from the hub, each with its place for error messages."""

from __future__ import annotations

import ast
import contextlib
import csv
import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from marft_jax.errors import BadInput, reason
from marft_jax.formats import foreign
from marft_jax.formats.foreign import readable
from marft_jax.plugins import given_object, shown

SUFFIXES = (".json", ".jsonl", ".parquet", ".csv")
_COLUMN = re.compile(r"([A-J])|(?i:option|choice|op)[ _]?([A-Ja-j])")
_CHATS = ("prompt", "messages", "conversations", "conversation", "completion", "question", "input")
_CHECKED = ("reward_model", "verification_info")
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "developer": "system"}
_TURN = (("role", "from"), ("content", "value"))
_LONGEST = 1 << 20  # characters of a text that is parsed
_BATCH = 1000  # rows
_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:/(?P<subset>[\w.-]+))?(?::(?P<split>.+))?")


class LeftOut(NamedTuple):
    """Sound row that cannot be a task here, with the reason."""

    why: str


def rows_of(source: str) -> Iterator[tuple[str, Any]]:
    """Yields the place and the value of every row; a faulty line yields a ``ValueError``.

    Args:
        source: a ``.json`` or ``.jsonl`` (a row on each line, a list, or ``{"data": [...]}``),
            ``.parquet`` or ``.csv`` file (names in its first line), or
            ``owner/name[/subset][:split]`` on the hub; the split is ``train`` by default.

    Raises:
        BadInput: the whole file is missing or broken, or the hub cannot be reached.
    """
    if (rows := given_object(source, "--env.data")) is not None:
        yield from ((f"row {i}", row) for i, row in enumerate(_of_python(rows), 1))
        return
    path = Path(source)
    readers = {".json": _json, ".jsonl": _json, ".parquet": _parquet, ".csv": _csv}
    if (read := readers.get(path.suffix.lower())) and (path.is_file() or not path.exists()):
        with readable(source, "file of rows"):
            yield from read(path)
    elif (match := _HUB.fullmatch(source)) and not path.exists():
        yield from _hub(source, match["name"], match["subset"], match["split"] or "train")
    else:
        what = "expected" if path.exists() else "no such file; expected"
        raise BadInput(f"{source}: {what} a file {', '.join(SUFFIXES)}, or owner/name[:split]")


def spelled(row: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrites a row with the names of our tables of fields.

    Names become lower case. A chat, which is a list of messages with ``role`` and ``content`` (or
    ``from`` and ``value``), becomes a text: the user's message, or several messages with their
    roles. The text of system messages, or of a column of that name, is ``system``. If a chat of the
    task, such as ``prompt``, ends with an assistant's message, this is ``completion``; that of
    another column (``chosen``, ``rejected``) may be wrong, and is not. ``{ground_truth: ...}`` in
    ``reward_model`` or ``verification_info`` is ``ground_truth``; ``responses_create_params`` has
    the ``prompt``. Columns ``A``, ``B``, ... or ``option_a``, ... are ``choices``.

    >>> spelled({"Prompt": [{"role": "user", "content": "1+1"}]})
    {'prompt': '1+1'}

    Raises:
        ValueError: two names that differ in case only have different values, or the content of a
            message is no text.
    """
    read, lower = dict[str, Any](), {name.strip().lower(): row[name] for name in row}
    columns = {m[1] or m[2].upper(): row[k] for k in row if (m := _COLUMN.fullmatch(k.strip()))}
    labels = itertools.takewhile(lambda label: columns.get(label) not in (None, ""), "ABCDEFGHIJ")
    if len(choices := {label: columns[label] for label in labels}) > 1:
        read["choices"] = choices
    for name, value in row.items():
        key, inner = name.strip().lower(), structured(value)
        if (other := lower[key]) is not value and other != value:
            raise ValueError(f"expected one column {key!r}, got several; rename {name!r}")
        if key in _CHECKED and isinstance(inner, Mapping):
            known = (inner[each] for each in ("ground_truth", "answer") if each in inner)
            read.setdefault("ground_truth", next(known, None))
        if key == "responses_create_params" and isinstance(inner, Mapping):
            key, value = "prompt", inner.get("input")
            inner, read["system"] = value, inner.get("instructions") or ""
        if turns := _chat(inner):
            system = "\n".join(text for role, text in turns if role == "system")
            read["system"] = read.get("system") or system
            turns = [turn for turn in turns if turn[0] != "system"]
            if turns and turns[-1][0] == "assistant":
                completion = turns.pop()[1]
                read |= {"completion": completion} if key in _CHATS else {}
            several = [f"{role}: {text}" for role, text in turns]
            if turns:
                value = "\n".join(several) if len(turns) > 1 else turns[0][1]
            elif key in _CHATS:
                continue
        read["system" if key == "system_prompt" else key] = value
    return {key: value for key, value in read.items() if key != "system" or value}


def structured(value: Any) -> Any:
    """Parses a text that is a list or an object, in JSON or as Python prints it; returns any other
    value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{") and len(value) < _LONGEST:
        for read in (foreign.loads, ast.literal_eval):
            with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                if isinstance(parsed := read(value.strip()), list | dict):
                    return parsed
    return value


def _chat(value: Any) -> list[tuple[str, str]]:
    """Reads role and text of each message; returns nothing if it is no chat."""
    turns = []
    for message in value if isinstance(value, list) else ():
        if not isinstance(message, Mapping):
            return []
        role, content = (next((message[k] for k in keys if k in message), None) for keys in _TURN)
        if not isinstance(role, str) or isinstance(content, Mapping | None):
            return []
        turns.append((_ROLES.get(role, role), _text_in(content)))
    return turns


def _text_in(content: Any) -> str:
    """Reads a message's content: a text, or parts that are texts or have texts."""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if any(isinstance(text, list | Mapping) for text in texts):
        raise ValueError(f"expected messages of text, got {shown(content)}")
    return "".join(str(text or "") for text in texts)


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(_LONGEST << 4)
    text = _text(path)
    separator = max(",;\t", key=text.partition("\n")[0].count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    foreign.distinct([(name, "") for name in reader.fieldnames or () if name])
    for row in reader:
        if None in row or None in row.values():
            row = ValueError(f"expected {len(reader.fieldnames or ())} cells, as in line 1")
        yield f"{path} line {reader.line_num}", row


def _text(path: Path) -> str:
    text = path.read_bytes().decode("utf-8-sig")
    if "\0" in text:
        raise ValueError("expected UTF-8, got zeros as UTF-16 has them; save it as UTF-8")
    return text


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    """Reads a row on each line, or all rows in one list, under either suffix."""
    text = _text(path)
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    is_lines = path.suffix.lower() == ".jsonl" and text.lstrip()[:1] != "["
    if is_lines or len(lines) > 1 and not isinstance(_row(lines[0][1]), ValueError):
        return ((f"{path} line {number}", _row(line)) for number, line in lines)
    rows = foreign.loads(text, pairs=foreign.distinct)
    rows = rows.get("data") if isinstance(rows, Mapping) else rows
    if not isinstance(rows, list):
        raise BadInput(f'{path}: expected a row on each line, a list, or {{"data": [...]}}')
    return ((f"{path} row {number}", row) for number, row in enumerate(rows, 1))


def _row(line: str) -> Any:
    try:
        return foreign.loads(line, pairs=foreign.distinct)
    except ValueError as error:
        return ValueError(f"not JSON: {error}")


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        foreign.distinct([(name, "") for name in file.schema_arrow.names])
        rows = itertools.chain.from_iterable(map(_of_arrow, file.iter_batches()))
        yield from ((f"{path} row {number}", row) for number, row in enumerate(rows, 1))


def _of_python(given: Any) -> Iterable[Any]:
    """Yields the rows of a list, a table of Arrow or pandas, or a data set of Hugging Face."""
    if hasattr(given, "with_format"):
        return itertools.chain.from_iterable(
            map(_of_arrow, given.with_format("arrow").iter(_BATCH))
        )
    if hasattr(given, "__arrow_c_stream__"):
        import pyarrow

        return _of_arrow(pyarrow.table(given))
    return map(_plain, given)


def _of_arrow(table: Any) -> list[dict[str, Any]]:
    kinds = zip(table.schema.names, table.schema.types, strict=True)
    readers = {name: _reader(kind) for name, kind in kinds}
    return [{name: readers[name](row[name]) for name in row} for row in table.to_pylist()]


def _reader(kind: Any) -> Callable[[Any], Any]:
    """Returns what makes Python's own value of Arrow's, which may be None.

    Arrow makes 0.10000000149011612 of the 32 bits that stand for 0.1, whose digits are ``_plain``.
    """
    if hasattr(kind, "value_type"):
        inner = _reader(kind.value_type)
        return lambda value: value and [*map(inner, value)]
    if hasattr(kind, "fields"):
        parts = {field.name: _reader(field.type) for field in kind.fields}
        return lambda value: value and {name: parts[name](value[name]) for name in value}
    if str(kind) in ("float", "halffloat"):
        number = kind.to_pandas_dtype()
        return lambda value: None if value is None else _plain(number(value))
    return lambda value: value


def _plain(value: Any) -> Any:
    """Returns Python's own value: of numpy's floats, the number with the digits that they show."""
    if isinstance(value, np.floating):
        return float(str(value))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [*map(_plain, value)] if isinstance(value, list | tuple | np.ndarray) else value


def _hub(source: str, name: str, subset: str | None, split: str) -> Iterator[tuple[str, Any]]:
    try:
        from datasets import load_dataset  # pyright: ignore

        rows = load_dataset(name, subset, split=split)
    except Exception as error:  # not installed, offline, unknown name, subset or split, ...
        raise BadInput(
            f"{source}: no such file, and as a hub id it cannot be loaded (which needs pip install "
            f'-e ".[hub]"): {reason(error)}'
        ) from error
    return ((f"{source} row {number}", row) for number, row in enumerate(_of_python(rows), 1))
