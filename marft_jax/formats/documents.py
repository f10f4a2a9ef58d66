"""Reads the YAML and JSON files that a user writes, as plain values and within bounds."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import yaml

from marft_jax.errors import BadInput, described, one_line, reason
from marft_jax.formats.foreign import distinct

FIRST_LINE, LAST_LINE = "# of a run; complete with the last line `# end`", "# end"
"""Around what a run keeps as YAML, so that a file that was cut off shows."""
_LARGEST = 1 << 19
"""Bytes of a file. Settings and teams are far smaller, and parsing YAML is slow."""


def read_bytes(file: str, setting: str) -> bytes:
    """Reads a file of at most 512 KiB, see ``read``."""
    try:
        with Path(file).open("rb") as stream:
            raw = stream.read(_LARGEST + 1)
        if len(raw) > _LARGEST:
            raise ValueError(f"expected at most {_LARGEST >> 10} KiB, got more")
        return raw
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        raise BadInput(f"{setting} {file}: cannot be read ({reason(error)})") from error


def is_of_run(file: Path) -> bool:
    """True for a YAML file that a run wrote."""
    with contextlib.suppress(OSError), file.open("rb") as stream:
        return stream.readline().rstrip() == FIRST_LINE.encode()
    return False


def read(file: str, setting: str) -> Any:
    """Reads a file whose name ends in ``.json`` as JSON, any other as YAML.

    Refuses duplicate keys, and anchors and aliases (a few of them make gigabytes).

    Args:
        file: its path.
        setting: the flag that names the file, for messages.

    Raises:
        BadInput: the file cannot be read, is not valid JSON or YAML, or is a part of a run's file.
    """
    where, raw = f"{setting} {file}", read_bytes(file, setting)
    kind = "JSON" if file.lower().endswith(".json") else "YAML"
    lines = raw.decode("utf-8", "replace").splitlines()
    if lines[:1] == [FIRST_LINE] and LAST_LINE not in lines:
        raise BadInput(f"{where}: expected the last line {LAST_LINE!r}, got a part; copy it again")
    try:
        text = raw.decode("utf-8-sig")
        if kind == "JSON":
            return json.loads(text, object_pairs_hook=distinct)
        return yaml.load(text, _Loader)
    except Exception as error:  # PyYAML raises whatever its constructors happen to
        raise BadInput(f"{where}: not {kind}: {_why(error)}") from error


def _why(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
        what = one_line(f"{error.context or ''} {error.problem}", 300)
        return f"line {mark.line + 1}, column {mark.column + 1}: {what}"
    return reason(error) if isinstance(error, UnicodeError) else described(error, bare=Exception)


class _Loader(yaml.SafeLoader):
    """YAML without anchors, aliases and duplicate keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _at(event, "anchors and aliases (& and *) are not read; write it out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            keys = [key.value for key, _ in node.value]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise _at(node, f"the key {twice!r:.60} stands twice")
        return mapping


def _at(place: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)
