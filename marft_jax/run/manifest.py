"""Files of a run that are whole or not there, and what is said when they cannot be written."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from marft_jax.errors import RunFailed
from marft_jax.formats import foreign

_HISTORY = "metrics.jsonl transcripts tensorboard log.txt config.yaml team.yaml".split()
DRAFT, MANIFEST = ".saving-", "manifest.json"

_FILE_SYSTEM = {
    getattr(errno, name)
    for name in "ENOSPC EDQUOT EROFS EACCES EPERM EIO ENOENT ENOTDIR ESTALE EFBIG".split()
}


def manifest_of(folder: Path) -> dict[str, list[Any]]:
    """Size and SHA-256 of every file below a folder, by its path."""
    manifest = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        manifest[file.relative_to(folder).as_posix()] = [file.stat().st_size, digest]
    return manifest


def damage(folder: Path) -> str | None:
    """Says what is wrong with a checkpoint; None where every file is as its manifest says."""
    try:
        expected = foreign.loads((folder / MANIFEST).read_text("utf-8"))
        found = manifest_of(folder)
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (OSError, ValueError) as error:
        return f"it cannot be read: {error}"
    found.pop(MANIFEST, None)
    if not isinstance(expected, dict) or not expected:
        return f"its {MANIFEST} is no manifest"
    differing = sorted(f for f in expected | found if expected.get(f) != found.get(f))
    return f"{differing[0]} differs from its manifest" if differing else None


def remove(folder: Path) -> None:
    """Removes a checkpoint: at once under its name, so that no half of it is ever found."""
    doomed = folder.with_name(f"{DRAFT}not-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def set_aside(run: Path) -> Path | None:
    """Moves the history of a run (metrics, transcripts, and what explains them) to a new folder
    ``unsaved-N`` in its directory; None where there is no history."""
    metrics = run / "metrics.jsonl"
    written = metrics.is_file() and metrics.stat().st_size > 0
    if not written and not any((run / "transcripts").glob("*.jsonl")):
        return None
    number = next(n for n in itertools.count(1) if not (run / f"unsaved-{n}").exists())
    aside = run / f"unsaved-{number}"
    aside.mkdir()
    for name in _HISTORY:
        with contextlib.suppress(FileNotFoundError):
            os.replace(run / name, aside / name)
    return aside


@contextlib.contextmanager
def explained(run: Path) -> Iterator[None]:
    """Turns what a file system does to a run directory into one clear line.

    Raises:
        RunFailed: the disk is full, read-only or gone.
    """
    try:
        yield
    except OSError as error:
        name = None if error.filename is None else Path(os.fsdecode(error.filename)).absolute()
        ours = name is None or name.is_relative_to(run.absolute())
        if error.errno not in _FILE_SYSTEM or not ours:
            raise
        raise cannot_write(run, error.strerror or str(error)) from error


def cannot_write(run: Path, why: str) -> RunFailed:
    return RunFailed(
        f"{run}: cannot be written ({why}); checkpoints that were saved stay loadable: make room "
        "or give access, and start again to continue"
    )


def write_synced(file: Path, value: Any) -> None:
    with file.open("w", encoding="utf-8") as stream:
        json.dump(value, stream)
        stream.flush()
        os.fsync(stream.fileno())


def sync(folder: Path) -> None:
    """Makes a rename in this folder last, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
