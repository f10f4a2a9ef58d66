"""Threads for code of users, which may fail, hang, or try to end the process."""

from __future__ import annotations

import ctypes
import functools
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from types import FrameType
from typing import Any

from marft_jax.errors import place
from marft_jax.plugins import Failure, failure_of

_MOMENT = 1.0  # seconds after which a call that runs in turn is gone past
_ENVS = Path(__file__).resolve().parent
_PASSING = {str(_ENVS / name) for name in ("base.py", "check.py", "threads.py")}  # pass calls on
_Work = tuple[Future[Any], Callable[[], Any]]


class DaemonThreads(Executor):
    """A thread for each call that runs. Python does not wait for them when it exits, as it does
    for those of ``ThreadPoolExecutor``: a single hanging environment would hang the whole run."""

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[_Work]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts ``fn(*args, **kwargs)``; its future holds what it returns or raises."""
        work = Future(), functools.partial(fn, *args, **kwargs)
        try:
            self._idle.pop().put(work)
        except IndexError:
            inbox: queue.SimpleQueue[_Work] = queue.SimpleQueue()
            inbox.put(work)
            thread = threading.Thread(target=self._serve, args=(inbox,), daemon=True)
            thread.name = "environment"
            thread.start()
        return work[0]

    def _serve(self, inbox: queue.SimpleQueue[_Work]) -> None:
        while True:
            future, call = inbox.get()
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
                if isinstance(error, SystemExit):  # of a call that was given up
                    return
            del future, call  # what is dropped is dropped here
            self._idle.append(inbox)


class Call:
    """A call of a user's code: how far it is, and what came of it.

    Args:
        what: its name, for messages.
        run: the call; it returns plain values, and what it raises is caught in its own thread.
        seconds: how long it may take; None for ever.

    Attributes:
        is_over: it returned ``value``, or failed with ``failure``.
        started: when it began, in ``time.monotonic`` seconds; None where it has not yet.
        in_turn: it runs after those that were asked before.
    """

    def __init__(self, what: str, run: Callable[[], Any], seconds: float | None = None) -> None:
        self._what, self._seconds = what, seconds
        self._run: Callable[[], Any] | None = run
        self.is_over = self.in_turn = self._given_up = False
        self.value: Any = None
        self.failure: Failure | None = None
        self.started: float | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Runs it, in this thread, which ends with ``SystemExit`` where it was given up."""
        function, self._run = self._run, None
        with self._lock:
            if self._given_up or function is None:
                return
            self._thread = threading.current_thread()
        self.started = self.started or time.monotonic()
        value = failure = None
        try:
            value = function()
        except BaseException as error:
            failure = failure_of(error)
        del function  # what only it holds is dropped here
        with self._lock:
            _HANGING.discard(self)
            if self._given_up:
                raise SystemExit
            self.value, self.failure, self.is_over = value, failure, True

    def has_taken(self, seconds: float | None) -> bool:
        """True when it has been running for that long."""
        if seconds is None or self.started is None:
            return False
        return time.monotonic() - self.started >= seconds

    def is_settled(self) -> bool:
        """True when it is over; too late, and it has failed."""
        if not self.is_over and self.has_taken(self._seconds):
            self.give_up(f"no answer after {self._seconds:g} s (--rollout.step_seconds)")
        return self.is_over

    @property
    def is_in_the_way(self) -> bool:
        """True when whoever waits for it should wait no longer."""
        return self._given_up or self.has_taken(_MOMENT)

    def give_up(self, why: str) -> None:
        """Leaves it behind: it has failed, and its thread, maybe an endless loop, is to end."""
        with self._lock:
            if self.is_over:
                return
            frame = self._frame()
            self.failure = Failure(f"TimeoutError: {self._what}: {why}{place(frame)}")
            self._given_up = self.is_over = True
            if frame is not None:
                _HANGING.add(self)
                self._interrupt(frame)

    def interrupt(self) -> None:
        """Asks its thread once more to end, if it was given up."""
        with self._lock:
            frame = self._frame()
            if frame is None:  # it ended on the way out; its number may be another thread's by now
                _HANGING.discard(self)
            elif self in _HANGING:
                self._interrupt(frame)

    def _frame(self) -> FrameType | None:
        if self._thread is None or not self._thread.is_alive():
            return None
        return sys._current_frames().get(self._thread.ident or 0)

    def _interrupt(self, frame: FrameType) -> None:
        """Raises in its thread, unless it waits for our workers: they have limits of their own."""
        assert self._thread is not None
        files = {frame.f_code.co_filename for frame, _ in traceback.walk_stack(frame)} - _PASSING
        if not any(file.startswith(str(_ENVS)) for file in files):
            _install_hook()
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(_GivenUp)
            )


class _GivenUp(SystemExit):
    """Raised in a thread that hangs; where it meets a callback that cannot raise, not a word."""


_HANGING: set[Call] = set()  # given up, and still running


@functools.cache
def _install_hook() -> None:
    usual = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if unraisable.exc_type is not _GivenUp:
            usual(unraisable)

    sys.unraisablehook = hook


def interrupt_hanging() -> int:
    """Asks threads that hang once more to end, as some catch all errors; returns their number."""
    for call in list(_HANGING):
        call.interrupt()
    return len(_HANGING)


class InTurn:
    """Runs calls one after another, in the order in which they were added, for code that was
    written without a thought of threads. A call that takes longer than a moment goes on by itself,
    and the next begin in another thread. When nothing is left, ``rest`` is called."""

    def __init__(self, threads: Executor, rest: Callable[[], None]) -> None:
        self._threads, self._rest = threads, rest
        self._calls: deque[Call] = deque()
        self._lock = threading.Lock()
        self._current: Call | None = None

    def add(self, call: Call) -> None:
        """Puts it last."""
        call.in_turn = True
        self._calls.append(call)

    def go(self) -> None:
        """Sees to it that what was added runs, whatever hangs before it."""
        with self._lock:
            busy = self._current is not None and not self._current.is_in_the_way
            if busy or not self._calls:
                return
            first = self._current = self._calls.popleft()
        self._threads.submit(self._work, first)

    def _work(self, call: Call | None) -> None:
        while call is not None:
            call.run()
            with self._lock:
                if self._current is not call:
                    return  # it took too long, and another thread goes on
                call = self._current = self._calls.popleft() if self._calls else None
        self._rest()
