"""One thread that steps a sampler for callers in all other threads."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from marft_jax.errors import RunFailed, Stopped, described
from marft_jax.sampling.protocol import AdaptersOfBases, Completion, Request, Sampler

_T = TypeVar("_T")
Watch = Callable[[np.ndarray], None]
"""Is given the ids that a request has so far, in the sampler's thread."""


class _PendingRequest(NamedTuple):
    request: Request
    future: Future[Completion]
    watch: Watch | None


class OwnThread:
    """Runs ``_run`` in a thread while it is used in a ``with``. ``_changed`` guards what the thread
    waits for; at the end ``_closing`` is set, and the ``with`` waits for the thread."""

    def __init__(self, name: str) -> None:
        self._changed, self._closing = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        raise NotImplementedError


class Batcher(OwnThread):
    """Answers requests of any thread, in the order they come; use it in a ``with``, which ends when
    all that was asked is answered.

    Cancelling a future cancels its request.
    """

    def __init__(self, sampler: Sampler) -> None:
        super().__init__("sampler")
        self.sampler = sampler
        self._incoming: deque[_PendingRequest] = deque()
        self._pending: dict[int, _PendingRequest] = {}
        self._between: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._next: tuple[AdaptersOfBases, str, list[Future[None]]] | None = None
        self._failure: BaseException | None = None

    @property
    def alive(self) -> bool:
        return self._failure is None and not self._closing

    @property
    def unanswered(self) -> int:
        return len(self._incoming) + len(self._pending)

    def submit(self, request: Request, watch: Watch | None = None) -> Future[Completion]:
        """Queues a request; raises ``BadInput`` if the sampler cannot serve it."""
        self.sampler.capabilities.check(request)
        future: Future[Completion] = Future()
        with self._changed:
            self._check()
            self._incoming.append(_PendingRequest(request, future, watch))
            self._changed.notify()
        return future

    def load(self, adapters: AdaptersOfBases, version: str) -> Future[None]:
        """Samples later requests with these adapters; requests that were begun end first, unless
        the sampler loads while it is busy."""
        future: Future[None] = Future()
        with self._changed:
            self._check()
            waiting = self._next[2] if self._next else []  # of adapters that nobody will sample
            self._next = adapters, version, [*waiting, future]
            self._changed.notify()
        return future

    def run_between_steps(self, call: Callable[[], _T]) -> Future[_T]:
        """Runs a call in the sampler's thread, after requests that were cancelled are dropped and
        before it is handed the next ones."""
        future: Future[_T] = Future()
        with self._changed:
            self._check()
            self._between.append((call, future))
            self._changed.notify()
        return future

    def _check(self) -> None:
        if not self.alive:
            raise RunFailed(f"the sampler has stopped: {self._failure or 'shutting down'}")

    def _run(self) -> None:
        try:
            while self._wait():
                try:
                    self._admit()
                    self._step()
                except RunFailed as error:  # the sampler can go on
                    self._fail(error)
        except BaseException as error:  # whoever waits must hear of it
            with self._changed:
                self._failure = error
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Fails all that is waited for."""
        for ticket in self._pending:
            if isinstance(error, RunFailed):
                self.sampler.cancel(ticket)
        with self._changed:
            left = [asked.future for asked in (*self._pending.values(), *self._incoming)]
            left += [future for _, future in self._between]
            left += self._next[2] if self._next else []
            self._pending, self._next, self._between = {}, None, deque()
            self._incoming.clear()
        for future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(RunFailed(f"the sampler has failed: {described(error)}"))

    def _wait(self) -> bool:
        """Waits for work; false when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._to_do or self._closing)
            return bool(self._pending or self._to_do)

    @property
    def _to_do(self) -> bool:
        return bool(self._incoming or self._between or self._next)

    def _admit(self) -> None:
        """Hands new requests to the sampler, after new adapters if there are any, and after calls
        that may count on it that cancelled requests are dropped."""
        with self._changed:  # what comes later waits for the calls that came before it
            calls, self._between, came = self._between, deque(), len(self._incoming)
        for ticket in [t for t, asked in self._pending.items() if asked.future.cancelled()]:
            self.sampler.cancel(ticket)
            self._pending.pop(ticket).future.set_running_or_notify_cancel()
        for call, future in calls:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except Exception as error:  # it is the caller's
                    future.set_exception(error)
        at_once = self.sampler.capabilities.loads_while_busy
        if self._next is not None and (at_once or not self._pending):
            adapters, version, futures = loaded = self._next
            self.sampler.load(adapters, version)
            with self._changed:  # others may have come meanwhile
                self._next = None if self._next is loaded else self._next
            for future in futures:
                if not future.done():
                    future.set_result(None)
        with self._changed:
            new = [self._incoming.popleft() for _ in range(0 if self._next else came)]
        for asked in new:
            if asked.future.cancelled():
                asked.future.set_running_or_notify_cancel()
            else:
                self._pending[self.sampler.submit(asked.request)] = asked

    def _step(self) -> None:
        for ticket, completion in self.sampler.step():
            asked = self._pending.pop(ticket)
            if asked.future.set_running_or_notify_cancel():
                asked.future.set_result(completion)
        if self.sampler.capabilities.streams:
            for ticket, ids in self.sampler.partial.items():
                if (watch := self._pending[ticket].watch) is not None:
                    watch(ids)


class SamplerHandle:
    """A sampler for one play on a batcher: it answers the requests of this play alone.

    Attributes:
        dropped: ``release`` was called, and nobody wants answers any more.
    """

    partial: Mapping[int, np.ndarray] = {}

    def __init__(self, batcher: Batcher) -> None:
        self.capabilities = batcher.sampler.capabilities._replace(streams=False)
        self._batcher, self._left = batcher, dict[int, Future[Completion]]()
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._tickets = 0
        self.dropped = False

    @property
    def busy(self) -> bool:
        return bool(self._left)

    def load(self, adapters: AdaptersOfBases, version: str) -> None:
        """Loads them for all handles on the batcher."""
        self._batcher.load(adapters, version).result()

    def submit(self, request: Request) -> int:
        ticket, self._tickets = self._tickets, self._tickets + 1
        self._left[ticket] = future = self._batcher.submit(request)
        future.add_done_callback(lambda _: self._done.put(ticket))
        if self.dropped:
            future.cancel()
        return ticket

    def cancel(self, ticket: int) -> None:
        if (future := self._left.pop(ticket, None)) is not None:
            future.cancel()

    def step(self) -> Sequence[tuple[int, Completion]]:
        """Waits for the next answer; raises ``Stopped`` after ``release``."""
        while self._left:
            ticket = self._done.get()
            if (future := self._left.pop(ticket, None)) is not None:
                try:
                    return [(ticket, future.result())]
                except CancelledError:
                    raise Stopped from None
        return []

    def start(self) -> None:
        """The batcher's thread samples by itself."""

    def verify_adapters(self) -> None:
        """Others may still be sampling."""

    def release(self) -> None:
        """Cancels unanswered requests, from any thread."""
        self.dropped = True
        for future in list(self._left.values()):
            future.cancel()

    def stats(self) -> Mapping[str, float]:
        return {}
