"""Runs calls of users' code in threads, where a call may fail or take too long.

Users' code is trusted. A call that hangs fails its episode and keeps its daemon thread.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from typing import Any, Generic, TypeVar

from marft_jax.errors import place
from marft_jax.plugins import Failure, failure_of

_T = TypeVar("_T")

_MOMENT = 1.0  # seconds: the next call in turn does not wait longer for the one before it


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
        notify: called when there is something new.

    Attributes:
        blocked: it goes on only when others do; nobody waits for it.
        release: called when all others wait, too; may end it.
        is_over: it returned ``value``, or failed with ``failure``.
        began, ended: set when its thread begins and ends it.
        started: when it began, in ``time.monotonic`` seconds; NaN before that.
    """

    def __init__(
        self,
        what: str,
        run: Callable[[], _T],
        seconds: float | None,
        serialised: bool = False,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        self._what, self._run, self._seconds, self.serialised = what, run, seconds, serialised
        self.notify, self.blocked, self.release = notify, False, lambda: None
        self._thread = 0
        self.began, self.ended = threading.Event(), threading.Event()
        self.is_over, self.started = False, float("nan")
        self.value: Any = None

    def run(self) -> None:
        """Runs it in this thread, unless it was given up before it began."""
        self.started, self._thread = time.monotonic(), threading.get_ident()
        self.began.set()
        value = error = None
        try:
            value = None if self.is_over else self._run()
        except BaseException as raised:  # sys.exit too: it ends an episode, not the run
            error = raised
        del self._run  # what only it holds is dropped here
        self.end(value, error)

    def end(self, value: Any, error: BaseException | None = None) -> None:
        """Ends it with a value or an error, unless it was given up."""
        if not self.is_over:
            self.value, self.failure = value, error and failure_of(error)
            self.is_over = True
        self.ended.set()
        self.notify()

    def set_blocked(self, blocked: bool) -> None:
        """Says whether only others can end it."""
        if blocked != self.blocked:
            self.blocked = blocked
            self.notify()

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

    Attributes:
        ended: set when a call ends.
    """

    def __init__(self, threads: Executor, seconds: float | None) -> None:
        self.threads, self.seconds = threads, seconds
        self._all = list[UserCall[Any]]()
        self._last: UserCall[Any] | None = None
        self.ended = threading.Event()

    def start(
        self, what: str, run: Callable[..., _T], *args: Any, serialised: bool = False
    ) -> UserCall[_T]:
        """Starts a call; if it is serialised, after the serialised calls that were started before
        it."""
        run = functools.partial(run, *args)
        call = UserCall(what, run, self.seconds, serialised, self.ended.set)
        self._all.append(call)
        before = None
        if serialised:
            before, self._last = self._last, call
        self.threads.submit(self._run, call, before)
        return call

    def watch(self, what: str, begin: Callable[[UserCall[Any]], None]) -> UserCall[Any]:
        """Waits for users' code that runs elsewhere; ``begin`` is given what it is to end."""
        call: UserCall[Any] = UserCall(what, lambda: None, self.seconds, notify=self.ended.set)
        call.started = time.monotonic()
        self._all.append(call)
        begin(call)
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
