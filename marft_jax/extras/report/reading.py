"""Reads run directories in any state; missing and broken parts become notes."""

from __future__ import annotations

import contextlib
import datetime
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import yaml

from marft_jax.cli import sections as sections_lib
from marft_jax.envs import base as envs
from marft_jax.errors import BadInput, reason
from marft_jax.formats import documents, foreign
from marft_jax.learning import settings as algorithms
from marft_jax.run.manifest import MANIFEST
from marft_jax.run.storage import storage_of
from marft_jax.settings import config as config_lib

Row = dict[str, Any]
Notes = list[str]
_T = TypeVar("_T")

_BUILT_IN = {"env.name": envs.BUILT_IN, "algo.name": algorithms.SETTINGS}
_READ = ("*.yaml", "*.jsonl", "transcripts", "checkpoints", "evaluations/*.jsonl")
_GAMES = {
    "exploitability.jsonl": ("game", "exploitability"),
    "elo.jsonl": ("game", "elo"),
    "matches.jsonl": ("{agent} against {opponent}", "won"),
}
"""Files with figures of a game's checkpoints: name of a line in the chart, and the figure."""
_OF_A_RUN = ("config.yaml", "metrics.jsonl", "transcripts", "checkpoints", "evaluations")
_MOST_OF_FILE, _MOST_OF_LINE = 1 << 28, 1 << 24  # bytes that are read


class Checkpoint(NamedTuple):
    """A saved step, and its value of ``run.best_metric``."""

    step: int
    metric: float | None


class Change(NamedTuple):
    """A change of a setting, or of the team's file: the first step that was played with it."""

    step: int
    key: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.key} was {self.old}, is {self.new}"


class RunRecord(NamedTuple):
    """Contents of a run directory.

    Attributes:
        name: name of the folder.
        settings: by ``section.name``; empty without ``config.yaml``.
        team: contents of ``team.yaml``.
        metrics: a row of ``metrics.jsonl`` by step.
        transcripts: file of each step.
        evaluations: files of responses.
        events: rows of ``events.jsonl``.
        versions: versions of libraries, from the newest checkpoint.
        notes: what is missing or broken; reading further files adds notes.
    """

    name: str
    folder: Path
    settings: Mapping[str, Any]
    team: Mapping[str, Any]
    metrics: Mapping[int, Mapping[str, float]]
    transcripts: Mapping[int, Path]
    evaluations: list[Path]
    events: list[Row]
    checkpoints: list[Checkpoint]
    versions: Mapping[str, str]
    notes: Notes

    def __repr__(self) -> str:
        return f"RunRecord({', '.join(f'{name} {text}' for name, text in self._summary)})"

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
        """Returns ``step`` and every metric as ``float64 [steps]``, NaN where a step lacks it.

        For pandas: ``pandas.DataFrame(run.columns())``.
        """
        columns = {"step": np.array([*self.metrics], np.int64)}
        for name in self.metric_names:
            columns[name] = np.array([row.get(name, np.nan) for row in self.metrics.values()])
        return columns

    def episodes(self, step: int) -> list[Row]:
        """Reads the transcript of a step, one record per episode; empty if there is none."""
        return list(rows(self.transcripts[step], self.notes)) if step in self.transcripts else []

    @property
    def written(self) -> str:
        """Time at which the newest metrics were written."""
        with contextlib.suppress(OSError, ValueError):
            seconds = (self.folder / "metrics.jsonl").stat().st_mtime
            return datetime.datetime.fromtimestamp(seconds).isoformat(" ", "seconds")
        return "unknown"

    @property
    def metric_names(self) -> list[str]:
        """Names of all metrics, in the order of the file."""
        return list(dict.fromkeys(name for row in self.metrics.values() for name in row))

    @property
    def derived(self) -> set[str]:
        """Settings that nobody gave and that follow from the base."""
        flags = [flag for row in self.events if isinstance(row.get("derived"), list)
                 for flag in row["derived"]]  # fmt: skip
        return {str(flag).split(" ")[0].removeprefix("--") for flag in flags}

    @property
    def changed(self) -> list[Change]:
        """Settings that a later start changed, in the order of steps."""
        rows = [row for row in self.events if row.get("event") == "changed"]
        return [
            Change(row["step"], *(str(row.get(name)) for name in ("setting", "was", "now")))
            for row in rows
            if type(row.get("step")) is int
        ]

    @property
    def rewards(self) -> dict[int, float]:
        """Mean reward by step."""
        name = "reward/mean"
        return {step: row[name] for step, row in self.metrics.items() if name in row}

    @property
    def agents(self) -> dict[str, str]:
        """System prompt by agent."""
        rows = self.team.get("agents")
        kept = [row for row in (rows if isinstance(rows, list) else []) if isinstance(row, dict)]
        return {str(row.get("name")): str(row.get("prompt") or "") for row in kept}


