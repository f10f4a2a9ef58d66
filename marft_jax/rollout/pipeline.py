"""Plays the steps of a run in order: ahead of the learner, in a thread of its own, or on demand.

With a lag η step s is sampled with the adapters after max(0, s - η) updates, however long anything
takes. What a step depends on is in its ``Job``; the clock decides only who waits for whom.

Several processes must do what they do together in one order. So the thread that plays does none of
it: it hands that over (``meet``), and the thread that learns does it when it next waits for the
player, at the same place of the run in all of them and never beside an update.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, Self, TypeVar

from marft_jax.errors import Stopped
from marft_jax.models.lora import Adapters
from marft_jax.rollout.collect import Collected

_T = TypeVar("_T")

_CLOSE_SECONDS = 60.0  # for a compiler, which cannot be interrupted


class Job(NamedTuple):
    """A step to play, and all that it depends on.

    Attributes:
        attempt: at the step, as of ``random_keys.attempt``.
        version: updates that made the adapters.
        adapters: sample it; nobody writes to their memory until it is played.
        level: of the curriculum.
    """

    attempt: int
    version: int
    adapters: Adapters
    level: int


Play = Callable[[Job, Callable[[], bool]], Collected]
"""Plays a job; raises ``Stopped`` soon after the function says that nobody wants it any more."""


class Pipeline:
    """Steps that are asked for, and are played and taken in that order; use it in a ``with``.

    An error of a play is raised where that step is taken, or before that by ``check``.

    Args:
        play: plays a step; all calls come from one thread.
        ahead: play in a thread, from when a step is asked for; else in ``take``.
    """

    def __init__(self, play: Play, ahead: bool):
        self._play = play
        self._asked: deque[_Promise] = deque()
        self._cleared = self._began = 0  # as counted now, and when the present work began
        self._idle_s = 0.0
        self._work: queue.SimpleQueue[_Promise | None] = queue.SimpleQueue()
        self._news = threading.Condition()  # of what the player has done, or hands over
        self._meeting: _Promise | None = None
        self._thread = threading.Thread(target=self._serve, name="player", daemon=True)
        self._ahead = ahead

    def __enter__(self) -> Self:
        if self._ahead:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stops what is played."""
        self.clear()
        if self._ahead:
            self._work.put(None)
            self._thread.join(_CLOSE_SECONDS)

    def ask(self, job: Job) -> None:
        """Has one more step played."""
        self._asked.append(self._submit(functools.partial(self._play_one, job, self._cleared)))

    def take(self) -> Collected:
        """The first step that was asked for and not yet taken; waits until it is played."""
        started = time.perf_counter()
        collected = self._result(self._asked.popleft())
        if not self._ahead:
            return collected
        waited_s = {"learner_wait_s": time.perf_counter() - started}
        return collected._replace(seconds={**collected.seconds, **waited_s})

    def between(self, work: Callable[[], _T]) -> _T:
        """Does other work with what plays, after the steps that were asked for are played."""
        return self._result(self._submit(work))

    def check(self, wait_s: float = 0.0) -> None:
        """Raises the error of a step that was asked for, long before its turn may come.

        Args:
            wait_s: so long, or until there is news of what plays.
        """
        with self._news:
            self._news.wait(wait_s)
        errors = [promise.future.exception() for promise in self._asked if promise.future.done()]
        for error in errors:
            if error is not None and not isinstance(error, Stopped):
                raise error

    def meet(self, work: Callable[[], _T]) -> _T:
        """Does, for what plays, what all processes do together; see above.

        Raises:
            Stopped: what is played is not wanted any more.
        """
        if threading.current_thread() is not self._thread:
            return work()
        started, meeting = time.perf_counter(), _Promise(Future(), work)
        with self._news:
            if self._began != self._cleared:
                raise Stopped
            self._meeting = meeting
            self._news.notify()
        try:
            return meeting.future.result()
        finally:
            self._idle_s += time.perf_counter() - started

    def clear(self) -> None:
        """Drops what was asked for; a step that is being played is stopped."""
        with self._news:
            self._cleared += 1
            self._asked.clear()
            if self._meeting is not None:
                self._meeting.future.set_exception(Stopped())
                self._meeting = None

    def _submit(self, work: Callable[[], Any]) -> _Promise:
        """Gives work to the thread; without one it is done when its result is asked for."""
        promise = _Promise(Future(), work)
        if self._ahead:
            self._work.put(promise)
        return promise

    def _result(self, promise: _Promise) -> Any:
        """The result of what plays; what it hands over until then is done here."""
        if not self._ahead:
            return promise.work()
        future = promise.future
        while True:
            with self._news:
                self._news.wait_for(lambda: future.done() or self._meeting)
                meeting = self._meeting
                if future.done() or meeting is None:
                    return future.result()
                self._meeting = None
            meeting.keep()

    def _play_one(self, job: Job, cleared: int) -> Collected:
        def unwanted() -> bool:
            return self._cleared != cleared

        if unwanted():
            raise Stopped
        started, idle_s = time.perf_counter(), self._idle_s
        collected = self._play(job, unwanted)
        took_s = time.perf_counter() - started - (self._idle_s - idle_s)
        seconds = {"rollout_s": took_s} | ({"player_wait_s": self._idle_s} if self._ahead else {})
        self._idle_s = 0.0
        return collected._replace(seconds={**collected.seconds, **seconds})

    def _serve(self) -> None:
        while True:
            waits = time.perf_counter()
            promise = self._work.get()
            self._idle_s += time.perf_counter() - waits
            if promise is None:
                return
            self._began = self._cleared
            promise.keep()
            with self._news:
                self._news.notify()
            del promise  # what is dropped is dropped here


class _Promise(NamedTuple):
    """Work of one thread for another."""

    future: Future[Any]
    work: Callable[[], Any]

    def keep(self) -> None:
        try:
            self.future.set_result(self.work())
        except BaseException as error:
            self.future.set_exception(error)
