"""A running program and those who answer its calls, each in their own thread."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import queue
import secrets
import selectors
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from types import SimpleNamespace
from typing import Any, NamedTuple

from marft_jax.errors import BadInput
from marft_jax.gateway.protocol import Answer, ApiError, Call, Choice, Decode, read_call

Play = Callable[[int, Any], Any]
"""A user's program: (task, client) to its reward, or to a mapping from agents to theirs."""

_GUARD_SECONDS = 1.0  # a timer further away guards a call; a nearer one is a delay of the program
_MOST_SECONDS = 5.0  # that a call is held back for others, in programs that are never idle


class Asked(NamedTuple):
    """A call that waits for its choices."""

    call: Call
    future: Future[list[Choice]]


class Channel:
    """Calls of a program, in the order that they come, and then what it returned.

    Attributes:
        returned: its reward, once ``wait`` has given no calls.
        decode: ids to text, as soon as there is someone who answers.
        token: by which a caller over HTTP is known to speak for it.
    """

    def __init__(self) -> None:
        self._news: queue.SimpleQueue[list[Asked] | BaseException | None] = queue.SimpleQueue()
        self._closed, self._lock = False, threading.Lock()
        self._open: list[Asked] = []
        self.returned: Any = None
        self.decode: Decode = _nobody
        self.token = secrets.token_urlsafe()

    def ask(self, calls: Sequence[Call]) -> list[Future[list[Choice]]]:
        """Hands over calls that can be answered together.

        Raises:
            ApiError: the episode is over.
        """
        asked = [Asked(call, Future()) for call in calls]
        for one in asked:
            one.future.set_running_or_notify_cancel()  # from now on nobody can cancel it
        with self._lock:
            if self._closed:
                raise ApiError(410, "the episode is over", code="episode_over")
            self._open += asked
        self._news.put(asked)
        return [one.future for one in asked]

    def wait(self) -> list[Asked]:
        """Waits for calls; none when the program has returned. Raises what it raised."""
        calls, news = list[Asked](), self._news.get()
        while isinstance(news, list):
            calls += news
            if self._news.empty():
                return calls
            news = self._news.get()
        if calls:
            self._news.put(news)  # what comes after them
        elif news is not None:
            raise news
        return calls

    def start(self, play: Play, task: int, client: Any) -> None:
        """Runs the program in a thread of its own; an ``async`` one in an event loop of its own."""
        threading.Thread(
            target=self._run, args=(play, task, client), name="program", daemon=True
        ).start()

    def _run(self, play: Play, task: int, client: Any) -> None:
        try:
            if inspect.iscoroutinefunction(play):
                with asyncio.Runner(loop_factory=client.make_loop) as runner:
                    self.returned = runner.run(play(task, client))
            else:
                self.returned = play(task, client)
            self._news.put(None)
        except BaseException as error:  # sys.exit too: it ends the episode
            self._news.put(error)

    def close(self) -> None:
        """Ends the episode: who waits for an answer is told, and whoever waits for a call."""
        with self._lock:
            self._closed, left = True, self._open
        for asked in left:
            with contextlib.suppress(InvalidStateError):  # it is answered
                asked.future.set_exception(ApiError(410, "the episode is over"))
        self._news.put(BadInput("the episode is over"))


class _WhenIdle(selectors.DefaultSelector):
    """Hands calls over when their event loop has nothing to do but wait for the answers.

    So calls that a program makes side by side are answered together, whatever short delays it has
    in between: which ones these are does not depend on the clock.
    """

    def __init__(self, client: AsyncClient) -> None:
        super().__init__()
        self._client = client

    def select(self, timeout: float | None = None) -> list[Any]:
        idle = timeout is None or timeout > _GUARD_SECONDS
        if idle or self._client.waits_since < time.monotonic() - _MOST_SECONDS:
            self._client.flush()
        return super().select(timeout)


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


class Client:
    """Answers as ``openai.OpenAI`` does: ``client.chat.completions.create(model=..., ...)``.

    Attributes:
        base_url, api_key: of an HTTP endpoint with the same answers, for this episode alone.
    """

    def __init__(self, channel: Channel, enter: Callable[[Channel], tuple[str, str]]):
        self._channel, self._enter = channel, enter
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    @property
    def base_url(self) -> str:
        return self._enter(self._channel)[0]

    @property
    def api_key(self) -> str:
        return self._enter(self._channel)[1]

    def _create(self, **fields: Any) -> Any:
        call = _call(fields)
        [future] = self._channel.ask([call])
        return self._opened(call, future.result())

    def _opened(self, call: Call, choices: Sequence[Choice]) -> Any:
        body = json.dumps(Answer(call, self._channel.decode).whole(choices))
        return json.loads(body, object_hook=lambda fields: SimpleNamespace(**fields))


class AsyncClient(Client):
    """Answers as ``openai.AsyncOpenAI`` does, to ``await``.

    Attributes:
        waits_since: when the first call was made that is not handed over, in monotonic seconds.
    """

    def __init__(self, channel: Channel, enter: Callable[[Channel], tuple[str, str]]):
        super().__init__(channel, enter)
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create_async))
        self._places, self.waits_since = _Places(), float("inf")
        self._pending: list[tuple[tuple[int, ...], Call, asyncio.Future[list[Choice]]]] = []

    def make_loop(self) -> asyncio.AbstractEventLoop:
        """Makes the event loop that its program runs in."""
        loop = asyncio.SelectorEventLoop(_WhenIdle(self))
        loop.set_task_factory(self._places)
        return loop

    async def _create_async(self, **fields: Any) -> Any:
        loop, call = asyncio.get_running_loop(), _call(fields)
        answer = loop.create_future()
        self.waits_since = min(self.waits_since, time.monotonic())
        self._pending.append((self._places.find(loop), call, answer))
        return self._opened(call, await answer)

    def flush(self) -> None:
        """Hands over the calls that were made since the last time, in the order of their tasks."""
        found = sorted(self._pending, key=lambda one: one[0])
        pending = [(call, answer) for _, call, answer in found if not answer.done()]
        self._pending, self.waits_since = [], float("inf")
        if not pending:
            return
        try:
            asked = self._channel.ask([call for call, _ in pending])
        except ApiError as error:
            for _, answer in pending:  # in a way that wakes the loop
                answer.get_loop().call_soon_threadsafe(answer.set_exception, error)
            return
        for (_, answer), future in zip(pending, asked, strict=True):
            future.add_done_callback(_passing(answer))


def _nobody(ids: list[int]) -> str:
    raise BadInput("this environment is a program: expected --team.workflow program")


def _passing(answer: asyncio.Future[list[Choice]]) -> Callable[[Future[list[Choice]]], None]:
    """Passes what comes of a future on to one of another thread's event loop."""

    def settle(future: Future[list[Choice]]) -> None:
        error = future.exception()
        if answer.done():  # it was cancelled meanwhile
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(future.result())

    def passed(future: Future[list[Choice]]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the program is over
            answer.get_loop().call_soon_threadsafe(settle, future)

    return passed


def _call(fields: dict[str, Any]) -> Call:
    try:
        body = json.dumps(fields).encode()
    except (TypeError, ValueError) as error:
        raise ApiError(400, f"expected what JSON can hold: {error}") from None
    call = read_call(body)
    if call.stream:
        raise ApiError(400, "stream: only over HTTP (client.base_url)", "stream")
    return call
