"""Calls that an ``async`` program makes side by side: which ones these are, whatever delays it has.

They are handed over when the program can do nothing but wait for them: its event loop is idle, no
thread of it is at work, nothing is on its way to the endpoint or from it, and all that was handed
over before is answered.
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

from marft_jax.extras.gateway.channel import Channel, Client, Enter, read_fields
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.protocol import Call, Choice

_GUARD_SECONDS = 1.0  # a timer further away guards a call; a nearer one is a delay of the program
_MOST_SECONDS = 5.0  # that a call is held back for others, in programs that are never idle
_MOST_PASSES = 200  # of their loop, at least: one that is short of processor time is not busy


class _Held(NamedTuple):
    """A call that waits for those beside it; one from a thread or a process has no place."""

    has_no_place: bool
    place: tuple[int, ...]
    text: str
    call: Call
    future: Future[list[Choice]]


class AsyncClient(Client):
    """Answers as ``openai.AsyncOpenAI`` does, to ``await``.

    Args:
        settle: waits until the endpoint has nothing to do.
    """

    def __init__(self, channel: Channel, enter: Enter, settle: Callable[[], None]):
        super().__init__(channel, enter)
        self.chat.completions.create = self._create_async
        self._places, self._settle, self._uses_http = _Places(), settle, False
        self._lock, self._held = threading.Lock(), list[_Held]()
        self._unanswered, self._waits_since, self._passes = 0, float("inf"), 0
        self._loop: _Loop | None = None

    def make_loop(self) -> asyncio.AbstractEventLoop:
        """Makes the event loop that its program runs in."""
        self._loop = _Loop(_WhenIdle(self), self._places)
        self._channel.hold = self._hold
        return self._loop

    async def _create_async(self, **fields: Any) -> Any:
        self._check_process()
        call, loop = read_fields(fields), asyncio.get_running_loop()
        if loop is self._loop:
            future = self._add(_Held(False, self._places.find(loop), "", call, Future()))
        else:
            future = self._add_from_elsewhere(call, None)
        return self._opened(call, await asyncio.wrap_future(future))

    def _hold(self, call: Call, port: int) -> Future[list[Choice]]:
        """Holds a call that came over HTTP, from a port of the program's."""
        assert self._loop is not None
        self._uses_http = True
        return self._add_from_elsewhere(call, self._loop.writers.get(port))

    def _add_from_elsewhere(
        self, call: Call, place: tuple[int, ...] | None
    ) -> Future[list[Choice]]:
        """Holds a call that was not made in the program's loop, which looks at it."""
        future = self._add(_Held(place is None, place or (), json.dumps(call), call, Future()))
        self._wake()
        return future

    def _add(self, held: _Held) -> Future[list[Choice]]:
        with self._lock:
            self._waits_since = min(self._waits_since, time.monotonic())
            self._held.append(held)
        return held.future

    def look(self, select: Callable[[float | None], list[Any]], timeout: float | None) -> list[Any]:
        """Looks for events; where the program waits for nothing else, hands its calls over."""
        assert self._loop is not None
        if not self._held or self._unanswered:
            return select(timeout)
        self._passes += 1
        late = self._waits_since < time.monotonic() - _MOST_SECONDS
        waits = timeout is None or timeout > _GUARD_SECONDS
        waiting = sum(held.has_no_place for held in self._held)  # threads that wait, too
        if waits and (late or self._loop.jobs <= waiting):
            if events := select(0):
                return events
            if self._uses_http:
                self._settle()
                if events := select(0):
                    return events
            self._flush()
        elif late and self._passes > _MOST_PASSES:
            self._flush()
        elif waits:  # a thread is at work
            timeout = _MOST_SECONDS
        return select(timeout)

    def _flush(self) -> None:
        """Hands over the calls that are held, by their tasks, else by what they say."""
        with self._lock:
            held, self._held, self._waits_since = self._held, [], float("inf")
            self._passes = 0
            held = [one for one in held if one.future.set_running_or_notify_cancel()]
            self._unanswered += len(held)
        held.sort(key=lambda one: one[:3])
        try:
            asked = self._channel.ask([one.call for one in held])
        except ApiError as error:
            for one in held:
                one.future.set_exception(error)
                self._answered()
            return
        for one, future in zip(held, asked, strict=True):
            future.add_done_callback(self._passing(one.future))

    def _passing(self, outer: Future[list[Choice]]) -> Callable[[Future[list[Choice]]], None]:
        def passed(inner: Future[list[Choice]]) -> None:
            if (error := inner.exception()) is not None:
                outer.set_exception(error)
            else:
                outer.set_result(inner.result())
            self._answered()

        return passed

    def _answered(self) -> None:
        with self._lock:
            self._unanswered -= 1
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
        jobs: what runs in threads for it.
        writers: place of the task that last wrote to a connection, by its own port.
    """

    def __init__(self, selector: selectors.BaseSelector, places: _Places) -> None:
        super().__init__(selector)
        self.set_task_factory(places)
        self._places, self.jobs, self.writers = places, 0, dict[int, tuple[int, ...]]()

    async def create_connection(self, *where: Any, **given: Any) -> Any:
        transport, protocol = await super().create_connection(*where, **given)
        write, (_, port, *_) = transport.write, transport.get_extra_info("sockname")

        def noted(data: Any) -> None:
            self.writers[port] = self._places.find(self)
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


class _WhenIdle(selectors.DefaultSelector):
    def __init__(self, client: AsyncClient) -> None:
        super().__init__()
        self._client = client

    def select(self, timeout: float | None = None) -> list[Any]:
        return self._client.look(super().select, timeout)


class _Places:
    """Numbers the tasks of an event loop as a tree: the n-th that a task starts is its n-th child,
    whatever others start meanwhile."""

    def __init__(self) -> None:
        self._found: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()
        self._children: Counter[tuple[int, ...]] = Counter()

    def __call__(self, loop: Any, work: Any, **given: Any) -> asyncio.Task[Any]:
        """Makes a task, as a loop's task factory."""
        parent, task = self.find(loop), asyncio.Task(work, loop=loop, **given)
        self._children[parent] += 1
        self._found[task] = (*parent, self._children[parent])
        return task

    def find(self, loop: asyncio.AbstractEventLoop) -> tuple[int, ...]:
        """Place of the task that runs."""
        task = asyncio.current_task(loop)
        return () if task is None else self._found.get(task, ())
