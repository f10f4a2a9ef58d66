"""HTTP for callers of any kind: limits of time and size, and refusals in the format of the API."""

from __future__ import annotations

import asyncio
import functools
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from marft_jax.errors import BadInput, RunFailed
from marft_jax.extras.gateway.answers import Choice
from marft_jax.extras.gateway.errors import ApiError, refused
from marft_jax.extras.gateway.paths import DONE, EVENTS, READS, Read, event, refusal, reply_of
from marft_jax.extras.gateway.protocol import Call
from marft_jax.formats import hosts

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
    routes: Sequence[Route],
    count: Callable[[int], object] = lambda status: None,
    names: Sequence[str] = (),
) -> Starlette:
    """Makes an application that reports every error in the format of the API.

    Args:
        count: is given the status of each error.
        names: of hosts that it answers to, beside those of the loopback address.
    """

    async def refuse(request: Request, error: Exception) -> Response:
        reply = Response(**refusal(_of_the_api(error)))
        count(reply.status_code)
        if reply.status_code in (429, 503):
            reply.headers["retry-after"] = "1"
        return reply

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


def _of_the_api(error: Exception) -> Exception:
    """An error of starlette as the API reports it."""
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail)
    return ApiError(499, "the client has left") if isinstance(error, ClientDisconnect) else error


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


def key_of(request: Request) -> bytes:
    """The key that a call comes with, as ``X-API-Key`` or as a bearer token; b"" without one."""
    key = request.headers.get("x-api-key", "")
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    key = key or (token.strip(" \t") if kind.lower() == "bearer" else "")
    return key.encode("latin-1")  # the bytes that were sent


def check_key(request: Request, keys: Sequence[str]) -> None:
    """Refuses a call without one of the keys; without keys every call is admitted."""
    key = key_of(request)
    fits = [hmac.compare_digest(key, known.encode()) for known in keys]
    if keys and not any(fits):
        what = "a key that this server knows, as Authorization: Bearer KEY or X-API-Key: KEY"
        raise ApiError(401, f"expected {what}", code="invalid_api_key")


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


def completion_routes(root: str, complete: Callable[..., Awaitable[Response]]) -> list[Route]:
    """Routes of the paths that answer; each calls ``complete(read, request)``."""
    return [
        Route(f"{root}{path}", functools.partial(complete, read), methods=["POST"])
        for path, read in READS.items()
    ]


async def complete(
    read: Read, request: Request, choices_of: Callable[[Call], Awaitable[Sequence[Choice]]]
) -> Response:
    """Reads a call, and replies to it as a whole."""
    answer = read(await read_body(request))
    choices = await unless_gone(request, choices_of(answer.call))
    return Response(**reply_of(answer, choices))


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
            yield event(refused(error).body)

    return StreamingResponse(events(), headers=EVENTS)
