"""Reads run directories, whatever state they are in: what is not there or not whole is noted."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from marft_jax import config as config_lib
from marft_jax import sections as sections_lib
from marft_jax.envs import base as envs
from marft_jax.errors import BadInput, reason
from marft_jax.formats import documents, foreign
from marft_jax.learning import settings as algorithms
from marft_jax.run.manifest import MANIFEST
from marft_jax.types import html_table

Row = dict[str, Any]
Notes = list[str]

_BUILT_IN = {"env.name": envs.BUILT_IN, "algo.name": algorithms.SETTINGS}
_READ = ("*.yaml", "*.jsonl", "log.txt", "transcripts", "checkpoints", "evaluations/*.jsonl")
_GAMES = {
    "exploitability.jsonl": ("game", "exploitability"),
    "elo.jsonl": ("game", "elo"),
    "matches.jsonl": ("{agent} against {opponent}", "won"),
}
"""Files of figures of a game's checkpoints: the name of their lines in a chart, and the figure."""
_MOST_OF_FILE, _MOST_OF_LINE, _MOST_OF_LOG = 1 << 28, 1 << 24, 1 << 22  # bytes that are read


class Checkpoint(NamedTuple):
    """A saved step, and its value of the metric that the best is chosen by."""

    step: int
    metric: float | None


class RunRecord(NamedTuple):
    """Contents of a run directory.

    Attributes:
        name: of its folder.
        settings: those that were found, by ``section.name``; empty without ``config.yaml``.
        team: the plain contents of ``team.yaml``.
        metrics: one row per step, by step.
        transcripts: the file of each step, by step.
        evaluations: files of responses.
        guard: rows of ``transcripts/guard.jsonl``.
        log: lines of ``log.txt``; of a large one the first and the last ones.
        versions: of libraries, as the newest checkpoint has them.
        notes: what is missing or broken; readers of further files add to it.
    """

    name: str
    folder: Path
    settings: Mapping[str, Any]
    team: Mapping[str, Any]
    metrics: Mapping[int, Mapping[str, float]]
    transcripts: Mapping[int, Path]
    evaluations: list[Path]
    guard: list[Row]
    log: list[str]
    checkpoints: list[Checkpoint]
    versions: Mapping[str, str]
    notes: Notes

    def __repr__(self) -> str:
        return f"RunRecord({', '.join(f'{name} {text}' for name, text in self._summary)})"

    def _repr_html_(self) -> str:
        """The summary, as a notebook shows it."""
        return html_table(self._summary)

    @property
    def _summary(self) -> list[tuple[str, str]]:
        total, rewards = self.settings.get("run.steps", "?"), [*self.rewards.values()]
        earned = f"{rewards[0]:.3f} to {rewards[-1]:.3f}" if rewards else "none yet"
        return [
            ("run", str(self.folder)),
            ("step", f"{max(self.metrics, default=0)} of {total}"),
            ("reward", earned),
            ("agents", ", ".join(self.agents)),
            ("transcripts", f"of {len(self.transcripts)} steps"),
            ("checkpoints", ", ".join(str(saved.step) for saved in self.checkpoints)),
        ]

    def columns(self) -> dict[str, np.ndarray]:
        """``step`` and every metric, ``float64 [steps]``; NaN where a step lacks it. pandas takes
        it as it is: ``pandas.DataFrame(run.columns())``."""
        found = {"step": np.array([*self.metrics], np.int64)}
        for name in self.metric_names:
            found[name] = np.array([row.get(name, np.nan) for row in self.metrics.values()])
        return found

    def episodes(self, step: int) -> list[Row]:
        """Reads the transcript of a step, a record of each episode; empty where none is."""
        return list(rows(self.transcripts[step], self.notes)) if step in self.transcripts else []

    @property
    def metric_names(self) -> list[str]:
        """Names of all metrics, in their order."""
        return list(dict.fromkeys(name for row in self.metrics.values() for name in row))

    @property
    def rewards(self) -> dict[int, float]:
        """Mean rewards by step."""
        name = "reward/mean"
        return {step: row[name] for step, row in self.metrics.items() if name in row}

    @property
    def agents(self) -> dict[str, str]:
        """System prompts by agent."""
        rows = self.team.get("agents")
        found = [row for row in (rows if isinstance(rows, list) else []) if isinstance(row, dict)]
        return {str(row.get("name")): str(row.get("prompt") or "") for row in found}


