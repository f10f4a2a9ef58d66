"""Event loops in threads, above all the one in which async code of users runs.

That one lives as long as the process: what a module of a user's keeps between calls, such as a
semaphore or an HTTP client, belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import selectors
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from marft_jax.errors import described, place

LOGGER = logging.getLogger("marft_jax")

_T = TypeVar("_T")

_SETTLE_SECONDS = 5.0  # for tasks that are never idle
DELAY_SECONDS = 1.0  # a longer timer is a timeout, and not a delay

Place = tuple[int, ...]
"""Place of a task in the tree of tasks: the n-th task that a task starts is its n-th child."""


class DaemonThreads(Executor):
    """Runs each call in a daemon thread of its own: Python does not wait for one that hangs."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts ``fn(*args, **kwargs)``; its future holds what it returns or raises."""
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="environment", daemon=True).start()
        return future


class Background:
    """An event loop that runs in a daemon thread until it is closed."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop or asyncio.new_event_loop()
        threading.Thread(target=_run, args=(self.loop,), name=name, daemon=True).start()

    def start(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Starts a coroutine; whoever cancels the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Runs a coroutine, and waits for its result."""
        return self.start(work).result()

    def close(self) -> None:
        """Ends the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    ended = False
    while not ended:
        with contextlib.suppress(SystemExit, KeyboardInterrupt):  # of a task, which keeps it
            loop.run_forever()
            ended = True


class _Selector(selectors.DefaultSelector):
    """Calls a function before the event loop sleeps."""

    def __init__(self, before_sleep: Callable[[], float | None]) -> None:
        super().__init__()
        self._before_sleep = before_sleep

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if events or timeout == 0:
            return events
        wake = self._before_sleep()
        return super().select(min((s for s in (timeout, wake) if s is not None), default=None))


class UsersLoop(asyncio.SelectorEventLoop):
    """An event loop that knows which task does what, and when all of them wait.

    Attributes:
        watchers: called before the loop sleeps; each returns after how many seconds it is to be
            called again, None for when there is something new.
    """

    def __init__(self) -> None:
        super().__init__(_Selector(self._sleep))
        self.watchers = list[Callable[[], float | None]]()
        self._settling = list[threading.Event]()
        self._tasks: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._roots = [(), 0]  # place and number of children of what no task starts
        self._delays: weakref.WeakKeyDictionary[Any, Place] = weakref.WeakKeyDictionary()
        self._jobs = dict[Any, Place]()
        self._writers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._threads = DaemonThreads()
        self._limiter: anyio.CapacityLimiter | None = None
        self.set_task_factory(self._make_task)
        self.set_exception_handler(_report)

    async def prepare(self) -> None:
        """Learns of the threads that anyio starts in this loop."""
        self._limiter = anyio.to_thread.current_default_thread_limiter()

    def settle(self) -> None:
        """Waits, in another thread, until all tasks wait."""
        settled = threading.Event()
        self.call_soon_threadsafe(self._settling.append, settled)
        settled.wait(_SETTLE_SECONDS)

    def _sleep(self) -> float | None:
        again = [watch() for watch in [*self.watchers]]
        while self._settling:
            self._settling.pop().set()
        return min((seconds for seconds in again if seconds is not None), default=None)

    @property
    def place(self) -> Place:
        """Place of the task that runs."""
        return self._parent[0]

    @property
    def _parent(self) -> list[Any]:
        task = asyncio.current_task(self)
        return self._roots if task is None else self._tasks.get(task, self._roots)

    def _make_task(self, loop: Any, work: Any, **options: Any) -> asyncio.Task[Any]:
        parent, task = self._parent, asyncio.Task(work, loop=loop, **options)
        parent[1] += 1
        self._tasks[task] = [(*parent[0], parent[1]), 0]
        return task

    def jobs(self, root: Place) -> int:
        """Counts the functions that run in threads for the tasks below a place."""
        by_anyio = self._limiter.statistics().borrowers if self._limiter else ()
        places = [self._tasks[task][0] for task in by_anyio if task in self._tasks]
        return sum(place[: len(root)] == root for place in [*self._jobs.values(), *places])

    def is_delayed(self, root: Place) -> bool:
        """True where a task below this place sleeps, and goes on soon."""
        return any(
            place[: len(root)] == root
            for timer, place in self._delays.items()
            if timer._scheduled and not timer.cancelled()
        )

    def writer(self, port: int) -> Place | None:
        """Finds the task that last wrote to the connection with this port, which leads to us."""
        transport = self._writers.get(port)
        if transport is None or transport.is_closing():
            return None
        transport.is_ours = True
        return transport.writer

    @property
    def is_connected(self) -> bool:
        """True where a connection is open that does not lead to us."""
        return not all(t.is_ours or t.is_closing() for t in [*self._writers.values()])

    def call_at(self, when: float, callback: Any, *args: Any, **options: Any) -> Any:
        handle = super().call_at(when, callback, *args, **options)
        if when - self.time() <= DELAY_SECONDS:
            self._delays[handle] = self.place
        return handle

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        future = super().run_in_executor(executor or self._threads, func, *args)
        self._jobs[future] = self.place
        future.add_done_callback(self._jobs.pop)
        return future

    async def create_connection(self, *where: Any, **options: Any) -> Any:
        connection: Any = await super().create_connection(*where, **options)
        transport, protocol = connection
        write, (_, port, *_) = transport.write, transport.get_extra_info("sockname")

        def noted(data: Any) -> None:
            transport.writer = self.place
            write(data)

        transport.write, transport.writer, transport.is_ours = noted, self.place, False
        self._writers[port] = transport
        return transport, protocol


def _report(loop: Any, context: dict[str, Any]) -> None:
    """Reports the error of a task that nobody waits for."""
    error = context.get("exception")
    if error is not None:
        LOGGER.warning("async code failed: %s%s", described(error), place(error))


_LOCK = threading.Lock()
_USERS = list[Background]()


def users() -> Background:
    """Returns the background in which async code of users runs."""
    with _LOCK:
        if not _USERS:
            loop = UsersLoop()
            _USERS.append(Background("async code", loop))
            _USERS[0].run(loop.prepare())
    return _USERS[0]


def users_loop() -> UsersLoop:
    """Returns the event loop of users' async code."""
    return users().loop  # pyright: ignore[reportReturnType]


def finished(value: Any) -> Any:
    """Returns a value that users' code returned; of an async function, what it returns in the
    end."""
    return users().run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value
