"""Runs calls of users' code in threads, where a call may fail or take too long.

Users' code is trusted. A call that hangs fails its episode and keeps its daemon thread.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future
from typing import Any, Generic, TypeVar

from marft_jax.errors import place
from marft_jax.plugins import Failure, failure_of

_T = TypeVar("_T")

_MOMENT = 1.0  # seconds: the next call in turn does not wait longer for the one before it


class DaemonThreads(Executor):
    """Runs each call in a daemon thread of its own: Python does not wait for one that hangs."""

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

        threading.Thread(target=run, name="environment", daemon=True).start()
        return future


class Wait(Generic[_T]):
    """Something that a coroutine awaits. The coroutine yields it to whoever runs the coroutine, and
    goes on when it is over: with its ``value``, or its ``failure`` is raised.
    """

    value: _T
    failure: Failure | None = None

    def __await__(self) -> Generator[list[Wait[Any]], object, _T]:
        yield [self]
        if self.failure is not None:
            raise self.failure
        return self.value


class UserCall(Wait[_T]):
    """A call of a user's code: how far it is, and what came of it.

    Args:
        what: its name, for messages.
        run: the call; what it raises becomes a failure.
        seconds: how long it may take; None for ever.
        serialised: the player waits for it at once, before it samples again.

    Attributes:
        is_over: it returned ``value``, or failed with ``failure``.
        began, ended: set when its thread begins and ends it.
        started: when it began, in ``time.monotonic`` seconds; NaN before that.
    """

    def __init__(
        self, what: str, run: Callable[[], _T], seconds: float | None, serialised: bool = False
    ) -> None:
        self._what, self._run, self._seconds, self.serialised = what, run, seconds, serialised
        self._thread = 0
        self.began, self.ended = threading.Event(), threading.Event()
        self.is_over, self.started = False, float("nan")
        self.value: Any = None

    def run(self) -> None:
        """Runs it in this thread, unless it was given up before it began."""
        self.started, self._thread = time.monotonic(), threading.get_ident()
        self.began.set()
        value = failure = None
        try:
            value = None if self.is_over else self._run()
        except BaseException as error:  # sys.exit too: it ends an episode, not the run
            failure = failure_of(error)
        del self._run  # what only it holds is dropped here
        if not self.is_over:
            self.value, self.failure, self.is_over = value, failure, True
        self.ended.set()

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
    """Runs the calls of a play, each in a thread.

    Serialised calls begin one after another, for code that was written without a thought of
    threads; but none waits longer than a moment for the call before it.

    Args:
        threads: where they run.
        seconds: how long each may take; None for ever.
        side_by_side: serialised calls run side by side, too.

    Attributes:
        ended: set when a call ends.
    """

    def __init__(
        self, threads: Executor, seconds: float | None, side_by_side: bool = False
    ) -> None:
        self.threads, self.seconds, self._side_by_side = threads, seconds, side_by_side
        self._all = list[UserCall[Any]]()
        self._last: UserCall[Any] | None = None
        self.ended = threading.Event()

    def start(
        self, what: str, run: Callable[..., _T], *args: Any, serialised: bool = False
    ) -> UserCall[_T]:
        """Starts a call; if it is serialised, after the serialised calls that were started before
        it."""
        call = UserCall(what, functools.partial(run, *args), self.seconds, serialised)
        self._all.append(call)
        before = None
        if serialised and not self._side_by_side:
            before, self._last = self._last, call
        self.threads.submit(self._run, call, before)
        return call

    def wait(self, seconds: float) -> None:
        """Waits so long for all that still runs."""
        end = time.monotonic() + seconds
        while not all(call.is_over for call in self._all) and time.monotonic() < end:
            self.ended.clear()
            self.ended.wait(0.05)

    def _run(self, call: UserCall[Any], before: UserCall[Any] | None) -> None:
        if before is not None:
            before.began.wait()
            before.ended.wait(_MOMENT)
        call.run()
        self.ended.set()
