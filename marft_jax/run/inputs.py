"""Hashes the files that a run learns from: rows of data, and modules of the user's own code.

A run directory keeps their sizes and hashes in ``inputs.json``.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from marft_jax.errors import BadInput, is_users
from marft_jax.formats import foreign, jsonlines
from marft_jax.settings.config import Config
from marft_jax.tools import name_of

if TYPE_CHECKING:
    from marft_jax.team.profiles import Profile

_FILE = "inputs.json"


class Input(NamedTuple):
    path: str
    size: int
    sha256: str


Inputs = Mapping[str, Sequence[Input]]
"""Files of data by the setting that names them; each file of code by its path as a module."""


def inputs_of(config: Config, workflow: str = "", agents: Iterable[Profile] = ()) -> Inputs:
    """Finds and hashes the files that ``env``, ``algo``, ``rollout`` and the team name.

    Of the user's code these are the named modules, not what they import in turn.
    """
    found: dict[str, list[Input]] = {}
    for name, text in _texts(config.env):
        for path in map(Path, dict.fromkeys((text, text.partition("=")[2]))):
            with contextlib.suppress(OSError):  # too long a name
                if path.is_file():
                    key = f"--env.{name}"
                    found[key] = [*found.get(key, ()), _hashed(path)]
    parts = config.env, config.algo, config.rollout
    texts = [text for part in parts for _, text in _texts(part)]
    texts.append(workflow)
    for agent in agents:
        texts += [agent.reward or "", *map(name_of, agent.tools or ())]
    for module in (t.rpartition("=")[2].partition(":")[0] for t in texts if ":" in t):
        with contextlib.suppress(ImportError, ValueError):  # it is no module
            spec = importlib.util.find_spec(module)
            if spec is not None and spec.has_location and is_users(str(spec.origin)):
                found[f"{module.replace('.', '/')}.py"] = [_hashed(Path(str(spec.origin)))]
    return found


def check_unchanged(run: Path, now: Inputs) -> list[str]:
    """Returns a line for each file of data or code that a run began with and that has changed.

    Raises:
        BadInput: there is one, and the run has checkpoints.
    """
    differing = _changes(_read(run), now)
    if differing and any(run.glob("checkpoints/*/meta.json")):
        raise BadInput(
            f"{run} cannot be continued: {'; '.join(differing[:9])}; restore what the run began "
            f"with, or begin a new run with another --run.dir (--lora.init {run} starts it from "
            "the adapters of this run)"
        )
    return differing


def write(run: Path, inputs: Inputs) -> None:
    """Writes the hashes."""
    jsonlines.write(run / _FILE, [json.dumps(inputs)])


def _read(run: Path) -> Inputs:
    """Reads ``inputs.json``; a run of an earlier release has none."""
    with contextlib.suppress(BadInput, TypeError, ValueError):
        saved = foreign.read_settings(run / _FILE)
        return {name: [Input(*file) for file in files] for name, files in saved.items()}
    return {}


def _changes(kept: Inputs, now: Inputs) -> list[str]:
    """Describes what differs, for each name in both; only the content of a file counts."""
    found: list[str] = []
    for name in [name for name in kept if name in now]:
        before, after = ([file.sha256 for file in files[name]] for files in (kept, now))
        if before != after:
            others = [file.path for file in now[name] if file.sha256 not in before]
            found.append(f"{name} has changed ({', '.join(others) or 'other files or order'})")
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
