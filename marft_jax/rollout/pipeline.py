"""Plays steps in the order in which they are asked for: in a thread of its own, or at once.

Several processes must run their collectives in one order. So the thread that plays runs none. It
sends each through a channel to the learner's thread (``collective``), which runs it when it next
waits for the player: at the same place of the run in every process, and never beside an update.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax

from marft_jax.errors import Stopped
from marft_jax.rollout.collect import Collected

_T = TypeVar("_T")

_POLL_SECONDS = 0.005

Cancelled = Callable[[], bool]
"""True as soon as the step that is being played is no longer needed."""


class Pipeline(contextlib.AbstractContextManager["Pipeline"]):
    """Plays steps ahead of the learner; use it in a ``with``, in the learner's thread.

    An error of a step is raised by ``take`` of that step, or before that by ``check``.

    Args:
        ahead: play in a thread; otherwise ``ask`` plays the step at once.
    """

    def __init__(self, ahead: bool):
        self._ahead = ahead
        self._executor = ThreadPoolExecutor(1, "player") if ahead else None
        self._learner = threading.get_ident()
        self._asked = deque[Future[Collected]]()
        self._cancel = threading.Event()  # for the steps that were asked for since ``clear``
        # collectives of the player, each with the future of its result; None: work is done
        self._channel = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]()
        self._waited_s, self._free_since = 0.0, time.perf_counter()  # of the player

    def __exit__(self, *error: object) -> None:
        self.clear()
        if self._executor is not None:
            self._executor.shutdown()

    @property
    def asked(self) -> int:
        """Number of steps that were asked for and not yet taken."""
        return len(self._asked)

    def ask(self, play: Callable[[Cancelled], Collected]) -> None:
        """Has one more step played, after the steps that were asked for before."""
        self._asked.append(self._submit(self._play, play, self._cancel.is_set))

    def take(self) -> Collected:
        """Waits for the first step that was asked for and not yet taken, and returns it."""
        started = time.perf_counter()
        collected = self._result(self._asked.popleft())
        if not self._ahead:
            return collected
        waited_s = {"learner_wait_s": time.perf_counter() - started}
        return collected._replace(seconds={**collected.seconds, **waited_s})

    def run_exclusive(self, work: Callable[[], _T]) -> _T:
        """Runs other work in the player's thread, after the steps that were asked for."""
        return self._result(self._submit(self._run, work))

    def check(self) -> None:
        """Raises the error of a step that was asked for, before its turn to be taken."""
        for future in self._asked:
            error = future.exception() if future.done() else None
            if error is not None and not isinstance(error, Stopped):
                raise error

    def wait_for(self, arrays: Any) -> None:
        """Waits until the devices have computed the arrays; raises as ``check`` does meanwhile."""
        leaves: list[Any] = [x for x in jax.tree.leaves(arrays) if isinstance(x, jax.Array)]
        while self._ahead and not all(x.is_ready() for x in leaves):
            self.check()
            time.sleep(_POLL_SECONDS)
        jax.block_until_ready(leaves)  # pyright: ignore[reportUnknownMemberType]

    def collective(self, work: Callable[[], _T]) -> _T:
        """Runs what all processes must run in one order: in the learner's thread, see above.

        Raises:
            Stopped: ``clear`` cancelled the step that is being played.
        """
        if threading.get_ident() == self._learner:
            return work()
        started, result = time.perf_counter(), Future[_T]()
        self._channel.put((work, result))
        try:
            return result.result()
        finally:
            self._waited_s += time.perf_counter() - started

    def clear(self) -> None:
        """Cancels the steps that were asked for; returns when the player is idle."""
        self._cancel.set()
        self._cancel = threading.Event()
        while self._asked:
            self._asked.popleft().cancel()
        self._wait(self._submit(lambda: None), refuse=True)

    def _submit(self, work: Callable[..., _T], *args: Any) -> Future[_T]:
        if self._executor is not None:
            return self._executor.submit(work, *args)
        future = Future[_T]()
        _fulfil(future, functools.partial(work, *args))
        return future

    def _result(self, future: Future[_T]) -> _T:
        self._wait(future)
        return future.result()

    def _wait(self, future: Future[Any], refuse: bool = False) -> None:
        """Waits for the player; runs the collectives that it sends until then, or refuses them."""
        if not future.done():
            future.add_done_callback(lambda _: self._channel.put(None))
        while not future.done():
            if (call := self._channel.get()) is not None:
                work, result = call
                _fulfil(result, _refuse if refuse else work)

    def _run(self, work: Callable[[], _T]) -> _T:
        with self._busy():
            return work()

    def _play(self, play: Callable[[Cancelled], Collected], cancelled: Cancelled) -> Collected:
        with self._busy():
            started, before_s = time.perf_counter(), self._waited_s
            collected = play(cancelled)
            took_s = time.perf_counter() - started - (self._waited_s - before_s)
            waited_s, self._waited_s = self._waited_s, 0.0
        seconds = {"rollout_s": took_s} | ({"player_wait_s": waited_s} if self._ahead else {})
        return collected._replace(seconds={**collected.seconds, **seconds})

    @contextlib.contextmanager
    def _busy(self) -> Generator[None]:
        """Counts the time until now as waiting, and none of the time inside."""
        self._waited_s += time.perf_counter() - self._free_since
        try:
            yield
        finally:
            self._free_since = time.perf_counter()


def _refuse() -> None:
    raise Stopped


def _fulfil(future: Future[_T], work: Callable[[], _T]) -> None:
    """Runs work, and gives its result or error to the future."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
