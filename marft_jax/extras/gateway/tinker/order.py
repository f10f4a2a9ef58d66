"""The order of work: one thread for all clients, and numbers for the calls of a model."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, TypeVar

from marft_jax.errors import RunFailed
from marft_jax.extras.gateway.tinker.wire import TinkerError

_T = TypeVar("_T")
Work = Callable[[], Iterator[int]]
"""Makes work: it yields the tokens of each piece when this is done, and returns the result."""


class _Job(NamedTuple):
    number: int
    work: Iterator[int]
    future: Future[Any]


class Worker:
    """One thread that does the work of all clients; use it in a ``with``.

    A client is a key. The work of a client is done in the order in which it came. Among clients the
    next piece is that of whoever has had the fewest tokens, and the oldest among these.
    """

    def __init__(self) -> None:
        self._jobs = dict[str, deque[_Job]]()
        self._spent = dict[str, int]()
        self._count, self._closing = 0, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="learner", daemon=True)

    def __enter__(self) -> Worker:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Ends after the piece that is being done; what is left fails."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        for jobs in self._jobs.values():
            for job in jobs:
                job.future.set_exception(RunFailed("the server has stopped"))

    def submit(self, key: str, work: Work) -> Future[Any]:
        """Queues work of a client."""
        future: Future[Any] = Future()
        with self._changed:
            if key not in self._jobs:  # who was away has no credit
                least = min((self._spent[other] for other in self._jobs), default=0)
                self._spent[key] = max(self._spent.get(key, 0), least)
            self._jobs.setdefault(key, deque()).append(_Job(self._count, work(), future))
            self._count += 1
            self._changed.notify()
        return future

    def _run(self) -> None:
        while (key := self._next()) is not None:
            job = self._jobs[key][0]
            try:
                cost = next(job.work)
            except StopIteration as end:
                self._finish(key)
                job.future.set_result(end.value)
            except Exception as error:
                self._finish(key)
                job.future.set_exception(error)
            else:
                self._spent[key] += cost

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
                if len(self._spent) > 4096:
                    self._spent = {k: self._spent[k] for k in self._jobs}


class Numbered(Generic[_T]):
    """Calls of one model by number: they begin in its order, and a number that comes again has the
    first result. Its methods are called under a lock.

    Attributes:
        done: the last number that has begun, with all before it.
    """

    def __init__(self, done: int = 0) -> None:
        self.done = done
        self._digests = dict[int, bytes]()
        self._waiting = dict[int, _T]()

    def is_repeated(self, number: int, content: bytes) -> bool:
        """Tells whether a call came before; raises ``TinkerError`` for a number that is out of
        range, or that was used with other content."""
        if not 1 <= number <= self.done + MOST_WAITING:
            what = f"expected 1 to {self.done + MOST_WAITING}, got {number}"
            raise TinkerError(400, f"seq_id: {what}: calls of a model are numbered from 1")
        if self._digests.get(number, digest := _digest(content)) != digest:
            raise TinkerError(409, f"seq_id {number}: it was used before with other content")
        return number in self._digests or number <= self.done

    def note(self, number: int, content: bytes) -> None:
        """Keeps what a number was used for."""
        self._digests[number] = _digest(content)
        for old in [n for n in self._digests if n <= self.done - MOST_WAITING]:
            del self._digests[old]

    def ready(self, number: int, call: _T) -> list[tuple[int, _T]]:
        """Adds a call; returns those whose turn it is."""
        self._waiting[number], found = call, list[tuple[int, _T]]()
        while self.done + 1 in self._waiting:
            self.done += 1
            found.append((self.done, self._waiting.pop(self.done)))
        return found


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


MOST_WAITING = 4096  # calls of a model, given and not done