def read_runs(folders: Iterable[Path]) -> list[RunRecord]:
    """Reads each run directory once; those whose folders have the same name go by their paths."""
    runs = [read_run(folder) for folder in dict.fromkeys(folders)]
    names = [run.name for run in runs]
    return [r._replace(name=str(r.folder)) if names.count(r.name) > 1 else r for r in runs]


def read_run(folder: str | Path) -> RunRecord:
    """Reads everything but transcripts and responses, which are read when they are asked for.

    Raises:
        BadInput: there is no such directory.
    """
    if not (folder := Path(folder)).is_dir():
        raise BadInput(f"--run {folder}: expected a run directory, found none")
    notes: Notes = []
    transcripts = _numbered(folder / "transcripts", ".jsonl", Path.is_file)
    saved = _numbered(folder / "checkpoints", "", Path.is_dir)
    metas = {step: _checkpoint(path, notes) for step, path in saved.items()}
    versions = metas[max(metas)].get("versions") if metas else None
    guard = folder / "transcripts" / "guard.jsonl"
    notes += ["transcripts/: none yet"] if not transcripts else []
    notes += ["checkpoints/: none yet"] if not saved else []
    return RunRecord(
        folder.resolve().name,
        folder,
        settings=_flat(_document(folder / "config.yaml", notes)),
        team=_document(folder / "team.yaml", notes),
        metrics=_with_games(_metrics(folder / "metrics.jsonl", notes), folder, notes),
        transcripts=transcripts,
        evaluations=sorted(
            file for file in (folder / "evaluations").glob("*.jsonl") if file.name not in _GAMES
        ),
        guard=list(rows(guard, notes)) if guard.is_file() else [],
        log=_log(folder / "log.txt", notes),
        checkpoints=[Checkpoint(step, number(row.get("metric"))) for step, row in metas.items()],
        versions=versions if isinstance(versions, dict) else {},
        notes=notes,
    )


def span_of(words: str | None) -> range | None:
    """Reads ``FIRST:LAST``, both of which are in the span."""
    if words is None:
        return None
    first, _, last = words.partition(":")
    if not (first.isdecimal() and last.isdecimal()):
        raise BadInput(f"--steps {words}: expected the first and the last step, like 40:60")
    return range(int(first), int(last) + 1)


def changes(folders: Iterable[Path]) -> dict[Path, int]:
    """Finds when the files that a page is made from changed."""
    found = dict[Path, int]()
    for file in (file for folder in folders for name in _READ for file in folder.glob(name)):
        with contextlib.suppress(OSError):  # gone since
            found[file] = file.stat().st_mtime_ns
    return found


def rows(file: Path, notes: Notes) -> Iterator[Row]:
    """Yields the JSON objects of a file of lines; other lines are counted in a note."""
    bad, whole = [], True
    with _noted(file, notes), foreign.open_regular(file) as stream:
        for place, line in enumerate(iter(lambda: stream.readline(_MOST_OF_LINE), b""), 1):
            if stream.tell() > _MOST_OF_FILE:
                notes.append(f"{_shown(file)}: its first {_MOST_OF_FILE >> 20} MiB are read")
                break
            row, whole = None, line.endswith(b"\n")
            with contextlib.suppress(ValueError):
                row = foreign.loads(line.decode("utf-8", "replace"))
            if isinstance(row, dict):
                yield row
            elif line.strip():
                bad.append(place)
    if bad:
        last = ", the last one: it may still be written" if not whole and len(bad) == 1 else ""
        what = "line is no JSON object" if len(bad) == 1 else "lines are no JSON objects"
        notes.append(f"{_shown(file)}: {len(bad)} {what} (line {bad[0]}{last})")


