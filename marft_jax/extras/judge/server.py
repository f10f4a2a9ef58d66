"""A judge behind an address, asked with OpenAI's client."""

from __future__ import annotations

import asyncio
import os
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai

from marft_jax.background import finished
from marft_jax.errors import described, one_line
from marft_jax.formats.hosts import transport_to

_RETRIES = 6  # of a judge that is busy or away, within its time limit


Answer = tuple[str, str | None, int]
"""Text of an answer, why it ended, and its tokens."""


class JudgeServer:
    """A model at an address.

    A redirect is an error, so that the key goes to no other address.

    Args:
        url: address, with or without ``/v1``.
        model: its name there.
        seconds: time limit of an answer, with all that it takes to get one.

    Raises:
        BadInput: a variable of the environment names no proxy, or no certificates.
    """

    def __init__(self, url: str, model: str, seconds: float) -> None:
        self._url = url.rstrip("/").removesuffix("/chat/completions")
        self._model, self._seconds = model, seconds
        self._sampling: dict[str, Any] = {"temperature": 0}
        http: Any = httpx.AsyncClient(transport=transport_to(url), timeout=None)
        self._client = openai.AsyncOpenAI(
            base_url=self._url if urlsplit(self._url).path else f"{self._url}/v1",
            api_key=os.environ.get("OPENAI_API_KEY", "").strip() or "none",
            http_client=http,
            timeout=None,
            max_retries=_RETRIES,
        )

    def ask(self, content: str) -> Answer:
        """Asks a question; raises where there is no answer."""
        return finished(self._ask(content))

    async def _ask(self, content: str) -> Answer:
        try:
            async with asyncio.timeout(self._seconds):
                return _read(await self._create(content))
        except TimeoutError:
            why = f"no answer within {self._seconds:g} s (--env.url_seconds)"
        except openai.APIConnectionError as error:  # whose own text has no reason
            why = described(error.__cause__ or error)
        except (openai.OpenAIError, ValueError) as error:
            why = str(error)
        raise ConnectionError(f"--env.url {self._url}: {why}")

    async def _create(self, content: str) -> Any:
        """Asks at temperature 0; models that take no temperature are asked without it from then
        on."""
        asked: Any = {"model": self._model, "messages": [{"role": "user", "content": content}]}
        create = self._client.chat.completions.create
        try:
            return await create(**asked, **self._sampling)
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            if not self._sampling:
                raise
            try:
                reply = await create(**asked)
            except openai.APIStatusError:
                raise error from None
            self._sampling = {}
            return reply

    def close(self) -> None:
        finished(self._client.close())


def _read(reply: Any) -> Answer:
    """Reads an answer; of one in parts, such as thoughts, the texts."""
    try:
        [choice, *_] = reply.choices
        content, usage = choice.message.content, reply.usage
        if isinstance(content, list):
            parts = [part for part in content if isinstance(part, dict)]
            texts = [part for part in parts if part.get("type") in ("text", "output_text")]
            content = "".join(str(part.get("text")) for part in texts)
        return str(content or ""), choice.finish_reason, usage and usage.total_tokens or 0
    except (AttributeError, TypeError, ValueError):
        words = one_line(str(getattr(reply, "error", None) or reply), 200)
        raise ValueError(f"expected a chat completion, got {words}") from None