def read_runs(folders: Iterable[Path]) -> list[RunRecord]:
    """Reads each run directory once; runs whose folders share a name are named by their path."""
    runs = [read_run(folder) for folder in dict.fromkeys(folders)]
    names = [run.name for run in runs]
    return [r._replace(name=str(r.folder)) if names.count(r.name) > 1 else r for r in runs]


def check_runs(folders: Sequence[Path]) -> None:
    """Raises ``BadInput`` if no folder holds anything of a run."""
    if not any((folder / name).exists() for folder in folders for name in _OF_A_RUN):
        raise BadInput(
            f"--run {folders[0]}: expected a run directory, found none of {', '.join(_OF_A_RUN)}"
        )


def read_run(folder: str | Path) -> RunRecord:
    """Reads a run directory; transcripts and responses are read later, on demand.

    Raises:
        BadInput: there is no such directory.
    """
    place = storage_of(folder)
    place.fetch("*")
    if not (folder := place.path).is_dir():
        raise BadInput(f"--run {folder}: expected a run directory, found none")
    notes: Notes = []
    transcripts = _numbered(folder / "transcripts", ".jsonl", Path.is_file)
    saved = _numbered(folder / "checkpoints", "", Path.is_dir)
    metas = {step: _checkpoint(path, notes) for step, path in saved.items()}
    versions = metas[max(metas)].get("versions") if metas else None
    events = folder / "events.jsonl"
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
        events=list(rows(events, notes)) if events.exists() else [],
        checkpoints=[Checkpoint(step, number(row.get("metric"))) for step, row in metas.items()],
        versions=versions if isinstance(versions, dict) else {},
        notes=notes,
    )


def span_of(words: str | None) -> range | None:
    """Parses ``FIRST:LAST``, both included."""
    if words is None:
        return None
    first, _, last = words.partition(":")
    if not (first.isdecimal() and last.isdecimal()):
        raise BadInput(f"--steps {words}: expected the first and the last step, like 40:60")
    return range(int(first), int(last) + 1)


def changes(folders: Iterable[Path]) -> dict[Path, int]:
    """Returns the time of the last change of each file from which a page is made."""
    times = dict[Path, int]()
    for file in (file for folder in folders for name in _READ for file in folder.glob(name)):
        with contextlib.suppress(OSError):  # deleted meanwhile
            times[file] = file.stat().st_mtime_ns
    return times


def rows(file: Path, notes: Notes) -> Iterator[Row]:
    """Yields the JSON objects of a file, one per line; counts other lines in a note."""
    bad = []
    with _noted(file, notes), foreign.open_regular(file) as stream:
        for place, line in enumerate(iter(lambda: stream.readline(_MOST_OF_LINE), b""), 1):
            if stream.tell() > _MOST_OF_FILE:
                notes.append(f"{_shown(file)}: only its first {_MOST_OF_FILE >> 20} MiB are read")
                break
            row = None
            with contextlib.suppress(ValueError):
                row = foreign.loads(line.decode("utf-8", "replace"))
            if isinstance(row, dict):
                yield row
            elif line.strip():
                bad.append(place)
    if bad:
        wrong = f"{len(bad)} other line{'s' * (len(bad) > 1)}, the first is line {bad[0]}"
        notes.append(f"{_shown(file)}: expected a JSON object per line, got {wrong}")


