"""Plays the steps of a run in order: ahead of the learner, in a thread of its own, or on demand.

With a lag η step s is sampled with the adapters after max(0, s - η) updates, however long anything
takes. What a step depends on is in its ``Job``; the clock decides only who waits for whom.

Several processes must do what they do together in one order. So the thread that plays does none of
it: it hands that over (``on_all``), and the thread that learns does it when it next waits for the
player, at the same place of the run in all of them and never beside an update.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp

from marft_jax.engine.engine import Engine
from marft_jax.errors import Stopped
from marft_jax.models.lora import Adapters
from marft_jax.random_keys import attempt
from marft_jax.rollout.collect import Collected
from marft_jax.rollout.curriculum import Curriculum
from marft_jax.types import MAIN, Version

_T = TypeVar("_T")

_CLOSE_SECONDS = 60.0  # for a compiler, which cannot be interrupted
_POLL_SECONDS = 0.005

Unwanted = Callable[[], bool]
"""True as soon as nobody wants what is being played."""


class Job(NamedTuple):
    """A step to play, and all that it depends on.

    Attributes:
        attempt: at the step, as of ``random_keys.attempt``.
        version: updates that made the adapters.
        adapters: of each base; sample it; nobody writes to their memory until it is played.
        level: of the curriculum.
    """

    attempt: int
    version: int
    adapters: Mapping[str, Adapters]
    level: int


class Learned(Protocol):
    """Part of a training state that steps are sampled with; ``past``: the versions of the last
    states, the oldest first, as many as the lag."""

    @property
    def adapters(self) -> dict[str, Adapters]: ...

    @property
    def progress(self) -> jax.Array: ...

    @property
    def past(self) -> tuple[Version, ...]: ...

    def version(self) -> Version: ...


class Sampled(NamedTuple):
    """Steps of a run, sampled by the team that it trains.

    Attributes:
        play: plays the tasks of a job's level for its attempt, with the adapters in the engine;
            raises ``Stopped`` soon after nobody wants it any more.
        steps: of the whole run; none after them is played ahead.
        apart: the engine has devices of its own.
    """

    pipeline: Pipeline
    engine: Engine
    curriculum: Curriculum
    play: Callable[[Job, Unwanted], Collected]
    steps: int
    apart: bool

    def take(
        self, state: Learned, step: int, rollbacks: int
    ) -> tuple[Collected, tuple[Version, ...]]:
        """Returns a step's episodes, and the versions that the next state has as its ``past``.

        Has every step played whose adapters are known: that of the present ones, and at the start
        and after a rollback also those of the versions before.

        Args:
            state: after ``step`` updates.
        """
        started = time.perf_counter()
        versions, lag = (*state.past, self._present(state)), len(state.past)
        placed_s = {"place_s": time.perf_counter() - started} if self.apart else {}
        for number in range(step + self.pipeline.asked, min(step + lag + 1, self.steps)):
            adapters, progress = versions[number - step]
            level, version = self.curriculum.level(progress), max(0, number - lag)
            job = Job(attempt(number, rollbacks), version, adapters, level)
            self.pipeline.ask(functools.partial(self._play, job))
        collected = self.pipeline.take()
        return collected._replace(seconds={**collected.seconds, **placed_s}), versions[1:]

    def _present(self, state: Learned) -> Version:
        """Returns the present version, where it is played; what learns is donated, so a version
        that is played beside an update is a copy."""
        if self.apart:
            placed = {MAIN: self.engine.place(state.adapters[MAIN])}
            jax.block_until_ready(placed)  # pyright: ignore[reportUnknownMemberType]
            return Version(placed, jnp.copy(state.progress))
        return state.version() if state.past else Version(state.adapters, state.progress)

    def _play(self, job: Job, unwanted: Unwanted) -> Collected:
        """Plays a job, in whichever thread; the cache is there only as long as that takes."""
        self.engine.load(job.adapters[MAIN])
        try:
            played = self.play(job, unwanted)
            return played._replace(
                seconds={**played.seconds, "reward_s": played.waited_s},
                version=job.version,
                level=job.level,
                prefix_cached=self.engine.reused,
            )
        finally:
            self.engine.release()


class Pipeline:
    """Work that is asked for, and is done and taken in that order; use it in a ``with``.

    An error of a play is raised where that step is taken, or before that by ``check``.

    Args:
        ahead: play in a thread, from when a step is asked for; else in ``take``.
    """

    def __init__(self, ahead: bool):
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

    @property
    def asked(self) -> int:
        """Number of steps that were asked for and not yet taken."""
        return len(self._asked)

    def ask(self, play: Callable[[Unwanted], Collected]) -> None:
        """Has one more step played; all plays run in one thread."""
        self._asked.append(self._submit(functools.partial(self._timed, play, self._cleared)))

    def take(self) -> Collected:
        """Returns the first step that was asked for and not yet taken; waits until it is played."""
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

    def wait_for(self, arrays: Any) -> None:
        """Waits until the devices have made them, or a step that is played ahead fails."""
        own: list[Any] = [x for x in jax.tree.leaves(arrays) if isinstance(x, jax.Array)]
        while self._ahead and not all(x.is_ready() for x in own):
            self.check(_POLL_SECONDS)
        jax.block_until_ready(own)  # pyright: ignore[reportUnknownMemberType]

    def on_all(self, work: Callable[[], _T]) -> _T:
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
        """Returns the result of what plays; what it hands over until then is done here."""
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

    def _timed(self, play: Callable[[Unwanted], Collected], cleared: int) -> Collected:
        def unwanted() -> bool:
            return self._cleared != cleared

        if unwanted():
            raise Stopped
        started, idle_s = time.perf_counter(), self._idle_s
        collected = play(unwanted)
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
