"""HTTP for programs that are trained: one server of a run, a token for each episode."""

from __future__ import annotations

import asyncio
import weakref
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from marft_jax.background import users, users_loop
from marft_jax.extras.gateway import http
from marft_jax.extras.gateway.channel import Channel
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.paths import READS, Read, reply_of
from marft_jax.formats.hosts import listen

_CLOSE_SECONDS = 10.0


class Endpoint:
    """A server on the loopback address, on the event loop of users' code: when this loop is idle,
    all that its tasks sent has been read."""

    def __init__(self) -> None:
        self._channels: weakref.WeakValueDictionary[bytes, Channel] = weakref.WeakValueDictionary()
        routes = [
            *(
                Route(f"/{{episode}}/v1{path}", partial(self._complete, read), methods=["POST"])
                for path, read in READS.items()
            ),
            Route("/{episode}/v1/reward", self._reward, methods=["POST"]),
        ]
        limits = http.Limits(grace_seconds=_CLOSE_SECONDS)
        self._server = http.make_server(http.make_app(routes, lambda _: None), limits)
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
        place = users_loop().writer(request.client.port) if request.client else None
        future = channel.take(answer.call, place)
        choices = await http.unless_gone(request, asyncio.wrap_future(future))
        return http.respond(reply_of(answer, choices))
