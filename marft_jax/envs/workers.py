"""Worker processes that may hang or crash without harm: for graders, gyms and sandboxes.

A worker writes a first line when it is ready. Then it reads requests and writes replies, one JSON
object a line, one request at a time. The field ``seconds`` of a request says when the worker should
end itself if its parent is gone by then. Its side is ``worker_side/serving.py``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import signal
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

START_SECONDS = 120.0  # of a worker, before the pool gives up on it
_LONGEST = 1 << 27  # bytes of a line
_ROOT = str(Path(__file__).resolve().parents[2])
_STARTER = ThreadPoolExecutor(1)  # bubblewrap ends with the thread that started it
Lost = Literal["timeout", "crashed"]
"""Why a worker gave no reply."""


class Unusable(RuntimeError):
    """A worker cannot be started on this machine; the text is the reason, in one line."""


class Workers:
    """Pool of ``count`` worker processes, which several threads may use.

    The processes start at once, in the background. A process that takes too long or dies is
    replaced. All end with this object, and with the process that made it.
    """

    def __init__(
        self, count: int, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> None:
        if env is None:
            path = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))
            env = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
        self._idle: queue.Queue[Worker] = queue.Queue()
        self._workers = [Worker(command, env) for _ in range(count)]
        for worker in self._workers:
            self._idle.put(worker)
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any] | Lost:
        """Sends a request to a worker and returns its reply, or why there was none in ``seconds``.

        Raises:
            RuntimeError: the pool is closed, or its workers cannot be started.
        """
        with self.borrow() as worker:
            worker.send({**request, "seconds": seconds + 5})
            return worker.receive(seconds)

    @contextlib.contextmanager
    def borrow(self) -> Iterator[Worker]:
        """Lends a worker that is ready, for several requests; raises as ``ask``."""
        if not self._finalizer.alive:
            raise RuntimeError("expected open worker processes, but they are closed")
        worker = self._idle.get()
        try:
            worker.await_ready()
            yield worker
        except BaseException:
            worker.restart()  # a late reply would answer the next request
            raise
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Ends the processes. May be called again."""
        self._finalizer()


class Worker:
    """One process of ``Workers``, which is replaced when it ends."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._command, self._env = command, env
        self._lock = threading.Lock()
        self._stopped = False
        self._start()

    def send(self, request: Mapping[str, Any], files: Sequence[int] = ()) -> None:
        """Sends a request, with copies of open files; ``receive`` reports a failure."""
        with contextlib.suppress(OSError):
            self._line.settimeout(START_SECONDS)
            if files:
                socket.send_fds(self._line, [b" "], files)
            self._line.sendall(json.dumps(request).encode() + b"\n")

    def receive(self, seconds: float) -> dict[str, Any] | Lost:
        """Receives the reply; replaces a worker that gives none in ``seconds``."""
        reply: Any = "crashed"
        try:
            reply = json.loads(self._read_line(seconds))
        except TimeoutError:
            reply = "timeout"
        except (OSError, ValueError):
            pass
        if not isinstance(reply, dict):
            self.restart()
        return reply

    def await_ready(self) -> None:
        """Waits until the worker is ready; restarts it once if it died while it was idle."""
        errors = "it ended without a word"
        for _ in range(2):
            if self._ready and self._process.poll() is None:
                return
            with contextlib.suppress(OSError):
                if not self._ready and self._read_line(START_SECONDS):
                    self._ready = True
                    return
            with contextlib.suppress(ValueError):  # closed meanwhile
                self._errors.seek(0)
                errors = self._errors.read().decode(errors="replace").strip() or errors
            self.restart()
        raise Unusable(f"the worker does not start: {errors.splitlines()[-1]}")

    def restart(self) -> None:
        """Replaces the process, unless the pool is closed."""
        with self._lock:
            if not self._stopped:
                self._end()
                self._start()

    def stop(self) -> None:
        """Ends the process for good."""
        with self._lock:
            if not self._stopped:
                self._end()
            self._stopped = True

    def _start(self) -> None:
        self._ready, self._buffer = False, bytearray()
        self._errors = tempfile.TemporaryFile()
        self._line, theirs = socket.socketpair()
        start = functools.partial(
            subprocess.Popen, self._command, env=self._env, stderr=self._errors,
            stdin=theirs.fileno(), stdout=theirs.fileno(),
            start_new_session=True,  # no Ctrl-C; its children end with it
        )  # fmt: skip
        with theirs:
            self._process = _STARTER.submit(start).result()

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._line.close()
        self._errors.close()

    def _read_line(self, seconds: float) -> bytes:
        end = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            self._line.settimeout(max(end - time.monotonic(), 1e-6))
            block = self._line.recv(1 << 20)
            if not block or len(self._buffer) > _LONGEST:
                raise ConnectionError("the worker has ended, or does not end its line")
            self._buffer += block
        line, _, self._buffer = self._buffer.partition(b"\n")
        return bytes(line)


def _stop_all(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.stop()
