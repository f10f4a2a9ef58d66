"""Answers the calls of an ``async`` program in rounds, so that delays change nothing.

A round is all calls that the program makes until it can do nothing but wait for their answers: its
event loop is idle, no thread works for it, and nothing is on its way to the endpoint or from it.
The calls of a round are sampled together, in the order of the tasks that made them.

A later order of the turns by their content cannot replace this. Which of two equal calls is which
is known by their tasks alone; a prompt may hold the text of a turn that was sampled beside it by
accident, and D must not say that it was shown; and the last bits of log-probs depend on the
requests that share the engine's batch.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from marft_jax.extras.gateway.answers import Choice
from marft_jax.extras.gateway.channel import Asked, Channel, Client, Entrance, read_fields
from marft_jax.extras.gateway.protocol import Call

_GUARD_SECONDS = 1.0  # a later timer is the timeout of a call; an earlier one is a delay
_MOST_SECONDS = 5.0  # that a round lasts in a program that is never idle
_MOST_PASSES = 200  # of its event loop, at least: a program short of processor time is not busy

Place = tuple[int, ...]
"""Place of a task in the tree of tasks; the n-th task that a task starts is its n-th child."""
BeforeSleep = Callable[[float | None], float | None]
"""Is given how many seconds an event loop is about to sleep, None for ever; returns how many it
may sleep."""


class IdleSelector(selectors.DefaultSelector):
    """Selector that calls a function before its event loop sleeps."""

    def __init__(self, before_sleep: BeforeSleep) -> None:
        super().__init__()
        self._before_sleep = before_sleep

    def select(self, timeout: float | None = None) -> list[Any]:
        events = self.peek()
        if events or timeout == 0:
            return events
        return super().select(self._before_sleep(timeout))

    def peek(self) -> list[Any]:
        """Events that have happened; the next call returns them again."""
        return super().select(0)


class _Held(NamedTuple):
    """A call of the round; the place of a thread's or process's call is None."""

    place: Place | None
    call: Call
    future: Future[list[Choice]]

    @property
    def order(self) -> tuple[bool, Place, str]:
        return self.place is None, self.place or (), json.dumps(self.call)


class AsyncClient(Client):
    """Answers as ``openai.AsyncOpenAI`` does, to ``await``."""

    def __init__(self, channel: Channel, endpoint: Callable[[], Entrance]):
        super().__init__(channel, endpoint)
        self.chat.completions.create = self._create_async
        self._uses_http = False
        self._lock, self._held, self._unanswered = threading.Lock(), list[_Held](), 0
        self._began, self._passes = 0.0, 0  # of the round: when it began, how often the loop ran
        self._loop: _Loop | None = None

    def make_loop(self) -> asyncio.AbstractEventLoop:
        """Makes the event loop that its program runs in."""
        self._loop = _Loop(IdleSelector(self._before_sleep))
        self._channel.take_http = self._take_http
        return self._loop

    async def _create_async(self, **fields: Any) -> Any:
        call, loop = read_fields(fields), asyncio.get_running_loop()
        place = loop.place if isinstance(loop, _Loop) else None
        return self._opened(call, await asyncio.wrap_future(self._hold(call, place)))

    def _take_http(self, call: Call, port: int) -> Future[list[Choice]]:
        """Takes a call that came over HTTP, from a port of the program's."""
        assert self._loop is not None
        self._uses_http = True
        return self._hold(call, self._loop.writers.get(port))

    def _hold(self, call: Call, place: Place | None) -> Future[list[Choice]]:
        held = _Held(place, call, Future())
        with self._lock:
            if not self._held:
                self._began, self._passes = time.monotonic(), 0
            self._held.append(held)
        self._wake()
        return held.future

    def _before_sleep(self, timeout: float | None) -> float | None:
        """Ends the round where the program can do nothing but wait for it."""
        loop = self._loop
        assert loop is not None
        if not self._held or self._unanswered:
            return timeout
        self._passes += 1
        is_late = time.monotonic() - self._began > _MOST_SECONDS
        if timeout is not None and timeout <= _GUARD_SECONDS:
            if is_late and self._passes > _MOST_PASSES:
                self._end_round()
            return timeout
        waiting = sum(held.place is None for held in self._held)  # threads that wait as well
        if loop.jobs > waiting and not is_late:
            return _MOST_SECONDS
        if self._uses_http:
            self._endpoint().settle()
            if loop.selector.peek():
                return 0
        self._end_round()
        return timeout

    def _end_round(self) -> None:
        with self._lock:
            held, self._held = sorted(self._held, key=lambda one: one.order), []
            self._unanswered = len(held)
        for one in held:
            one.future.add_done_callback(self._answered)
        self._channel.ask([Asked(one.call, one.future) for one in held])

    def _answered(self, future: Future[list[Choice]]) -> None:
        with self._lock:
            self._unanswered -= 1
            self._began = time.monotonic()
        self._wake()

    def _wake(self) -> None:
        """Lets the program's loop look again."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(lambda: None)
        except RuntimeError:  # it is closed: the program is over
            pass


class _Loop(asyncio.SelectorEventLoop):
    """Event loop of a program.

    Attributes:
        jobs: how many functions run in threads for it.
        writers: place of the task that last wrote to a connection, by its own port.
    """

    def __init__(self, selector: IdleSelector) -> None:
        super().__init__(selector)
        self.selector, self.jobs, self.writers = selector, 0, dict[int, Place]()
        self._places: weakref.WeakKeyDictionary[Any, Place] = weakref.WeakKeyDictionary()
        self._children = Counter[Place]()
        self.set_task_factory(self._make_task)

    @property
    def place(self) -> Place:
        """Place of the task that runs."""
        task = asyncio.current_task(self)
        return () if task is None else self._places.get(task, ())

    def _make_task(self, loop: Any, work: Any, **given: Any) -> asyncio.Task[Any]:
        parent, task = self.place, asyncio.Task(work, loop=loop, **given)
        self._children[parent] += 1
        self._places[task] = (*parent, self._children[parent])
        return task

    async def create_connection(self, *where: Any, **given: Any) -> Any:
        transport, protocol = await super().create_connection(*where, **given)
        write, (_, port, *_) = transport.write, transport.get_extra_info("sockname")

        def noted(data: Any) -> None:
            self.writers[port] = self.place
            write(data)

        transport.write = noted
        return transport, protocol

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        future = super().run_in_executor(executor, func, *args)
        self.jobs += 1
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self.jobs -= 1
