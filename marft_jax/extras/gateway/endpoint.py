"""HTTP for programs that are trained: one server of a run, a token for each episode."""

from __future__ import annotations

import asyncio
import weakref

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from marft_jax.background import users, users_loop
from marft_jax.extras.gateway import http
from marft_jax.extras.gateway.answers import Choice
from marft_jax.extras.gateway.channel import Channel
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.paths import Read
from marft_jax.extras.gateway.protocol import Call
from marft_jax.formats.hosts import listen

_CLOSE_SECONDS = 10.0


class Endpoint:
    """A server on the loopback address, on the event loop of users' code: when this loop is idle,
    all that its tasks sent has been read."""

    def __init__(self) -> None:
        self._channels: weakref.WeakValueDictionary[bytes, Channel] = weakref.WeakValueDictionary()
        routes = [
            *http.completion_routes("/{episode}/v1", self._complete),
            Route("/{episode}/v1/reward", self._reward, methods=["POST"]),
        ]
        limits = http.Limits(grace_seconds=_CLOSE_SECONDS)
        self._server = http.make_server(http.make_app(routes), limits)
        self._listener = listen("127.0.0.1", 0)
        self._served = users().start(self._server.serve([self._listener]))

    def enter(self, channel: Channel) -> str:
        """Returns the base URL of an episode; with the channel's token a caller is its program."""
        self._channels[channel.token.encode()] = channel
        port = self._listener.getsockname()[1]
        return f"http://127.0.0.1:{port}/{channel.name}/v1"

    def close(self) -> None:
        """Ends the server."""
        self._server.should_exit = True
        self._served.result(_CLOSE_SECONDS)
        self._listener.close()

    def _channel_of(self, request: Request) -> Channel:
        channel = self._channels.get(http.key_of(request))
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

        def choices_of(call: Call) -> asyncio.Future[list[Choice]]:
            place = users_loop().writer(request.client.port) if request.client else None
            return asyncio.wrap_future(channel.take(call, place))

        return await http.complete(read, request, choices_of)