def spread(items: Sequence[_T], most: int) -> list[_T]:
    """Picks evenly spaced items, the first and the last included."""
    if len(items) <= most:
        return list(items)
    return [items[math.floor(i * (len(items) - 1) / (most - 1) + 0.5)] for i in range(most)]


def number(value: Any) -> float | None:
    """Returns a finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < 1e300 else None


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the default of every setting, as ``config.yaml`` writes it.

    Args:
        given: settings of the runs; the names of built-in environments and algorithms count.
    """
    known = {k: [str(name)] for k in _BUILT_IN if (name := given.get(k)) in [*_BUILT_IN[k]]}
    kinds = sections_lib.kinds(known)
    config = config_lib.Config(**{name: kind() for name, kind in kinds.items()})
    names = {"env.name": config_lib.EnvSettings.name, "algo.name": config_lib.Algo.name}
    return _flat(yaml.safe_load(config_lib.dump(config))) | names


def _metrics(file: Path, notes: Notes) -> dict[int, dict[str, float]]:
    metrics: dict[int, dict[str, float]] = {}
    for row in rows(file, notes):
        step = row.pop("step", None)
        if type(step) is int and 0 <= step < 1 << 53:
            numbers = {name: number(value) for name, value in row.items()}
            metrics[step] = {name: value for name, value in numbers.items() if value is not None}
    return dict(sorted(metrics.items()))


def _with_games(
    metrics: dict[int, dict[str, float]], folder: Path, notes: Notes
) -> dict[int, dict[str, float]]:
    """Adds the figures of a game's evaluations."""
    for name, (line, figure) in _GAMES.items():
        file = folder / "evaluations" / name
        for row in rows(file, notes) if file.is_file() else ():
            step, value = row.get("step"), number(row.get(figure))
            if type(step) is int and step >= 0 and value is not None:
                what = line.format(agent=row.get("agent"), opponent=row.get("opponent"))
                metrics.setdefault(step, {})[f"eval/{what}/{figure}"] = value
    return dict(sorted(metrics.items()))


def _numbered(folder: Path, suffix: str, fits: Callable[[Path], bool]) -> dict[int, Path]:
    """Finds files or folders whose names are numbers, in order."""
    paths = {path.name.removesuffix(suffix): path for path in folder.glob(f"*{suffix}")}
    numbers = [name for name in paths if re.fullmatch(r"[0-9]{1,15}", name) and fits(paths[name])]
    return {int(name): paths[name] for name in sorted(numbers, key=int)}


def _document(file: Path, notes: Notes) -> Row:
    with _noted(file, notes):
        foreign.open_regular(file).close()
        document = documents.read(str(file), file.name)
        if not isinstance(document, dict):
            raise ValueError("expected names and values")
        return {str(key): value for key, value in document.items()}
    return {}


def _checkpoint(folder: Path, notes: Notes) -> Row:
    """Reads ``meta.json``, and notes a manifest that is missing."""
    with _noted(folder / MANIFEST, notes):
        foreign.open_regular(folder / MANIFEST).close()
    with _noted(folder / "meta.json", notes):
        return foreign.read_settings(folder / "meta.json")
    return {}


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    sections = {name: part for name, part in tree.items() if isinstance(part, dict)}
    return {
        f"{name}.{key}": value for name, part in sections.items() for key, value in part.items()
    }


@contextlib.contextmanager
def _noted(file: Path, notes: Notes) -> Iterator[None]:
    """Turns an error of reading a file into a note."""
    try:
        yield
    except FileNotFoundError:
        notes.append(f"{_shown(file)}: missing")
    except (OSError, TypeError, LookupError, ValueError) as error:
        notes.append(f"{_shown(file)}: {reason(error).rpartition(f'{file}: ')[2]}")


def _shown(file: Path) -> str:
    """Returns the path inside the run directory."""
    folders = ("transcripts", "evaluations", "checkpoints")
    inside = [i for i, part in enumerate(file.parts[:-1]) if part in folders]
    return "/".join(file.parts[inside[-1] if inside else -1 :])
