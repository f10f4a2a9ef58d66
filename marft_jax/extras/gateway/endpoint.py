"""HTTP for programs that are trained: one server of a run, a token for each episode."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import weakref
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from marft_jax.extras.gateway import http
from marft_jax.extras.gateway.channel import Channel
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.paths import READS, Read
from marft_jax.extras.gateway.rounds import IdleSelector

_CLOSE_SECONDS = 10.0


class Endpoint:
    """A server on the loopback address, in a thread of its own."""

    def __init__(self) -> None:
        self._channels: weakref.WeakValueDictionary[bytes, Channel] = weakref.WeakValueDictionary()
        self._settling = list[threading.Event]()
        routes = [
            *(
                Route(f"/{{episode}}/v1{path}", partial(self._complete, read), methods=["POST"])
                for path, read in READS.items()
            ),
            Route("/{episode}/v1/reward", self._reward, methods=["POST"]),
        ]
        limits = http.Limits(grace_seconds=_CLOSE_SECONDS)
        self._server = http.make_server(http.make_app(routes, lambda _: None), limits)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._loop = asyncio.SelectorEventLoop(IdleSelector(self._before_sleep))
        self._thread = threading.Thread(target=self._run, name="endpoint", daemon=True)
        self._thread.start()

    def enter(self, channel: Channel) -> tuple[str, str]:
        """Returns the base URL and the token of an episode; with the token a caller is its
        program."""
        self._channels[channel.token.encode()] = channel
        port = self._listener.getsockname()[1]
        return f"http://127.0.0.1:{port}/{channel.name}/v1", channel.token

    def settle(self) -> None:
        """Waits until the server has read all that was sent, and has written all its answers."""
        idle = threading.Event()
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._settling.append, idle)
            idle.wait(_CLOSE_SECONDS)

    def close(self) -> None:
        """Ends the server."""
        self._server.should_exit = True
        self._thread.join(_CLOSE_SECONDS)
        self._listener.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._server.serve([self._listener]))

    def _before_sleep(self, timeout: float | None) -> float | None:
        while self._settling:
            self._settling.pop().set()
        return timeout

    def _channel_of(self, request: Request) -> Channel:
        # some frameworks set the bearer token themselves
        key = request.headers.get("x-api-key", "").encode("latin-1") or http.bearer(request)
        channel = self._channels.get(key)
        if channel is None or channel.name != request.path_params["episode"]:
            raise ApiError(401, "expected the token of an episode", code="invalid_api_key")
        return channel

    async def _reward(self, request: Request) -> Response:
        """Takes the reward of an episode: a number, or one for each agent by name."""
        channel = self._channel_of(request)
        channel.send(await http.read_body(request))
        return JSONResponse({"reward": channel.sent})

    async def _complete(self, read: Read, request: Request) -> Response:
        channel = self._channel_of(request)
        answer = read(await http.read_body(request))
        call = answer.call
        take, caller = channel.take_http, request.client
        future = take(call, caller.port) if take and caller else channel.take(call)
        choices = await http.unless_gone(request, asyncio.wrap_future(future))
        if call.stream:
            return http.stream(answer.ends(choices))
        return JSONResponse(answer.whole(choices))
