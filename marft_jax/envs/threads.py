"""Runs calls of users' code in threads, where a call may fail or take too long.

Users' code is trusted. A call that hangs fails its episode and keeps its daemon thread.
"""

from __future__ import annotations

import functools
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from marft_jax.errors import place
from marft_jax.plugins import Failure, failure_of

_MOMENT = 1.0  # seconds: a call that runs in turn longer is gone past; a thread idles no longer


class DaemonThreads(Executor):
    """As many daemon threads as calls are under way: one that hangs keeps its own, and Python does
    not wait for it. A thread without work ends after a moment."""

    def __init__(self) -> None:
        self._calls = queue.SimpleQueue[Callable[[], None]]()
        self._idle = threading.Semaphore(0)  # threads that wait for a call, or are about to

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts ``fn(*args, **kwargs)``; its future holds what it returns or raises."""
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(run)
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._work, name="environment", daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            try:
                self._calls.get(timeout=_MOMENT)()
                self._idle.release()
            except queue.Empty:
                if self._idle.acquire(blocking=False):
                    return  # else a call that counts on it has just come


class UserCall:
    """A call of a user's code: how far it is, and what came of it.

    Args:
        what: its name, for messages.
        run: the call; what it raises becomes a failure.
        seconds: how long it may take; None for ever.
        serialised: the player waits for it at once; serialised calls run one after another, unless
            they are started side by side.

    Attributes:
        is_over: it returned ``value``, or failed with ``failure``.
        started: when it began, in ``time.monotonic`` seconds; NaN before that.
    """

    def __init__(
        self, what: str, run: Callable[[], Any], seconds: float | None, serialised: bool = False
    ) -> None:
        self._what, self._run, self._seconds, self.serialised = what, run, seconds, serialised
        self._thread = 0
        self.is_over, self.started = False, float("nan")
        self.value: Any = None
        self.failure: Failure | None = None

    def run(self) -> None:
        """Runs it in this thread, unless it was given up before it began."""
        if self.is_over:
            return
        self.started, self._thread = time.monotonic(), threading.get_ident()
        value = failure = None
        try:
            value = self._run()
        except BaseException as error:  # sys.exit too: it ends an episode, not the run
            failure = failure_of(error)
        del self._run  # what only it holds is dropped here
        if not self.is_over:
            self.value, self.failure, self.is_over = value, failure, True

    def has_taken(self, seconds: float | None) -> bool:
        """True when it has been running for that long."""
        return seconds is not None and time.monotonic() - self.started >= seconds

    def is_settled(self) -> bool:
        """True when it is over; too late, and it has failed."""
        if not self.is_over and self.has_taken(self._seconds):
            self.give_up(f"no answer after {self._seconds:g} s (--rollout.step_seconds)")
        return self.is_over

    def give_up(self, why: str) -> None:
        """Leaves it behind, failed, where it is not over."""
        if not self.is_over:
            at = place(sys._current_frames().get(self._thread))
            self.failure = Failure(f"TimeoutError: {self._what}: {why}{at}")
            self.is_over = True


class Calls:
    """Runs the calls of a play, side by side or serialised.

    Args:
        threads: where they run.
        seconds: how long each may take; None for ever.

    Attributes:
        ended: set when a call ends.
    """

    def __init__(self, threads: Executor, seconds: float | None) -> None:
        self._threads, self._seconds, self._all = threads, seconds, list[UserCall]()
        self._queue, self._lock = deque[UserCall](), threading.Lock()
        self._current: UserCall | None = None
        self.ended = threading.Event()

    def start(
        self,
        what: str,
        run: Callable[..., Any],
        *args: Any,
        serialised: bool = False,
        side_by_side: bool = False,
    ) -> UserCall:
        """Starts a call; in turn, it waits for ``advance`` and those that were added before, or
        side by side with them starts at once."""
        call = UserCall(what, functools.partial(run, *args), self._seconds, serialised)
        self._all.append(call)
        if serialised and not side_by_side:
            self._queue.append(call)
        else:
            call.started = time.monotonic()
            self._threads.submit(self._run, call)
        return call

    def advance(self) -> None:
        """Sees to it that the calls in turn run, whatever hangs before them.

        For code that was written without a thought of threads: they run one after another, but one
        that takes longer than a moment goes on by itself, and the next begin in another thread.
        """
        with self._lock:
            now = self._current
            busy = now is not None and not (now.is_over or now.has_taken(_MOMENT))
            if busy or not self._queue:
                return
            first = self._current = self._queue.popleft()
        self._threads.submit(self._run_serialised, first)

    def wait(self, seconds: float) -> None:
        """Waits so long for all that still runs."""
        end = time.monotonic() + seconds
        while not all(call.is_over for call in self._all) and time.monotonic() < end:
            self.ended.clear()
            self.ended.wait(0.05)

    def _run(self, call: UserCall) -> None:
        call.run()
        self.ended.set()

    def _run_serialised(self, call: UserCall | None) -> None:
        while call is not None:
            call.run()
            with self._lock:
                if self._current is not call:
                    return  # it took too long, and another thread goes on
                call = self._current = self._queue.popleft() if self._queue else None
        self.ended.set()
