"""Worker processes that may hang or crash without harm: JSON lines in, JSON lines out.

A worker's first line says that it is ready. It is sent one request at a time, which carries under
``seconds`` after how long the worker should end itself should its parent be gone by then.
"""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

START_SECONDS = 120.0
"""How long a worker may take to start before the pool gives up on it."""
Failure = Literal["timeout", "crashed"]


class Workers:
    """Answers requests in ``count`` processes, at most ``seconds`` each. Safe to use from threads.

    The processes start in the background at once. One that takes too long or dies is replaced.
    They end with this object, and with the process that made it.

    Args:
        count: how many requests may be answered at the same time.
        command: the worker program.
    """

    def __init__(self, count: int, command: Sequence[str]) -> None:
        self._closed = False
        self._idle: queue.Queue[_Worker] = queue.Queue()
        self._workers = [_Worker(command) for _ in range(count)]
        for worker in self._workers:
            self._idle.put(worker)
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any] | Failure:
        """The reply to a request, or what became of the worker.

        Raises:
            RuntimeError: the pool is closed, or its workers cannot be started at all.
        """
        if self._closed:
            raise RuntimeError("expected open worker processes, but they are closed")
        worker = self._idle.get()
        try:
            return worker.ask(request, seconds)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Ends the processes. May be called again."""
        self._closed = True
        self._finalizer()


class _Worker:
    """One process at a time, started again after it ended."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._stopped = False
        self._start()

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any] | Failure:
        self._await_ready()
        request = {**request, "seconds": seconds + 5}
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
            line = self._read_line(seconds)
            reply = "timeout" if line is None else json.loads(line)
        except (OSError, ValueError):
            reply = "crashed"
        if not isinstance(reply, dict):
            self._restart()
        return reply

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._end()

    def _start(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._ready = False
        self._buffer = b""
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
        )

    def _restart(self) -> None:
        with self._lock:
            self._end()
            if not self._stopped:
                self._start()

    def _end(self) -> None:
        process = self._process
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, self._errors):
            try:
                pipe.close()  # type: ignore[union-attr]
            except OSError:
                pass

    def _await_ready(self) -> None:
        """Waits for the first start, and starts once more a worker that died while idle."""
        reason = ""
        for _ in range(2):
            if self._ready and self._process.poll() is None:
                return
            if not self._ready and self._read_line(START_SECONDS):
                self._ready = True
                return
            reason = self._last_error()
            self._restart()
        raise RuntimeError(f"the worker does not start: {reason}")

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def _read_line(self, seconds: float) -> bytes | None:
        """The next line, None after ``seconds``, empty when the process ended."""
        end = time.monotonic() + seconds
        pipe = self._process.stdout.fileno()  # type: ignore[union-attr]
        poller = select.poll()  # select.select refuses file numbers from 1024
        poller.register(pipe, select.POLLIN)
        while b"\n" not in self._buffer:
            left = end - time.monotonic()
            if left <= 0 or not poller.poll(left * 1000):
                return None
            block = os.read(pipe, 65536)
            if not block:
                return b""
            self._buffer += block
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def _stop_all(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.stop()
