"""A running program and those who answer its calls, each in their own thread."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

from marft_jax.errors import BadInput
from marft_jax.extras.gateway.answers import Answer, Choice
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.protocol import Call, read_call
from marft_jax.formats import foreign
from marft_jax.plugins import shown

Play = Callable[[int, Any], Any]
"""A user's program: (task, client) to its reward, or to a mapping from agents to their rewards."""


class Asked(NamedTuple):
    """A call that waits for its choices."""

    call: Call
    future: Future[list[Choice]]


class Channel:
    """Calls of a program, in the order that they come, and then what it returned.

    Attributes:
        returned: its reward, once ``wait`` has given no calls.
        sent: its reward where it was sent over HTTP.
        take_http: takes a call over HTTP and the caller's port, where calls are answered in rounds.
        answered: a workflow answers the calls.
        name, token: the episode's name in the URL, by which frameworks keep connections, and the
            key that a caller must send with it.
    """

    def __init__(self) -> None:
        self._news: queue.SimpleQueue[list[Asked] | BaseException | None] = queue.SimpleQueue()
        self._closed, self._lock = False, threading.Lock()
        self._open: list[Asked] = []
        self.returned: Any = None
        self.sent: Any = None
        self.take_http: Callable[[Call, int], Future[list[Choice]]] | None = None
        self.answered = False
        self.name, self.token = secrets.token_hex(8), secrets.token_urlsafe()

    def take(self, call: Call) -> Future[list[Choice]]:
        """Hands over a call by itself."""
        asked = Asked(call, Future())
        self.ask([asked])
        return asked.future

    def ask(self, asked: Sequence[Asked]) -> None:
        """Hands over calls that are answered together; a call that was cancelled is left out.
        After the episode each gets an ``ApiError``."""
        begun = [one for one in asked if one.future.set_running_or_notify_cancel()]
        with self._lock:
            is_open = not self._closed
            self._open += begun
        if begun and is_open:
            self._news.put(begun)
        elif begun:
            self.close()

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

    def send(self, body: bytes) -> None:
        """Takes the reward of an episode, JSON; the last one counts.

        Raises:
            ApiError: it is neither a number nor a number for each agent.
        """
        try:
            reward = foreign.loads(body.decode())
        except ValueError as error:
            raise ApiError(400, f"expected JSON: {error}"[:200]) from None
        parts = [*reward.values()] if isinstance(reward, dict) else [reward]
        if not parts or any(type(part) not in (int, float) for part in parts):
            what = "expected a number, or an object of agents and their numbers"
            raise ApiError(400, f"reward: {what}, got {shown(reward)}", "reward")
        if self._closed:
            raise _over()
        self.sent = reward

    def start(self, play: Play, task: int, client: Client) -> None:
        """Runs the program in a thread of its own; an ``async`` one in an event loop of its own."""
        threading.Thread(
            target=self._run, args=(play, task, client), name="program", daemon=True
        ).start()

    def _run(self, play: Play, task: int, client: Client) -> None:
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
        """Ends the episode: all that wait for an answer or for a call get an error."""
        with self._lock:
            self._closed, left = True, self._open
        for asked in left:
            with contextlib.suppress(InvalidStateError):  # it is answered
                asked.future.set_exception(_over())
        self._news.put(BadInput("the episode is over"))


def _over() -> ApiError:
    return ApiError(410, "the episode is over", code="episode_over")


class Entrance(Protocol):
    """The HTTP endpoint, as a client needs it."""

    def enter(self, channel: Channel) -> tuple[str, str]:
        """Returns the URL and the key under which HTTP reaches the channel."""
        ...

    def settle(self) -> None:
        """Waits until the server has read all that was sent, and has written all its answers."""
        ...


class Client:
    """Answers as ``openai.OpenAI`` does: ``client.chat.completions.create(model=..., ...)``.

    Args:
        endpoint: starts the endpoint, unless it runs, and returns it.

    Attributes:
        base_url, api_key: of an HTTP endpoint with the same answers, for this episode alone.
    """

    def __init__(self, channel: Channel, endpoint: Callable[[], Entrance]):
        self._channel, self._endpoint = channel, endpoint
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    def make_loop(self) -> asyncio.AbstractEventLoop:
        """Makes the event loop that an ``async`` program runs in."""
        return asyncio.new_event_loop()

    def enter(self, name: str, token: str) -> None:
        """Sets the name in the URL and the key of the episode, before they are first read.

        Those of an episode that is over may be used again if none of its callers is left.
        """
        self._channel.name, self._channel.token = name, token

    @property
    def base_url(self) -> str:
        return self._entered[0]

    @property
    def api_key(self) -> str:
        return self._entered[1]

    @functools.cached_property
    def _entered(self) -> tuple[str, str]:
        return self._endpoint().enter(self._channel)

    def _create(self, **fields: Any) -> Any:
        call = read_fields(fields)
        return self._opened(call, self._channel.take(call).result())

    def _opened(self, call: Call, choices: Sequence[Choice]) -> Any:
        body = json.dumps(Answer(call).whole(choices))
        return json.loads(body, object_hook=lambda fields: SimpleNamespace(**fields))


def read_fields(fields: dict[str, Any]) -> Call:
    """Reads a call without HTTP."""
    try:
        body = json.dumps(fields).encode()
    except (TypeError, ValueError) as error:
        raise ApiError(400, f"expected what JSON can hold: {error}") from None
    call = read_call(body)
    if call.stream:
        raise ApiError(400, "stream: only over HTTP (client.base_url)", "stream")
    return call
