"""HTTP for programs that are trained: one server of a run, a token for each episode."""

from __future__ import annotations

import asyncio
import socket
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

from marft_jax.extras.gateway.channel import Channel
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.protocol import Answer, read_call

_CLOSE_SECONDS = 10.0


class Endpoint:
    """A server at the loopback address, from the first program on that wants one."""

    def __init__(self) -> None:
        self._channels: weakref.WeakValueDictionary[bytes, Channel] = weakref.WeakValueDictionary()
        self._lock, self._url = threading.Lock(), ""
        self._close: Callable[[], None] = lambda: None

    def enter(self, channel: Channel) -> tuple[str, str]:
        """The base URL, and the token of an episode: whoever has it speaks for its program."""
        with self._lock:
            self._url = self._url or self._start()
            self._channels[channel.token.encode()] = channel
        return f"{self._url}/{channel.name}/v1", channel.token

    def settle(self) -> None:
        """Waits until all that has come is read, and all that is answered is written."""
        self._idle.wait(_CLOSE_SECONDS)

    def close(self) -> None:
        """Ends the server, if there is one."""
        self._close()

    def _start(self) -> str:
        from starlette.routing import Route

        from marft_jax.extras.gateway import http

        listener = socket.create_server(("127.0.0.1", 0))
        routes = [
            Route("/{episode}/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/{episode}/v1/reward", self._reward, methods=["POST"]),
        ]
        limits = http.DEFAULT._replace(grace_seconds=_CLOSE_SECONDS)
        server = http.make_server(http.make_app(routes, lambda _: None), limits)
        self._idle = http.Idle()

        def run() -> None:
            with asyncio.Runner(loop_factory=self._idle.make_loop) as runner:
                runner.run(server.serve([listener]))

        thread = threading.Thread(target=run, name="endpoint", daemon=True)
        thread.start()

        def close() -> None:
            server.should_exit = True
            thread.join(_CLOSE_SECONDS)
            listener.close()

        self._close = close
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    def _channel_of(self, request: Any) -> Channel:
        from marft_jax.extras.gateway import http

        channel = self._channels.get(http.bearer(request))
        if channel is None or channel.name != request.path_params["episode"]:
            raise ApiError(401, "expected the token of an episode", code="invalid_api_key")
        http.admit(request)
        return channel

    async def _reward(self, request: Any) -> Any:
        """Takes the reward of an episode: a number, or one for each agent by name."""
        from starlette.responses import JSONResponse

        from marft_jax.extras.gateway import http

        channel = self._channel_of(request)
        channel.send(await http.read_body(request))
        return JSONResponse({"reward": channel.sent})

    async def _complete(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        from marft_jax.extras.gateway import http

        channel = self._channel_of(request)
        call = read_call(await http.read_body(request))
        hold, port = channel.hold, request.client.port
        future = hold(call, port) if hold else channel.ask([call])[0]
        choices = await http.unless_gone(request, asyncio.wrap_future(future))
        answer = Answer(call, channel.decode)

        async def pieces() -> AsyncIterator[dict[str, Any]]:
            for number, choice in enumerate(choices):
                yield answer.piece(number, choice.text, choice)
            if call.usage:
                yield answer.total(choices)

        if call.stream:
            return http.Events(pieces(), http.DEFAULT.seconds)
        return JSONResponse(answer.whole(choices))
