"""The order of work: one thread for all clients, and numbers for the calls of a model."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import NamedTuple

from marft_jax.extras.gateway.errors import ApiError
from marft_jax.sampling.batcher import OwnThread

Working = Generator[int, None, bytes]
"""Work: it yields the tokens of each piece when this is done, and returns the result."""
Work = Callable[[], Working]
MOST_WAITING = 256  # calls of a model, from the oldest that is not done


class _Job(NamedTuple):
    number: int
    work: Working
    promise: Future[bytes]


class Worker(OwnThread):
    """One thread that does the work of all clients; use it in a ``with``, which ends when the piece
    of work is done that it is at.

    A client is a key. The work of a client is done in the order in which it came. Among clients the
    next piece is that of whoever has had the fewest tokens, and the oldest among these.
    """

    def __init__(self) -> None:
        super().__init__("learner")
        self._jobs = dict[str, deque[_Job]]()
        self._spent = dict[str, int]()
        self._count = 0

    def submit(self, key: str, work: Work, promise: Future[bytes]) -> None:
        """Queues work of a client, whose result fulfils the promise."""
        promise.set_running_or_notify_cancel()  # it cannot be cancelled any more
        with self._changed:
            if key not in self._jobs:  # who was away has no credit
                least = min((self._spent[other] for other in self._jobs), default=0)
                self._spent[key] = max(self._spent.get(key, 0), least)
            self._jobs.setdefault(key, deque()).append(_Job(self._count, work(), promise))
            self._count += 1
            self._changed.notify()

    def _run(self) -> None:
        while (key := self._next()) is not None:
            job = self._jobs[key][0]
            try:
                self._spent[key] += next(job.work)
            except StopIteration as end:
                self._finish(key)
                job.promise.set_result(end.value)
            except Exception as error:
                self._finish(key)
                job.promise.set_exception(error)

    def _next(self) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closing)
            if self._closing:
                return None
            return min(self._jobs, key=lambda k: (self._spent[k], self._jobs[k][0].number))

    def _finish(self, key: str) -> None:
        with self._changed:
            self._jobs[key].popleft()
            if not self._jobs[key]:
                del self._jobs[key]


class Numbered:
    """Calls of one model by number: they begin in its order, and a number that comes again has the
    first promise. Its methods are called under a lock.

    Attributes:
        begun: the last number that has begun, with all before it.
    """

    def __init__(self, begun: int = 0) -> None:
        self.begun = begun
        self._known = dict[int, tuple[bytes, Future[bytes]]]()
        self._waiting = dict[int, Work]()

    def promise(self, number: int) -> Future[bytes] | None:
        """The promise of a call, unless it is long done."""
        return self._known[number][1] if number in self._known else None

    def is_repeated(self, number: int, content: bytes) -> bool:
        """Tells whether a call came before; raises ``ApiError`` for a number that was used with
        other content, is no number of a call, or is far ahead of calls that are not done."""
        if number < 1:
            raise ApiError(400, f"seq_id: calls of a model are numbered from 1, got {number}")
        left = [n for n, (_, promise) in self._known.items() if not promise.done()]
        if number >= min(left, default=self.begun + 1) + MOST_WAITING:
            raise ApiError(429, f"seq_id {number}: {MOST_WAITING} calls wait; try again later")
        if number in self._known and self._known[number][0] != _digest(content):
            raise ApiError(409, f"seq_id {number}: it was used before with other content")
        return number in self._known or number <= self.begun

    def add(self, number: int, content: bytes, work: Work) -> list[tuple[Work, Future[bytes]]]:
        """Adds a call; returns those whose turn it is."""
        self._known[number], self._waiting[number] = (_digest(content), Future()), work
        for old in [*self._known][: -2 * MOST_WAITING]:
            del self._known[old]
        ready = list[tuple[Work, Future[bytes]]]()
        while self.begun + 1 in self._waiting:
            self.begun += 1
            ready.append((self._waiting.pop(self.begun), self._known[self.begun][1]))
        return ready


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
