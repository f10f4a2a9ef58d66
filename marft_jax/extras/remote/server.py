"""A server of vLLM or SGLang: asked, given adapters, and told apart by its routes."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Literal

import httpx
import numpy as np

from marft_jax.errors import BadInput, one_line
from marft_jax.extras.remote.dialects import DIALECTS, STACKED, Ask
from marft_jax.formats.hosts import transport_to
from marft_jax.sampling import Completion
from marft_jax.sampling.settings import SampledBase
from marft_jax.sampling.stops import stopped_at

_CONNECT_SECONDS, _LOAD_SECONDS = 10.0, 300.0
_KEPT_SECONDS = 2.0  # for which a connection stays open; servers close theirs after 5


class NoAnswer(Exception):
    """There is nothing to learn from.

    Attributes:
        kind: busy: another server may answer, or this one later. gone: nothing listens there.
            unknown: it has no adapter of that name. wrong: its answer is none.
    """

    def __init__(self, kind: Literal["busy", "gone", "unknown", "wrong"], why: str) -> None:
        super().__init__(why)
        self.kind = kind


class Server:
    """A server; its methods run in one event loop.

    Attributes:
        dialect, model, context: its kind, the name of its base, and its longest prompt and action.
        base: the base of the team that it serves; "" until that is measured.
        spelling: of adapters that it reads.
        precision: σ of its log-probs, see ``proof``.
        busy: number of requests that it has.
        down: it is left alone until the next adapters, if others are there.
        loads, lock: how often adapters were loaded, and for who has them loaded again.
    """

    def __init__(self, url: str, seconds: float) -> None:
        self.url, self.dialect, self.busy, self.down = url.rstrip("/"), DIALECTS[0], 0, False
        self.model, self.context, self.base, self.precision = "", 0, "", 0.0
        self.spelling, self.loads, self.lock = STACKED, 0, asyncio.Lock()
        key = os.environ.get("SAMPLER_API_KEY", "").strip()
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(seconds, connect=_CONNECT_SECONDS, pool=None),
            transport=transport_to(url, limits=httpx.Limits(keepalive_expiry=_KEPT_SECONDS)),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    async def connect(self) -> list[str]:
        """Finds out what the server is; returns the names of the adapters that it holds.

        Raises:
            BadInput: it does not answer, or is of no kind that is known.
        """
        try:
            routes = [(d, await self._client.get(self.url + d.known_by)) for d in DIALECTS]
            listed = (await self._client.get(f"{self.url}/v1/models")).json()["data"]
            self.dialect = next(dialect for dialect, answer in routes if answer.is_success)
            base = next(model for model in listed if not model.get("parent"))
            self.model, self.context = str(base["id"]), int(base.get("max_model_len") or 0)
            return [str(model["id"]) for model in listed if model.get("parent")]
        except Exception as error:
            got = one_line(repr(error), 100)
            why = f"expected a server of SGLang or vLLM, got {got}; start it, or leave it out"
            raise BadInput(f"--rollout.urls {self.url}: {why}") from error

    async def ask(self, ask: Ask, base: SampledBase) -> Completion:
        """Has an action sampled; raises ``NoAnswer``."""
        self.busy += 1
        try:
            answer = await self._post(self.dialect.generate, self.dialect.body(ask))
        finally:
            self.busy -= 1
        told = f"status {answer.status_code}: {one_line(answer.text, 200)}"
        if answer.status_code == 429 or answer.status_code >= 500:
            raise NoAnswer("busy", told)
        if ask.is_adapter and answer.status_code in (400, 404) and ask.model in answer.text:
            raise NoAnswer("unknown", "it does not have the adapter")
        if not answer.is_success:
            raise NoAnswer("wrong", told)
        try:
            ids, logprobs = self.dialect.read(answer.json())
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise NoAnswer("wrong", "expected ids with log-probs, got an answer without") from error
        return completion_of(ids, logprobs, ask, base)

    async def load(self, name: str, folder: str) -> str:
        """Loads an adapter; returns why it could not, or ""."""
        path = f"{folder}/{self.spelling}".rstrip("/")
        return await self._adapt("load", {"lora_name": name, "lora_path": path})

    async def unload(self, name: str) -> str:
        """Has an adapter forgotten; returns why it could not, or ""."""
        return await self._adapt("unload", {"lora_name": name})

    async def _adapt(self, verb: str, body: dict[str, Any]) -> str:
        route = f"{self.dialect.adapters}/{verb}_lora_adapter"
        try:
            answer = await self._post(route, body, timeout=_LOAD_SECONDS)
        except NoAnswer as error:
            return str(error)
        told = f"status {answer.status_code}: {one_line(answer.text, 300)}"
        return "" if answer.is_success else told

    async def _post(self, route: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        try:
            return await self._client.post(self.url + route, json=body, **options)
        except httpx.HTTPError as error:
            gone = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise NoAnswer("gone" if gone else "busy", one_line(repr(error), 100)) from error


def completion_of(ids: Any, logprobs: Any, ask: Ask, base: SampledBase) -> Completion:
    """Checks what a server sampled, and ends it where the action ends; raises ``NoAnswer``."""
    most, ids, logprobs = ask.sampling.max_new_tokens, [*(ids or ())], [*(logprobs or ())]
    n, known = len(ids), all(type(i) is int and 0 <= i < base.vocabulary for i in ids)
    if not 0 < n <= most or not known:
        wanted = f"expected 1 to {most} ids below {base.vocabulary}"
        raise NoAnswer("wrong", f"{wanted}, got {n}: {ids[:8]}")
    numbers = [x if isinstance(x, float | int) else np.nan for x in logprobs]
    if n != len(numbers) or not np.isfinite(numbers).all():
        wanted = f"expected a finite log-prob for each of {n} ids"
        raise NoAnswer("wrong", f"{wanted}, got {len(numbers)}: {logprobs[:8]}")
    end = stopped_at(ids, ask.sampling.stop, base.decode) if ask.sampling.stop else None
    ended = [place for place, i in enumerate(ids) if i in ask.ends]
    if end is None and (ended != [n - 1] if ended else n < most):
        wanted = f"expected {most} ids, or ids up to an end"
        raise NoAnswer("wrong", f"{wanted}, got {n}: {ids[-8:]}")
    reason = "stop" if end is not None else "end" if ended else "length"
    return Completion(
        np.asarray(ids[:end], np.int32), np.asarray(numbers[:end], np.float32), reason
    )
