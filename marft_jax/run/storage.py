"""Where a run is kept: a folder of this machine, or an address that is mirrored in a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from marft_jax.errors import BadInput
from marft_jax.formats import documents
from marft_jax.plugins import load_extra
from marft_jax.settings.setting import is_address


class RunStorage:
    """RunStorage of a run. All code reads and writes ``path``; where the run is kept elsewhere, a
    subclass brings files from there and takes files there.

    Attributes:
        path: the folder on this machine.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def fetch(self, pattern: str) -> None:
        """Brings the files that fit a pattern of names, but no states of checkpoints."""

    def fetch_checkpoint(self, step: int) -> None:
        """Brings the files of a checkpoint."""

    def push(self) -> None:
        """Returns when all files that were written are where the run is kept.

        Raises:
            RunFailed: the store cannot be written, or another process has taken the run.
        """

    def remove(self, name: str) -> None:
        """Pushes, and removes a file or a folder that was removed here."""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other machines from training in the run."""
        yield

    @contextlib.contextmanager
    def keeping(self, folder: str) -> Iterator[None]:
        """Brings a folder of the run, and takes there what is written into it while the block runs
        and at its end."""
        yield


def storage_of(run: str | Path | RunStorage, trains: bool = False) -> RunStorage:
    """Returns the storage of a run directory; of an address, with its settings on this machine.

    Args:
        trains: this process is to train there.

    Raises:
        BadInput: there is no such store, or it gives no access.
    """
    if isinstance(run, RunStorage):
        return run
    if is_address(run):
        return load_extra("run.storage")(str(run), trains)
    return RunStorage(Path(run).expanduser())


def is_run(run: Path) -> bool:
    """True for a folder in which a run has begun, whether or not a step was saved; False for a new
    one.

    Raises:
        BadInput: the folder holds something else, which a run would mix with its own files.
    """
    if not os.path.isdir(run) or not os.access(run, os.R_OK | os.X_OK):
        return False
    there = {path.name for path in run.iterdir() if holds_something(path)}
    began = (
        documents.is_of_run(run / "config.yaml")
        or any(run.glob("checkpoints/*/meta.json"))
        or ("lock" in there and documents.is_of_run(run / "team.yaml"))  # killed since
    )
    others = sorted(n for n in there - {*_LOCKS} if not n.startswith((".", "unsaved-")))
    if others and not began:
        raise BadInput(
            f"--run.dir {run}: expected a new folder, or one in which a run began, got a folder "
            f"with {', '.join(others[:3])}{', ...' * (len(others) > 3)}; name another folder"
        )
    return began


_LOCKS = "lock", "owner", "adapters"
"""What a start leaves that ends before it writes its settings."""


def holds_something(path: Path) -> bool:
    """True for a file or folder that is not empty, and for a link to nothing."""
    if path.is_dir():
        return os.access(path, os.R_OK) and any(path.iterdir())  # lost+found of a new disk
    return path.is_symlink() or path.is_file() and path.stat().st_size > 0
