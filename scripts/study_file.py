"""Study files: rows of settings, in an order in which each comes after the one it starts from."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from marft_jax.errors import BadInput
from marft_jax.formats import documents

_COMMANDS = ("train", "imitate", "evaluate")
_KEYS = {
    "about", "configs", "settings", "evaluate", "seeds", "reach", "axes", "rows", "compare",
    "chosen",
}  # fmt: skip
_ROW_KEYS = {"command", "from", "options", "settings", "evaluate", "match"}
_BUDGETS = ("tokens", "compute")
_AXIS = re.compile(r"\{(\w*)\}")


class Row(NamedTuple):
    """One way of doing it.

    Attributes:
        command: ``train``, ``imitate``, or ``evaluate`` for what is played without learning.
        start: the row whose adapters it begins with; None for the bare base.
        settings, evaluate: those of the study with its own on top.
        own: its own settings alone, with those of the axes that its name has.
        options: flags of the command that are no settings, such as ``demonstrations``.
        match: what it learns until it has spent, and the row that spent as much.
    """

    name: str
    command: str
    start: str | None
    settings: Mapping[str, Any]
    evaluate: Mapping[str, Any]
    own: Mapping[str, Any]
    options: Mapping[str, Any]
    match: tuple[str, str] | None = None


class Study(NamedTuple):
    """A study file; ``rows`` in an order in which each comes after the one that it starts from.

    Attributes:
        compare: pairs of rows whose difference is told.
        chosen: what was chosen before, and on which tasks.
    """

    name: str
    about: str
    configs: Sequence[Path]
    seeds: Sequence[int]
    reach: float
    rows: Mapping[str, Row]
    compare: Sequence[tuple[str, str]] = ()
    chosen: str = ""


def read(file: Path) -> Study:
    """Reads a study.

    Raises:
        BadInput: an unknown key or command, or a row that starts from one that comes later.
    """
    tree = documents.read(str(file), "the study")
    if not isinstance(tree, dict) or not isinstance(tree.get("rows"), dict):
        raise BadInput(f"{file}: expected a study with `rows:`, got {tree!r:.80}")
    _check_keys(f"{file}", tree, _KEYS)
    rows: dict[str, Row] = {}
    for pattern, given in tree["rows"].items():
        given = given or {}
        _check_keys(f"{file}, row {pattern}", given, _ROW_KEYS)
        command = given.get("command", "train")
        if command not in _COMMANDS:
            raise BadInput(f"{file}, row {pattern}: command: expected {_COMMANDS}, got {command!r}")
        for values, swept in _sweep(f"{file}, row {pattern}", pattern, tree.get("axes", {})):
            name, start = _filled(pattern, values), given.get("from")
            if name in rows:
                raise BadInput(f"{file}, row {name}: expected one row of this name, got two")
            if start is not None and (start := _filled(start, values)) not in rows:
                raise BadInput(f"{file}, row {name}: from: expected a row above it, got {start!r}")
            below = rows[start].settings if command == "evaluate" and start else {}
            own = {**swept, **given.get("settings", {})}
            settings = {**tree.get("settings", {}), **below, **own}
            evaluate = {**tree.get("evaluate", {}), **given.get("evaluate", {})}
            options = given.get("options", {})
            match = _matched(f"{file}, row {name}", given.get("match"), rows)
            rows[name] = Row(name, command, start, settings, evaluate, own, options, match)
    configs = [file.parent / name for name in tree.get("configs", ())]
    seeds, reach = tree.get("seeds", [0]), tree.get("reach", 0.9)
    compare = [(first, second) for first, second in tree.get("compare", ())]
    if unknown := [name for pair in compare for name in pair if name not in rows]:
        raise BadInput(f"{file}: compare: expected rows of this study, got {unknown[0]!r}")
    about, chosen = tree.get("about", ""), tree.get("chosen", "")
    return Study(file.stem, about, configs, seeds, reach, rows, compare, chosen)


def _matched(
    where: str, given: Mapping[str, str] | None, rows: Mapping[str, Row]
) -> tuple[str, str] | None:
    """What a row spends as much of as a row above it, and that row."""
    if given is None:
        return None
    [(budget, row)] = given.items()
    if budget not in _BUDGETS or row not in rows:
        raise BadInput(f"{where}: match: expected {_BUDGETS} and a row above it, got {given!r}")
    return budget, row


def _sweep(
    where: str, pattern: str, axes: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """Names, by axis, and the settings of every combination of the axes in a row's name."""
    names = _AXIS.findall(pattern)
    if unknown := [name for name in names if name not in axes]:
        raise BadInput(f"{where}: expected axes of {', '.join(axes) or 'none'}, got {unknown[0]!r}")
    for chosen in itertools.product(*(axes[name].items() for name in names)):
        values = {name: str(value) for name, (value, _) in zip(names, chosen, strict=True)}
        yield values, {key: x for _, settings in chosen for key, x in settings.items()}


def _filled(name: str, values: Mapping[str, str]) -> str:
    return _AXIS.sub(lambda axis: values.get(axis[1], axis[0]), name)


def _check_keys(where: str, given: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(given) - known):
        raise BadInput(f"{where}: expected {', '.join(sorted(known))}, got {unknown[0]!r}")


def needed(study: Study, names: Sequence[str]) -> list[Row]:
    """Rows of these names and all that they need, in the study's order."""
    wanted = set()
    for name in names:
        if name not in study.rows:
            raise BadInput(f"--only: expected rows of {', '.join(study.rows)}, got {name!r}")
        waiting = [name]
        while waiting:
            row = study.rows[waiting.pop()]
            wanted.add(row.name)
            waiting += needs(row)
    return [row for row in study.rows.values() if row.name in wanted]


def needs(row: Row) -> list[str]:
    """Rows that have to be finished before: the start, and whose budget it has."""
    return [name for name in (row.start, row.match and row.match[1]) if name]
