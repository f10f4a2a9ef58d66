"""HTTP for programs that are trained: one server of a run, a token for each episode."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from marft_jax.extras.gateway.channel import Channel
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.protocol import Answer, read_call
from marft_jax.extras.gateway.rounds import IdleSelector

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_CLOSE_SECONDS = 10.0


class Endpoint:
    """A server on the loopback address; it starts when the first program asks for it."""

    def __init__(self) -> None:
        self._channels: weakref.WeakValueDictionary[bytes, Channel] = weakref.WeakValueDictionary()
        self._lock, self._url = threading.Lock(), ""
        self._settling = list[threading.Event]()
        self._close: Callable[[], None] = lambda: None

    def enter(self, channel: Channel) -> tuple[str, str]:
        """Returns the base URL and the token of an episode; with the token a caller is its
        program."""
        with self._lock:
            self._url = self._url or self._start()
            self._channels[channel.token.encode()] = channel
        return f"{self._url}/{channel.name}/v1", channel.token

    def settle(self) -> None:
        """Waits until the server has read all that was sent, and has written all its answers."""
        idle = threading.Event()
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._settling.append, idle)
            idle.wait(_CLOSE_SECONDS)

    def close(self) -> None:
        """Ends the server, if there is one."""
        self._close()

    def _before_sleep(self, timeout: float | None) -> float | None:
        while self._settling:
            self._settling.pop().set()
        return timeout

    def _start(self) -> str:
        from starlette.routing import Route

        from marft_jax.extras.gateway import http

        listener = socket.create_server(("127.0.0.1", 0))
        routes = [
            Route("/{episode}/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/{episode}/v1/reward", self._reward, methods=["POST"]),
        ]
        limits = http.Limits(grace_seconds=_CLOSE_SECONDS)
        server = http.make_server(http.make_app(routes, lambda _: None), limits)

        self._loop = loop = asyncio.SelectorEventLoop(IdleSelector(self._before_sleep))

        def run() -> None:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(server.serve([listener]))

        thread = threading.Thread(target=run, name="endpoint", daemon=True)
        thread.start()

        def close() -> None:
            server.should_exit = True
            thread.join(_CLOSE_SECONDS)
            listener.close()

        self._close = close
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    def _channel_of(self, request: Request) -> Channel:
        from marft_jax.extras.gateway import http

        channel = self._channels.get(http.bearer(request))
        if channel is None or channel.name != request.path_params["episode"]:
            raise ApiError(401, "expected the token of an episode", code="invalid_api_key")
        return channel

    async def _reward(self, request: Request) -> Response:
        """Takes the reward of an episode: a number, or one for each agent by name."""
        from marft_jax.extras.gateway import http

        channel = self._channel_of(request)
        channel.send(await http.read_body(request))
        return http.JSONResponse({"reward": channel.sent})

    async def _complete(self, request: Request) -> Response:
        from marft_jax.extras.gateway import http

        channel = self._channel_of(request)
        call = read_call(await http.read_body(request))
        take, caller = channel.take_http, request.client
        future = take(call, caller.port) if take and caller else channel.take(call)
        choices = await http.unless_gone(request, asyncio.wrap_future(future))
        assert channel.decode is not None
        answer = Answer(call, channel.decode)

        async def pieces() -> AsyncIterator[dict[str, Any]]:
            for number, choice in enumerate(choices):
                yield answer.piece(number, choice.text, choice)
            if call.usage:
                yield answer.total(choices)

        return http.Events(pieces()) if call.stream else http.JSONResponse(answer.whole(choices))
