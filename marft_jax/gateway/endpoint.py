"""HTTP for programs that are trained: one server of a run, a token for each episode."""

from __future__ import annotations

import asyncio
import socket
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

from marft_jax.gateway.channel import Channel
from marft_jax.gateway.protocol import Answer, ApiError, read_call

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
        return self._url, channel.token

    def close(self) -> None:
        """Ends the server, if there is one."""
        self._close()

    def _start(self) -> str:
        from starlette.routing import Route

        from marft_jax.gateway import http

        listener = socket.create_server(("127.0.0.1", 0))
        routes = [Route("/v1/chat/completions", self._complete, methods=["POST"])]
        limits = http.DEFAULT._replace(seconds=_CLOSE_SECONDS)
        server = http.make_server(http.make_app(routes, lambda _: None), limits)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()

        def close() -> None:
            server.should_exit = True
            thread.join(_CLOSE_SECONDS)
            listener.close()

        self._close = close
        return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"

    async def _complete(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        from marft_jax.gateway import http

        channel = self._channels.get(http.bearer(request))
        if channel is None:
            raise ApiError(401, "expected the token of an episode", code="invalid_api_key")
        call = read_call(await http.read_body(request))
        [future] = channel.ask([call])
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
