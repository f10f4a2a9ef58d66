"""One thread that steps an engine for callers in all other threads."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import NamedTuple

import numpy as np

from marft_jax.engine.engine import Engine
from marft_jax.errors import RunFailed, Stopped, described
from marft_jax.models.lora import Adapters
from marft_jax.sampling.protocol import Completion, Request

Watch = Callable[[np.ndarray], None]
"""Is given the ids that a request has so far, in the engine's thread."""


class _Asked(NamedTuple):
    request: Request
    future: Future[Completion]
    watch: Watch | None


class Batcher:
    """Answers requests of any thread, in the order they come; use it in a ``with``.

    Whoever cancels a future gives its place in the engine to the next.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._incoming: deque[_Asked] = deque()
        self._asked: dict[int, _Asked] = {}
        self._next: tuple[Adapters, Future[None]] | None = None
        self._changed, self._closing = threading.Condition(), False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> Batcher:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Ends when all that was asked is answered."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._failure is None and not self._closing

    @property
    def unanswered(self) -> int:
        return len(self._incoming) + len(self._asked)

    def submit(self, request: Request, watch: Watch | None = None) -> Future[Completion]:
        """Queues a request."""
        future: Future[Completion] = Future()
        with self._changed:
            self._check()
            self._incoming.append(_Asked(request, future, watch))
            self._changed.notify()
        return future

    def load(self, adapters: Adapters) -> Future[None]:
        """Uses these adapters from the next request on; what the engine has begun ends first."""
        future: Future[None] = Future()
        with self._changed:
            self._check()
            self._next = adapters, future
            self._changed.notify()
        return future

    def _check(self) -> None:
        if not self.alive:
            raise RunFailed(f"the engine has stopped: {self._failure or 'shutting down'}")

    def _run(self) -> None:
        try:
            while self._wait():
                self._admit()
                self._step()
        except BaseException as error:  # whoever waits must hear of it
            with self._changed:
                self._failure = error
                left = [asked.future for asked in (*self._asked.values(), *self._incoming)]
            for future in [*left, *(self._next or ())[1:]]:
                if future.set_running_or_notify_cancel():
                    future.set_exception(RunFailed(f"the engine has failed: {described(error)}"))

    def _wait(self) -> bool:
        """Waits for work; false when there will be none."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._asked or self._incoming or self._next or self._closing
            )
            return bool(self._asked or self._incoming or self._next)

    def _admit(self) -> None:
        """Hands new requests to the engine, after new adapters if there are any."""
        if self._next is not None and not self._asked:
            adapters, future = self._next
            self._engine.load(adapters)
            self._next = None
            future.set_result(None)
        with self._changed:
            new = [] if self._next is not None else list(self._incoming)
            for _ in new:
                self._incoming.popleft()
        for asked in new:
            self._asked[self._engine.submit(asked.request)] = asked

    def _step(self) -> None:
        for ticket in [t for t, asked in self._asked.items() if asked.future.cancelled()]:
            self._engine.cancel(ticket)
            self._asked.pop(ticket).future.set_running_or_notify_cancel()
        for ticket, completion in self._engine.step():
            asked = self._asked.pop(ticket)
            if asked.future.set_running_or_notify_cancel():
                asked.future.set_result(completion)
        for ticket, ids in self._engine.partial.items():
            if (watch := self._asked[ticket].watch) is not None:
                watch(ids)


class Share:
    """What one play sees of a batcher: a ``Sampler`` with its own requests alone."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher, self._left = batcher, dict[int, Future[Completion]]()
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._tickets = 0
        self.dropped = False

    @property
    def busy(self) -> bool:
        return bool(self._left)

    def submit(self, request: Request) -> int:
        ticket, self._tickets = self._tickets, self._tickets + 1
        self._left[ticket] = future = self._batcher.submit(request)
        future.add_done_callback(lambda _: self._done.put(ticket))
        if self.dropped:
            future.cancel()
        return ticket

    def step(self) -> Sequence[tuple[int, Completion]]:
        """Waits for the next answer; raises ``Stopped`` where nobody wants it any more."""
        if not self._left:
            return []
        ticket = self._done.get()
        try:
            return [(ticket, self._left.pop(ticket).result())]
        except CancelledError:
            raise Stopped from None

    def drop(self) -> None:
        """Gives up what is unanswered, from any thread."""
        self.dropped = True
        for future in list(self._left.values()):
            future.cancel()
