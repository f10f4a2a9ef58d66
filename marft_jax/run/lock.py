"""One process at a time trains in a run directory."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

import jax

from marft_jax.errors import BadInput, RunFailed

_NAME = "lock"


class Lock:
    """Holds a run directory, which it makes when missing; use it in a ``with``.

    The system holds the lock for the process and drops it when the process ends, however it ends:
    a file that a dead process left behind locks nobody out, on this host or another. Of a run of
    several processes the first one holds it.

    Args:
        run: the run directory.
    """

    def __init__(self, run: Path):
        self._path = run / _NAME
        self._handle = -1

    def __enter__(self) -> Lock:
        """Takes the lock.

        Raises:
            BadInput: another process has it, or the directory cannot be written.
        """
        if jax.process_index() > 0:
            return self
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise BadInput(
                f"--run.dir {self._path.parent}: expected a directory that can be written: "
                f"{error.strerror}"
            ) from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.read(self._handle, 200).decode("utf-8", "replace").strip() or "unknown"
            os.close(self._handle)
            raise BadInput(
                f"--run.dir {self._path.parent}: in use by another process ({who}); wait for it, "
                "stop it, or choose another directory"
            ) from None
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return self

    def __exit__(self, *error: object) -> None:
        if self._handle >= 0:
            os.close(self._handle)

    def check(self) -> None:
        """Makes sure that the directory is still the one that was locked.

        Raises:
            RunFailed: it was removed or replaced.
        """
        if self._handle < 0:
            return
        try:
            there = os.stat(self._path)
        except OSError:
            there = None
        if there is None or not os.path.samestat(there, os.fstat(self._handle)):
            raise RunFailed(
                f"{self._path.parent}: the run directory vanished while training; "
                "put it back and start again to continue from its newest checkpoint"
            )
