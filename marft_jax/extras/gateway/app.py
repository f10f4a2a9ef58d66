"""The endpoint of a trained team: each handler reads, checks, calls one verb, answers."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from marft_jax.extras.gateway import http
from marft_jax.extras.gateway.answers import Answer, Choice, usage
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.paths import Read, reply_of
from marft_jax.extras.gateway.protocol import Call
from marft_jax.extras.gateway.served_team import ServedTeam, Watch
from marft_jax.sampling.batcher import Batcher

_BUCKETS = ("0.1", "0.3", "1", "3", "10", "30", "100", "+Inf")


class Metrics:
    """Counters in the text format of Prometheus."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}

    def add(self, name: str, value: float = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + value

    def count(self, status: int) -> None:
        self.add(f'marft_calls_total{{status="{status}"}}')

    def answered(self, tokens: Mapping[str, int], seconds: float) -> None:
        self.count(200)
        for edge in _BUCKETS:
            self.add(f'marft_call_seconds_bucket{{le="{edge}"}}', seconds <= float(edge))
        self.add("marft_call_seconds_sum", seconds)
        self.add("marft_call_seconds_count")
        for kind in ("prompt", "completion"):
            self.add(f'marft_tokens_total{{kind="{kind}"}}', tokens[f"{kind}_tokens"])

    def text(self, **gauges: float) -> str:
        rows = self._counts | {f"marft_{name}": value for name, value in gauges.items()}
        return "".join(f"{name} {value}\n" for name, value in rows.items())


def make_app(
    team: ServedTeam,
    batcher: Batcher,
    reload: Callable[[], Awaitable[int]],
    keys: Sequence[str] = (),
    limits: http.Limits = http.DEFAULT,
    names: Sequence[str] = (),
) -> Starlette:
    """Makes the application.

    Args:
        reload: loads the newest checkpoint and returns its step.
        keys: a call must send one of them; without keys every call is admitted.
        names: of hosts that it answers to, beside those of the loopback address.
    """
    gate = _Gate(team, batcher, reload, keys, limits)
    routes = [
        *http.completion_routes("/v1", gate.complete),
        Route("/v1/models", gate.models),
        Route("/v1/models/{name:path}", gate.models),
        Route("/health", gate.health),
        Route("/metrics", gate.show_metrics),
        Route("/reload", gate.reload, methods=["POST"]),
    ]
    return http.make_app(routes, gate.metrics.count, names)


@dataclasses.dataclass
class _Gate:
    """Handlers; ``choices`` counts what is asked and not answered."""

    team: ServedTeam
    batcher: Batcher
    load: Callable[[], Awaitable[int]]
    keys: Sequence[str]
    limits: http.Limits
    choices: int = 0
    metrics: Metrics = dataclasses.field(default_factory=Metrics)
    loading: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)

    async def complete(self, read: Read, request: Request) -> Response:
        http.check_key(request, self.keys)
        answer = read(await http.read_body(request, self.limits))
        call = answer.call
        if self.choices + call.choices > self.limits.choices:
            raise ApiError(429, "too many calls wait; try again later", code="queue_full")
        if not call.stream:
            choices = await http.unless_gone(request, self._answer(call))
            return Response(**reply_of(answer, choices))
        pieces = self._pieces(answer)
        first = await http.unless_gone(request, anext(pieces))  # an error keeps its own status
        return http.stream(first, pieces)

    async def _answer(self, call: Call, watch: Watch | None = None) -> list[Choice]:
        """Answers within the time limit, and counts the choices that are not answered yet."""
        began = time.monotonic()
        self.choices += call.choices
        try:
            async with asyncio.timeout(self.limits.seconds):
                choices = await self.team.answer(call, watch)
        except TimeoutError:
            what = f"no answer within {self.limits.seconds:g} s"
            raise ApiError(504, what, code="timeout") from None
        finally:
            self.choices -= call.choices
        self.metrics.answered(usage(choices, call.n), time.monotonic() - began)
        return choices

    async def _pieces(self, answer: Answer) -> AsyncIterator[dict[str, Any]]:
        """Chunks: text while it is sampled, everything else at the end."""
        call = answer.call
        loop, news = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def watch(*new: Any) -> None:
            loop.call_soon_threadsafe(news.put_nowait, new)

        task = asyncio.create_task(self._answer(call, watch))
        task.add_done_callback(lambda _: news.put_nowait(None))
        try:
            while (new := await news.get()) is not None:
                number, prompt, ids = new
                for piece in answer.more(number, self.team.settled(call, prompt, ids)):
                    yield piece
            for piece in answer.ends(await task):
                yield piece
        finally:
            task.cancel()

    async def models(self, request: Request) -> Response:
        http.check_key(request, self.keys)
        facts = {"object": "model", "created": 0, "owned_by": "marft_jax"}
        data = {name: {"id": name} | facts for name in self.team.models}
        if (name := request.path_params.get("name")) is None:
            return JSONResponse({"object": "list", "data": [*data.values()]})
        return JSONResponse(data[self.team.find(name)])

    async def health(self, request: Request) -> Response:
        alive = self.batcher.alive
        return JSONResponse({"status": "ok" if alive else "failed"}, 200 if alive else 503)

    async def show_metrics(self, request: Request) -> Response:
        http.check_key(request, self.keys)
        waiting = self.batcher.unanswered
        text = self.metrics.text(choices_open=self.choices, requests_unanswered=waiting)
        return PlainTextResponse(text)

    async def reload(self, request: Request) -> Response:
        http.check_key(request, self.keys)
        http.check_kind(request)
        async with self.loading:
            return JSONResponse({"loaded": await self.load()})
