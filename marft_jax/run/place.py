"""Places of runs: a folder of this machine, or an address that is mirrored in one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from marft_jax.plugins import load_extra
from marft_jax.setting import is_address


class Place:
    """Place of a run. All code reads and writes ``path``; where the run is kept elsewhere, a
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
            RunFailed: that place cannot be written, or another process has taken the run.
        """

    def remove(self, name: str) -> None:
        """Pushes, and removes a file or a folder that was removed here."""

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Keeps other machines from training in the run."""
        yield

    @contextlib.contextmanager
    def keeping(self, folder: str) -> Iterator[None]:
        """Brings a folder of the run, and takes there what is written into it while the block runs
        and at its end."""
        yield


def place_of(run: str | Path | Place, trains: bool = False) -> Place:
    """Returns the place of a run directory; for an address, with its settings on this machine.

    Args:
        trains: this process is to train there.

    Raises:
        BadInput: there is no such store, or it gives no access.
    """
    if isinstance(run, Place):
        return run
    if is_address(run):
        return load_extra("run.storage")(str(run), trains)
    return Place(Path(run))
