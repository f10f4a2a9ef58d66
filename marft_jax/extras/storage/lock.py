"""Lock of a run in object storage, among processes of any machine.

The objects ``lock/1``, ``lock/2``, ... hold their owner and a time, and the highest number has the
run. A number is made only where there is none, so one of several processes gets it, and is not used
again: a process that slept while another one took the run sees a higher number. No clocks are
compared. Whoever finds the run in use watches its object, and takes the run when three renewals are
missing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from marft_jax.errors import BadInput, described, one_line
from marft_jax.formats import foreign, jsonlines

LOGGER = logging.getLogger("marft_jax")
RENEW_S = 20.0
MISSED = 3


@contextlib.contextmanager
def repeated(call: Callable[[], object], seconds: float, what: str) -> Iterator[None]:
    """Calls a function from time to time while the block runs; a failure is a warning."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            try:
                call()
            except Exception as error:
                LOGGER.warning("%s: %s", what, described(error))

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(seconds)


class Lock:
    """Takes the lock of a run.

    Args:
        store: returns the file system that is open now.
        folder: where the objects are.
        local: local folder with a file that names it. Starts on one folder exclude each other by a
            lock of the operating system, so none of them waits for an earlier one.
        run: the address, for messages.

    Raises:
        BadInput: another process has the run, or the store has no objects that are made only where
            there are none.
    """

    def __init__(self, store: Callable[[], Any], folder: str, local: Path, run: str) -> None:
        self._store, self._folder, self._run = store, folder, run
        if not (token := local / "owner").exists():
            jsonlines.write(token, [uuid.uuid4().hex])
        host = socket.gethostname()
        mine = f"{host} {token.read_text('utf-8').strip()}"
        self._own = {"owner": f"process {os.getpid()} on {host}", "token": mine}
        self._number = self._take()

    def taken_by(self) -> str | None:
        """Returns who has taken the run from this process."""
        number, record = self._newest()
        return None if number <= self._number else str(record.get("owner") or "another process")

    @contextlib.contextmanager
    def renewed(self) -> Iterator[None]:
        """Renews the lock while the block runs, and gives it up."""
        try:
            with repeated(lambda: self._write(self._number), RENEW_S, self._run):
                yield
        finally:
            with contextlib.suppress(Exception):  # the next start waits then
                self._write(self._number, owner=None)

    def _take(self) -> int:
        """Returns the number with which this process has the run."""
        while True:
            number, record = self._newest()
            owner, token = record.get("owner"), self._own["token"]
            if owner and record.get("token") != token and self._is_renewed(number, record):
                raise BadInput(
                    f"{self._run}: in use by another process ({one_line(str(owner), 200)}); wait "
                    "for it, stop it, or choose another directory"
                )
            with contextlib.suppress(FileExistsError):
                self._write(number + 1, mode="create")
            # where an answer is lost, the repeated request fails: what is there decides
            number, record = self._newest()
            if record.get("token") == token:
                break
        try:
            self._write(number, mode="create")
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                self._store().rm_file(f"{self._folder}/{number - 1}")
            return number
        raise BadInput(
            f"{self._run}: expected a store that can make an object only where there is none, "
            "which keeps a second process out of a run; this store overwrites it"
        )

    def _is_renewed(self, number: int, record: dict[str, Any]) -> bool:
        """Watches whether the owner of the lock still renews it."""
        wait = f"watching for {MISSED * RENEW_S:g} s whether that still runs"
        who = one_line(str(record["owner"]), 200)
        print(f"marft_jax: {self._run} is in use by {who}; {wait}", file=sys.stderr, flush=True)
        until = time.monotonic() + MISSED * RENEW_S
        while time.monotonic() < until:
            time.sleep(RENEW_S / 5)
            if (now := self._newest()) != (number, record):
                return bool(now[1].get("owner"))
        return False

    def _newest(self) -> tuple[int, dict[str, Any]]:
        """Returns the highest number, 0 for none, and what its object says."""
        names = [path.rpartition("/")[2] for path in self._store().find(self._folder)]
        number, record = max((int(n) for n in names if n.isdecimal()), default=0), None
        with contextlib.suppress(FileNotFoundError, ValueError):
            record = foreign.loads(self._store().cat_file(f"{self._folder}/{number}").decode())
        return number, record if isinstance(record, dict) else {}

    def _write(self, number: int, mode: str = "overwrite", **changed: Any) -> None:
        text = json.dumps(self._own | {"time": time.time()} | changed)
        self._store().pipe_file(f"{self._folder}/{number}", text.encode(), mode=mode)
