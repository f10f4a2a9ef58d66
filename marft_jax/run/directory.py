"""Run directory: its lock, its settings files, and errors of its disk."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from marft_jax.errors import FILE_SYSTEM, BadInput, RunFailed
from marft_jax.formats import documents, jsonlines
from marft_jax.parallel import processes
from marft_jax.run.compatibility import Changed, setting_changes, team_changes
from marft_jax.run.storage import RunStorage, holds_something, storage_of
from marft_jax.settings import config as config_lib
from marft_jax.settings.config import Config
from marft_jax.settings.setting import replaced
from marft_jax.team.team_files import Blueprint, dump_team
from marft_jax.types import MAIN


@contextlib.contextmanager
def locked_directory(run: Path | RunStorage) -> Iterator[Path]:
    """Locks a run directory, and creates it if needed, so that only one process trains in it.

    The operating system drops the lock when the process ends, so the lock file of a dead process
    blocks nobody. With several processes the first one holds the lock; the others get a temporary
    directory, as they use only the checkpoints of the run.

    Raises:
        BadInput: another process holds the lock, or the directory cannot be written.
    """
    if not processes.is_lead():
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch)
        return
    storage = storage_of(run)
    file = (run := storage.path) / "lock"
    try:
        run.mkdir(parents=True, exist_ok=True)
        held = FileLock(file, timeout=0, fallback_to_soft=False).acquire()
        file.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
    except Timeout:
        who = file.read_text("utf-8", "replace")[:200].strip() or "unknown"
        raise BadInput(
            f"--run.dir {run}: in use by another process ({who}); wait for it, stop it, or choose "
            "another directory"
        ) from None
    except OSError as error:
        raise BadInput(
            f"--run.dir {run}: expected a directory that can be written: {error.strerror}"
        ) from error
    with held, storage.locked():
        yield run


_SETTINGS = "config.yaml", "team.yaml", "inputs.json", "demonstrations.jsonl"
"""What a start that has saved no step begins with again."""
_WRITTEN = (
    "metrics.jsonl transcripts evaluations checkpoints tensorboard wandb mlflow.db log.txt "
    "events.jsonl"
).split()


def set_aside(run: Path, moved: Callable[[str], object] = lambda name: None) -> list[str]:
    """Moves what a run that begins anew would replace to ``unsaved-N/`` below it; of its settings
    a copy, so that they are there whenever it is killed.

    What a start left that ended before its first step (an empty ``metrics.jsonl``) stays.

    Returns:
        A line that says so, if there was anything.
    """
    there = [name for name in _WRITTEN if holds_something(run / name)]
    if not there or (run / _WRITTEN[0]).is_file() and not {*there} & {*_WRITTEN[:4]}:
        return []
    aside = numbered_folder(run, "unsaved")
    for name in there:
        os.replace(run / name, aside / name)
        moved(name)
    for name in filter(lambda name: (run / name).is_file(), _SETTINGS):
        shutil.copy2(run / name, aside / name)
    return [f"there is no checkpoint to continue from: what was here before is now in {aside}"]


def numbered_folder(folder: Path, name: str) -> Path:
    """Makes the folder ``name-N`` below a folder, with the first free number."""
    free = next(f for n in itertools.count(1) if not (f := folder / f"{name}-{n}").exists())
    free.mkdir()
    return free


def write_settings(folder: Path, config: Config, blueprint: Blueprint) -> list[Changed]:
    """Writes ``config.yaml`` and ``team.yaml``; returns each setting that was another one there."""
    config = replaced(config, "team.file", "team.yaml")  # beside it
    settings = config_lib.dump(config, several={*blueprint.on} != {MAIN})
    texts = {"team.yaml": dump_team(blueprint), "config.yaml": settings}
    before, now = dict[str, Any](), dict[str, Any]()
    for name, text in texts.items():
        file, now[name] = folder / name, yaml.safe_load(text)
        is_there = documents.is_of_run(file)
        before[name] = documents.read(str(file), "--run.dir") if is_there else {}
        jsonlines.write(file, [documents.FIRST_LINE, text + documents.LAST_LINE])
    saved, team = (_flat(trees["team.yaml"]) for trees in (before, now))
    changed = setting_changes(before["config.yaml"], now["config.yaml"])
    return changed + (team_changes(saved, team) if saved else [])


def _flat(tree: Any, above: str = "") -> dict[str, Any]:
    """Returns the values of a tree by their paths; a mapping in a list by its name."""
    if isinstance(tree, list):
        named = (
            part.get("name", n) if isinstance(part, dict) else n for n, part in enumerate(tree)
        )
        tree = dict(zip(named, tree, strict=True))
    if not isinstance(tree, dict):
        return {above: tree}
    parts = (_flat(part, f"{above}.{key}".lstrip(".")) for key, part in tree.items())
    return {path: value for part in parts for path, value in part.items()}


@contextlib.contextmanager
def disk_errors(run: Path) -> Iterator[None]:
    """Turns an ``OSError`` about the run directory (an absolute path) into ``RunFailed``: the disk
    is full, read-only or gone."""
    try:
        yield
    except OSError as error:
        if error.filename is None:  # of an open file, or of the current directory that is gone
            is_ours = error.errno != errno.ENOENT
        else:
            is_ours = Path(os.fsdecode(error.filename)).is_relative_to(run)
        if error.errno not in FILE_SYSTEM or not is_ours:
            raise
        raise cannot_write(run, error.strerror or str(error)) from error


def cannot_write(run: Path, why: str) -> RunFailed:
    """Returns the error for a run directory that can no longer be written."""
    return RunFailed(
        f"{run}: cannot be written ({why}); checkpoints that were saved stay loadable: make room "
        "or give access, and start again to continue"
    )
