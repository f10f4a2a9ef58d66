"""Reads the YAML and JSON that a user writes: plain values, and bounds before work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from marft_jax.errors import BadInput, described, one_line, reason
from marft_jax.formats.foreign import DEEPEST, distinct

_LARGEST = 1 << 19
"""Bytes of a file: settings and teams are far smaller, and YAML is slow."""
_LARGEST_NUMBER = 1 << 1024
"""A whole number beyond is no float, and soon too long for Python to write."""


def read(file: str, setting: str) -> Any:
    """Reads a file: JSON where its name ends so, else YAML.

    Keys that stand twice, anchors and aliases (``&``, ``*``: a few of them make gigabytes), deep
    nesting, and numbers that are not finite in JSON are refused.

    Args:
        file: its path.
        setting: what names it, for messages.

    Raises:
        BadInput: it cannot be read, or is not what its name says.
    """
    where = f"{setting} {file}"
    try:
        with Path(file).open("rb") as stream:
            raw = stream.read(_LARGEST + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        raise BadInput(f"{where}: cannot be read ({reason(error)})") from error
    if len(raw) > _LARGEST:
        raise BadInput(f"{where}: expected at most {_LARGEST >> 10} KiB, got more")
    kind = "JSON" if file.endswith(".json") else "YAML"
    try:
        text = raw.decode("utf-8-sig")
        return _json(text) if kind == "JSON" else yaml.load(text, _Loader)
    except Exception as error:  # PyYAML raises whatever its constructors happen to
        raise BadInput(f"{where}: not {kind}: {_why(error)}") from error


def _why(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
        what = one_line(f"{error.context or ''} {error.problem}", 300)
        return f"line {mark.line + 1}, column {mark.column + 1}: {what}"
    return described(error, bare=Exception)


def _json(text: str) -> Any:
    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no number of JSON")

    return json.loads(text, object_pairs_hook=distinct, parse_constant=refuse)


class _Loader(yaml.SafeLoader):
    """YAML without what a settings file needs no more than an attacker does."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _at(event, "anchors and aliases (& and *) are not read; write it out")
        if self._depth == DEEPEST:
            raise _at(event, f"nested more than {DEEPEST} deep")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception as error:
            raise _at(node, f"{node.value!r:.60} is no {node.tag.rpartition(':')[2]}") from error
        if isinstance(value, int) and abs(value) >= _LARGEST_NUMBER:
            raise _at(node, "a number of hundreds of digits")
        return value

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                raise _at(key, "a key is expected to be a word")
            if key.value in seen:
                raise _at(key, f"the key {key.value!r:.60} stands twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _at(place: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)
