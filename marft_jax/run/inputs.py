"""Hashes the files that a run learns from: rows of data, and the user's own code.

A run directory keeps their sizes and hashes in ``inputs.json`` and a copy of the code in ``code/``.
"""

from __future__ import annotations

import contextlib
import hashlib
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
    from marft_jax.team.profiles import Profile

_FILE, _COPY = "inputs.json", "code"


class Input(NamedTuple):
    path: str
    size: int
    sha256: str


Inputs = Mapping[str, Sequence[Input]]
"""Files of data by the setting that names them; each file of code by its path as a module."""


def inputs_of(config: Config, workflow: str = "", agents: Iterable[Profile] = ()) -> Inputs:
    """Finds and hashes the files that ``env``, ``algo`` and the team name."""
    found: dict[str, list[Input]] = {}
    for name, text in _texts(config.env):
        for path in map(Path, dict.fromkeys((text, text.partition("=")[2]))):
            with contextlib.suppress(OSError):  # too long a name
                if path.is_file():
                    found.setdefault(f"--env.{name}", []).append(_hashed(path))
    texts = [text for part in (config.env, config.algo) for _, text in _texts(part)]
    texts += [workflow, *(text for a in agents for text in (a.reward or "", *(a.tools or ())))]
    modules = source_files(t.rpartition("=")[2].partition(":")[0] for t in texts if ":" in t)
    return found | {name: [_hashed(file)] for name, file in modules.items()}


def check_unchanged(run: Path, now: Inputs) -> None:
    """Raises ``BadInput`` where a run that has checkpoints began with other data or code."""
    differing = _changes(_read(run), now) if any(run.glob("checkpoints/*/meta.json")) else []
    if differing:
        raise BadInput(
            f"{run} cannot be continued: {'; '.join(differing[:9])}; restore what the run began "
            f"with, or begin a new run with another --run.dir (--lora.init {run} starts it from "
            "the adapters of this run)"
        )


def changed_since(run: Path) -> list[str]:
    """Lists the files of a run whose content has changed since the run began, a line for each."""
    kept = _read(run)
    now = {
        name: [_hashed(path) if (path := Path(file.path)).is_file() else file for file in files]
        for name, files in kept.items()
    }
    return _changes(kept, now)


def folders_of(run: Path) -> Iterator[str]:
    """Yields the folders that a run imported modules from, but never its own folder."""
    for name, files in _read(run).items():
        folder = Path(files[0].path.removesuffix(name)) if files else Path()
        if folder.is_absolute() and not folder.is_relative_to(run.absolute()) and name[:2] != "--":
            yield str(folder)


def write(run: Path, inputs: Inputs) -> None:
    """Writes the hashes, and a copy of the code."""
    for name in (name for name in inputs if not name.startswith("--")):
        code = Path(inputs[name][0].path).read_bytes()
        (copy := run / _COPY / name).parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(code)
    jsonlines.write(run / _FILE, [json.dumps(inputs)])


def _read(run: Path) -> Inputs:
    """Reads ``inputs.json``; a run of an earlier release has none."""
    with contextlib.suppress(BadInput, TypeError, ValueError):
        saved = foreign.read_settings(run / _FILE)
        return {
            name: [Input(str(path), int(size), str(sha)) for path, size, sha in files]
            for name, files in saved.items()
        }
    return {}


def _changes(kept: Inputs, now: Inputs) -> list[str]:
    """Describes what differs, for each name in both; only the content of a file counts."""
    found: list[str] = []
    for name in [name for name in kept if name in now]:
        if len(kept[name]) != len(now[name]):
            found.append(f"{name} was {len(kept[name])} files, is {len(now[name])}")
            continue
        for old, new in zip(kept[name], now[name], strict=True):
            if old.sha256 != new.sha256:
                moved = f"{name} was {old.path}, is {new.path}"
                found.append(f"{new.path} has changed" if old.path == new.path else moved)
    return found


def _texts(section: Any) -> Iterator[tuple[str, str]]:
    """Yields each text of a section with the name of its setting."""
    for field in fields(section):
        value = getattr(section, field.name)
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str):
                yield field.name, text


def _hashed(file: Path) -> Input:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return Input(str(file.absolute()), file.stat().st_size, digest)
