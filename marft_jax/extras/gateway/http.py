"""HTTP for callers of any kind: limits of time and size, and refusals in the format of the API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from marft_jax.errors import BadInput, RunFailed
from marft_jax.extras.gateway.errors import ApiError, refused
from marft_jax.extras.gateway.paths import DONE, EVENTS, Reply, event
from marft_jax.formats import hosts, jsonlines

_T = TypeVar("_T")


class Limits(NamedTuple):
    """What callers may use; beside each limit the status code of a call that wants more."""

    body: int = 1 << 20  # bytes of a call: 413
    choices: int = 1024  # asked and not answered, of all callers together: 429
    read_seconds: float = 20.0  # until the body of a call has come: 408
    seconds: float = 600.0  # until a call is answered: 504
    connections: int = 4096  # open at once: 503
    idle_seconds: int = 20  # between two calls of a connection, which is closed then
    grace_seconds: float = 20.0  # from a signal to the end; a call that is not answered is cut off


DEFAULT = Limits()
_JSON = ("application/json",)


def make_app(
    routes: Sequence[Route], count: Callable[[int], None], names: Sequence[str] = ()
) -> Starlette:
    """Makes an application that reports every error in the format of the API.

    Args:
        count: is given the status of each error.
        names: of hosts that it answers to, beside those of the loopback address.
    """

    async def refuse(request: Request, error: Exception) -> Response:
        refusal = _refusal(error)
        count(refusal.status)
        later = {"retry-after": "1"} if refusal.status in (429, 503) else None
        body = jsonlines.plain(refusal.body)  # what a caller sent may hold lone surrogates
        return JSONResponse(body, refusal.status, later)

    def to_known_hosts(app: ASGIApp) -> ASGIApp:
        async def checked(scope: Scope, receive: Receive, send: Send) -> None:
            request, answer = Request(scope), app
            host, (address, *_) = request.headers.get("host", ""), scope["server"] or [""]
            if not hosts.is_known(host, (*names, address)):
                what = f"expected a Host that is known here, got {host!r:.80}; --allow_host adds it"
                answer = await refuse(request, ApiError(403, what, code="unknown_host"))
            await answer(scope, receive, send)

        return checked

    kinds = (ApiError, HTTPException, ClientDisconnect, BadInput, RunFailed)
    handlers = dict.fromkeys(kinds, refuse)
    return Starlette(
        routes=routes, exception_handlers=handlers, middleware=[Middleware(to_known_hosts)]
    )


def _refusal(error: Exception) -> ApiError:
    """An error as the API reports it."""
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail)
    if isinstance(error, ClientDisconnect):
        return ApiError(499, "the client has left")
    return refused(error)


def make_server(app: Starlette, limits: Limits = DEFAULT) -> uvicorn.Server:
    """Makes a server for an application; when stopped, it first answers the calls it has read."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_level="critical",
            access_log=False,
            limit_concurrency=limits.connections,
            timeout_keep_alive=limits.idle_seconds,
            timeout_graceful_shutdown=max(1, int(limits.grace_seconds)),
        )
    )


def bearer(request: Request) -> bytes:
    """The key that a call comes with."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    own = key.strip(" \t").encode("latin-1")  # the bytes that were sent
    return own if kind.lower() == "bearer" else b""


async def read_body(
    request: Request, limits: Limits = DEFAULT, kinds: Sequence[str] = _JSON
) -> bytes:
    """Reads a call of one of these content types, within its time and size."""
    check_kind(request, kinds)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.read_seconds):
            async for part in request.stream():
                body += part
                if len(body) > limits.body:
                    raise ApiError(413, f"expected at most {limits.body} bytes")
    except TimeoutError:
        raise ApiError(408, "the body did not come in time") from None
    return bytes(body)


def check_kind(request: Request, kinds: Sequence[str] = _JSON) -> None:
    """Refuses what a browser would send for any page that asks it to."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in kinds:
        raise ApiError(415, f"expected Content-Type: {' or '.join(kinds)}, got {kind!r:.60}")


async def unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """Awaits the work; raises ``ClientDisconnect`` once the client has left."""
    task, gone = asyncio.ensure_future(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def respond(reply: Reply) -> Response:
    """A whole reply."""
    return Response(reply.body, reply.status, media_type=reply.kind)


def stream(first: dict[str, Any], later: AsyncIterator[dict[str, Any]]) -> Response:
    """Server-sent events of bodies; an error is the last."""

    async def events() -> AsyncIterator[str]:
        body = first
        yield event(body)
        try:
            async for body in later:
                yield event(body)
            if "type" not in body:
                yield DONE
        except (ApiError, BadInput, RunFailed) as error:
            yield event(_refusal(error).body)

    return StreamingResponse(events(), media_type=EVENTS)
