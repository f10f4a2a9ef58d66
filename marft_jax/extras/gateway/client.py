"""OpenAI's own clients, whose calls reach the program's channel without a socket."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import httpx
import openai

from marft_jax.background import Place, UsersLoop
from marft_jax.errors import BadInput
from marft_jax.extras.gateway.answers import Answer, Choice
from marft_jax.extras.gateway.channel import Channel
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.paths import READS, refusal, reply_of

_HERE = "http://program/v1"


class _Transport(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Answers requests as the endpoint does."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        try:
            answer, future = self._take(request)
            return httpx.Response(**reply_of(answer, future.result()))
        except (ApiError, BadInput) as error:
            return httpx.Response(**refusal(error))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        loop = asyncio.get_running_loop()
        try:
            place = loop.place if isinstance(loop, UsersLoop) else None
            answer, future = self._take(request, place)
            return httpx.Response(**reply_of(answer, await asyncio.wrap_future(future)))
        except (ApiError, BadInput) as error:
            return httpx.Response(**refusal(error))

    def _take(
        self, request: httpx.Request, place: Place | None = None
    ) -> tuple[Answer, Future[list[Choice]]]:
        path = request.url.path.removeprefix("/v1")
        if request.method != "POST" or path not in READS:
            raise ApiError(404, f"expected POST {', '.join(READS)}, got {request.method} {path}")
        answer = READS[path](request.content)
        return answer, self.channel.take(answer.call, place)


class _OfProgram:
    """What a program's client has beside OpenAI's.

    Attributes:
        base_url, api_key: of an HTTP endpoint with the same answers, for this episode alone.
    """

    _client: Any
    api_key: Any

    @property
    def base_url(self) -> Any:
        return self._channel.enter(self._channel)

    @property
    def _channel(self) -> Channel:
        return self._client._transport.channel

    def _prepare_url(self, url: str) -> Any:
        return super()._prepare_url(f"{_HERE}{url}")  # pyright: ignore

    def enter(self, name: str, token: str) -> None:
        """Sets the name in the URL and the key of the episode, before they are first read.

        Those of an episode that is over may be used again if none of its callers is left.
        """
        self._channel.name, self._channel.token = name, token
        self.api_key = token


class Client(_OfProgram, openai.OpenAI):
    """Client of a program."""


class AsyncClient(_OfProgram, openai.AsyncOpenAI):
    """Client of an ``async`` program."""


def make_client(channel: Channel) -> Client | AsyncClient:
    """Makes the client of a program; a call is made once, and takes as long as it takes."""
    client, http = (AsyncClient, httpx.AsyncClient) if channel.is_async else (Client, httpx.Client)
    inner: Any = http(transport=_Transport(channel), timeout=None)
    return client(base_url=_HERE, api_key=channel.token, http_client=inner, max_retries=0)