def number(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < 1e300 else None


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Default of every setting, as ``config.yaml`` would have it.

    Args:
        given: settings, of which the names of a built-in environment and algorithm count.
    """
    known = {k: [str(name)] for k in _BUILT_IN if (name := given.get(k)) in [*_BUILT_IN[k]]}
    kinds = sections_lib.kinds(known)
    config = config_lib.Config(**{name: kind() for name, kind in kinds.items()})
    names = {"env.name": config_lib.EnvSettings.name, "algo.name": config_lib.Algo.name}
    return _flat(yaml.safe_load(config_lib.dump(config))) | names


def moment(line: str) -> datetime.datetime | None:
    """Reads the time that a line of ``log.txt`` begins with."""
    with contextlib.suppress(ValueError):
        return datetime.datetime.fromisoformat(line[:19])


def _metrics(file: Path, notes: Notes) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for row in rows(file, notes):
        step = row.pop("step", None)
        if type(step) is int and 0 <= step < 1 << 53:
            numbers = {name: number(value) for name, value in row.items()}
            found[step] = {name: value for name, value in numbers.items() if value is not None}
    return dict(sorted(found.items()))


def _with_games(
    metrics: dict[int, dict[str, float]], folder: Path, notes: Notes
) -> dict[int, dict[str, float]]:
    """Adds what evaluations found of a game's checkpoints."""
    for name, (line, figure) in _GAMES.items():
        file = folder / "evaluations" / name
        for row in rows(file, notes) if file.is_file() else ():
            step, value = row.get("step"), number(row.get(figure))
            if type(step) is int and step >= 0 and value is not None:
                what = line.format(agent=row.get("agent"), opponent=row.get("opponent"))
                metrics.setdefault(step, {})[f"eval/{what}/{figure}"] = value
    return dict(sorted(metrics.items()))


def _numbered(folder: Path, suffix: str, fits: Callable[[Path], bool]) -> dict[int, Path]:
    """Files or folders whose names are numbers, in their order."""
    paths = {path.name.removesuffix(suffix): path for path in folder.glob(f"*{suffix}")}
    numbers = [name for name in paths if re.fullmatch(r"[0-9]{1,15}", name) and fits(paths[name])]
    return {int(name): paths[name] for name in sorted(numbers, key=int)}


def _document(file: Path, notes: Notes) -> Row:
    with _noted(file, notes):
        foreign.open_regular(file).close()
        found = documents.read(str(file), file.name)
        if not isinstance(found, dict):
            raise ValueError("expected names and values")
        return {str(key): value for key, value in found.items()}
    return {}


def _checkpoint(folder: Path, notes: Notes) -> Row:
    """Its ``meta.json``; a file whose size is not that of the manifest is noted."""
    with _noted(folder / MANIFEST, notes):
        for name, entry in foreign.read_settings(folder / MANIFEST).items():
            if (folder / name).stat().st_size != entry[0]:
                raise ValueError(f"{name} has another size")
    with _noted(folder / "meta.json", notes):
        return foreign.read_settings(folder / "meta.json")
    return {}


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    sections = {name: part for name, part in tree.items() if isinstance(part, dict)}
    return {
        f"{name}.{key}": value for name, part in sections.items() for key, value in part.items()
    }


def _log(file: Path, notes: Notes) -> list[str]:
    raw = b""
    with _noted(file, notes), foreign.open_regular(file) as stream:
        raw = stream.read(_MOST_OF_LOG)
        if file.stat().st_size > _MOST_OF_LOG:
            notes.append(f"{file.name}: its last {_MOST_OF_LOG >> 20} MiB are read")
            stream.seek(-_MOST_OF_LOG, os.SEEK_END)
            first, last = raw.partition(b"\n")[0], stream.read(_MOST_OF_LOG)
            raw = first + b"\n" + last.partition(b"\n")[2]
    return raw.decode("utf-8", "replace").splitlines()


@contextlib.contextmanager
def _noted(file: Path, notes: Notes) -> Iterator[None]:
    """Turns what is wrong with a file into a note."""
    try:
        yield
    except FileNotFoundError:
        notes.append(f"{_shown(file)}: not there")
    except (OSError, TypeError, LookupError, ValueError) as error:
        notes.append(f"{_shown(file)}: {reason(error).rpartition(f'{file}: ')[2]}")


def _shown(file: Path) -> str:
    """Path inside the run directory."""
    folders = ("transcripts", "evaluations", "checkpoints")
    inside = [i for i, part in enumerate(file.parts[:-1]) if part in folders]
    return "/".join(file.parts[inside[-1] if inside else -1 :])
