"""Lock of a run directory: a single process trains in it at a time."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import jax
from filelock import FileLock, Timeout

from marft_jax.errors import BadInput


class Lock:
    """Holds a run directory, which it makes when missing; use it in a ``with``.

    The system drops the lock when the process ends, however it ends: a file that a dead process
    left behind locks nobody out. Of a run of several processes the first one holds it.
    """

    def __init__(self, run: Path):
        self._run = run
        self._lock = FileLock(run / "lock", timeout=0, fallback_to_soft=False)

    def __enter__(self) -> Lock:
        """Takes the lock.

        Raises:
            BadInput: another process has it, or the directory cannot be written.
        """
        if jax.process_index() > 0:
            return self
        file = self._run / "lock"
        try:
            self._run.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            file.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        except Timeout:
            who = file.read_text("utf-8", "replace")[:200].strip() or "unknown"
            raise BadInput(
                f"--run.dir {self._run}: in use by another process ({who}); wait for it, stop it, "
                "or choose another directory"
            ) from None
        except OSError as error:
            raise BadInput(
                f"--run.dir {self._run}: expected a directory that can be written: {error.strerror}"
            ) from error
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()
