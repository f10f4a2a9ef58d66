"""Grading processes that may hang or crash without harm."""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from marft_jax.envs.base import Grade
from marft_jax.envs.grading.compare import quick
from marft_jax.envs.grading.extract import How, extract

WORKER = (sys.executable, "-m", "marft_jax.envs.grading.worker")
START_SECONDS = 120.0
"""How long a worker may take to import sympy before the pool gives up on it."""


class GradingPool:
    """Grades answers in ``workers`` processes, at most ``seconds`` each. Safe to use from threads.

    The processes start in the background at once. One that takes too long or dies is replaced, and
    the text it was grading scores 0. They end with the pool, and with the process that made it.

    Args:
        workers: how many gradings may run at the same time.
        seconds: wall time of one grading.
        how: the ways of giving an answer that are accepted, see ``extract``.
        command: the worker program.
    """

    def __init__(
        self,
        workers: int,
        seconds: float,
        how: How = "auto",
        command: Sequence[str] = WORKER,
    ) -> None:
        self._seconds = seconds
        self._how: How = how
        self._closed = False
        self._idle: queue.Queue[_Worker] = queue.Queue()
        self._workers = [_Worker(command) for _ in range(workers)]
        for worker in self._workers:
            self._idle.put(worker)
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)

    def grade(self, text: str, reference: str) -> Grade:
        """Reads the answer from a text and compares it with the reference.

        Raises:
            RuntimeError: the pool is closed, or its workers cannot be started at all.
        """
        answer = extract(text, reference, self._how)
        if answer is None:
            return Grade(0.0, "no answer")
        equal = quick(reference, answer)
        verdict = self._ask(reference, answer) if equal is None else _VERDICTS[equal]
        return Grade(float(verdict == "right"), verdict, answer)

    def close(self) -> None:
        """Ends the worker processes. May be called again."""
        self._closed = True
        self._finalizer()

    def _ask(self, reference: str, answer: str) -> str:
        if self._closed:
            raise RuntimeError("expected an open grading pool, but it is closed")
        worker = self._idle.get()
        try:
            return worker.ask(reference, answer, self._seconds)
        finally:
            self._idle.put(worker)


_VERDICTS = {True: "right", False: "wrong"}


class _Worker:
    """One grading process at a time, started again after it ended."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._stopped = False
        self._start()

    def ask(self, reference: str, answer: str, seconds: float) -> str:
        """``right``, ``wrong``, ``timeout`` or ``crashed``."""
        self._await_ready()
        request = {"reference": reference, "answer": answer, "seconds": seconds + 5}
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
            reply = self._read_line(seconds)
            verdict = "timeout" if reply is None else _VERDICTS[json.loads(reply)["equal"]]
        except (OSError, ValueError, KeyError):
            verdict = "crashed"
        if verdict in ("timeout", "crashed"):
            self._restart()
        return verdict

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._end()

    def _start(self) -> None:
        root = str(Path(__file__).resolve().parents[3])
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
        raise RuntimeError(f"the grading worker does not start: {reason}")

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
