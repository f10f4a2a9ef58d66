"""Files that a run learns from: rows of data and code of the user's. They are part of what it is.

``inputs.json`` of a run directory has their sizes and hashes, ``code/`` a copy of the code.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from marft_jax.config import Config
from marft_jax.errors import BadInput
from marft_jax.formats import foreign, jsonlines
from marft_jax.plugins import source_files

if TYPE_CHECKING:
    from marft_jax.evaluation.benchmarks import BenchmarkPlan
    from marft_jax.team.profiles import Profile

_FILE, _COPY = "inputs.json", "code"


class Input(NamedTuple):
    path: str
    size: int
    sha256: str


Inputs = Mapping[str, Sequence[Input]]
"""Files of data by the setting that names them, and each of code by its path as a module."""


def inputs_of(
    config: Config,
    workflow: str = "",
    agents: Iterable[Profile] = (),
    plans: Iterable[BenchmarkPlan] = (),
) -> Inputs:
    """Finds and hashes the files that the settings and the team name, but those of loggers, which
    learn nothing."""
    named = [(f"--env.{name}", text) for name, text in _texts(config.env)]
    for plan in plans if config.eval.benchmarks else ():
        named += [(f"--eval.benchmarks {plan.name}", text) for text in plan.config.env.eval_data]
    found: dict[str, list[Input]] = {}
    for what, text in named:
        for path in map(Path, dict.fromkeys((text, text.partition("=")[2]))):
            with contextlib.suppress(OSError):  # too long a name
                if path.is_file():
                    found.setdefault(what, []).append(_hashed(path))
    texts = [text for part in (config.env, config.algo) for _, text in _texts(part)]
    texts += [workflow, *(text for a in agents for text in (a.reward or "", *(a.tools or ())))]
    names = [text.rpartition("=")[2].partition(":")[0] for text in texts if ":" in text]
    modules = source_files([*names, getattr(config.env, "game", "")])  # of PettingZoo: a module
    return found | {name: [_hashed(file)] for name, file in modules.items()}


def check_unchanged(run: Path, now: Inputs) -> None:
    """Raises ``BadInput`` where a run that has checkpoints began with other data or code."""
    differing = _changes(run, _read(run), now) if any(run.glob("checkpoints/*/meta.json")) else []
    if differing:
        raise BadInput(
            f"{run} cannot be continued: {'; '.join(differing[:9])}; restore what the run began "
            f"with, or begin a new run with another --run.dir (--lora.init {run} starts it from "
            "the adapters of this run)"
        )


def changed_since(run: Path) -> list[str]:
    """Describes the files of a run that have changed where they lie."""
    kept = _read(run)
    now = {
        name: [_hashed(path) if (path := Path(file.path)).is_file() else file for file in files]
        for name, files in kept.items()
    }
    return _changes(run, kept, now)


def folders_of(run: Path) -> Iterator[str]:
    """Yields the folders that a run's modules were imported from, never one that came with it."""
    for name, files in _read(run).items():
        folder = Path(files[0].path.removesuffix(name)) if files else Path()
        if folder.is_absolute() and not folder.is_relative_to(run.absolute()) and name[:2] != "--":
            yield str(folder)


def write(run: Path, inputs: Inputs) -> None:
    """Keeps the hashes, and a copy of the code."""
    for name in (name for name in inputs if not name.startswith("--")):
        code = Path(inputs[name][0].path).read_bytes()
        (copy := run / _COPY / name).parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(code)
    jsonlines.write(run / _FILE, [json.dumps(inputs)])


def _read(run: Path) -> Inputs:
    """Reads what a run keeps; nothing of a run of an earlier release."""
    with contextlib.suppress(BadInput, TypeError, ValueError):
        saved = foreign.read_settings(run / _FILE)
        return {
            name: [Input(str(path), int(size), str(sha)) for path, size, sha in files]
            for name, files in saved.items()
        }
    return {}


def _changes(run: Path, kept: Inputs, now: Inputs) -> list[str]:
    """Describes what differs, of all that both name; wherever a file lies, its content counts."""
    found: list[str] = []
    for name in [name for name in kept if name in now]:
        for old, new in itertools.zip_longest(kept[name], now[name]):
            if old is None or new is None:
                found.append(f"{name} was {len(kept[name])} files, is {len(now[name])}")
                break
            if old.sha256 != new.sha256:
                moved = f"{name} was {old.path}, is {new.path}"
                what = f"{new.path} has changed" if old.path == new.path else moved
                found.append(f"{what} ({_difference(run / _COPY / name, old, new)})")
    return found


def _difference(copy: Path, old: Input, new: Input) -> str:
    if not copy.is_file():
        return f"{old.size} bytes then, {new.size} now"
    texts = (file.read_bytes().splitlines() for file in (copy, Path(new.path)))
    pairs = enumerate(itertools.zip_longest(*texts), 1)
    line = next((number for number, (was, now) in pairs if was != now), "of its end")
    return f"from line {line}; {copy} is what it was"


def _texts(section: Any) -> Iterator[tuple[str, str]]:
    """Yields the texts of a section, each with its setting."""
    for field in fields(section):
        value = getattr(section, field.name)
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str):
                yield field.name, text


def _hashed(file: Path) -> Input:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return Input(str(file.absolute()), file.stat().st_size, digest)
