"""HTTP that any caller may reach: within its time and size, and refused in the API's format."""

from __future__ import annotations

import asyncio
import contextlib
import math
import selectors
import socket
import struct
import threading
from collections import deque
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
from uvicorn.protocols.http.h11_impl import H11Protocol

from marft_jax.errors import BadInput, RunFailed, one_line
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.formats import hosts, jsonlines

_T = TypeVar("_T")


class Limits(NamedTuple):
    """What callers may use; who wants more gets the status code beside it."""

    body: int = 1 << 20  # bytes of a call: 413
    choices: int = 1024  # asked and not answered, of all callers together: 429
    read_seconds: float = 20.0  # until a call's head has come, then its body: closed, 408
    # and within which a client reads some of what waits for it: closed
    seconds: float = 600.0  # until a call is answered: 504
    connections: int = 4096  # open at once: 503
    strangers: int = 512  # of them before a call with a key; more have a second for it: closed
    grace_seconds: float = 20.0  # from a signal to the end: what is not answered is broken off


DEFAULT = Limits()


def make_app(
    routes: Sequence[Route], count: Callable[[int], None], names: Sequence[str] = ()
) -> Starlette:
    """An application that spells every fault as the API does.

    Args:
        count: gets the status of each.
        names: of hosts that it answers to, beside those of the loopback address.
    """

    async def refuse(request: Request, error: Exception) -> Response:
        status, later = 500, None
        if isinstance(error, HTTPException):
            error = ApiError(error.status_code, error.detail)
        elif isinstance(error, ClientDisconnect):
            error = ApiError(499, "the client has left")
        elif not isinstance(error, ApiError):
            error = ApiError(400 if isinstance(error, BadInput) else 503, one_line(str(error)))
        status = error.status
        count(status)
        later = {"retry-after": "1"} if status in (429, 503) else None
        body = jsonlines.plain(error.body)  # what a caller sent may hold lone surrogates
        return JSONResponse(body, status, later)

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


def make_server(app: Starlette, limits: Limits = DEFAULT) -> uvicorn.Server:
    """A server for an application, that ends what is begun when it is stopped."""
    settings = uvicorn.Config(
        app,
        http=_impatient(limits),
        ws="none",
        lifespan="off",
        log_level="critical",
        access_log=False,
        limit_concurrency=limits.connections,
        timeout_graceful_shutdown=max(1, int(limits.grace_seconds)),
    )
    return uvicorn.Server(settings)


def bearer(request: Request) -> bytes:
    """The key that a call comes with."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    own = key.strip(" \t").encode("latin-1")  # the bytes that were sent
    return own if kind.lower() == "bearer" else b""


def admit(request: Request) -> None:
    """Lets a connection stay: its caller may call."""
    request.state.admit()


async def read_body(request: Request, limits: Limits = DEFAULT) -> bytes:
    """Reads a call, within its time and size."""
    check_json(request)
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


def check_json(request: Request) -> None:
    """Refuses what a browser would send for any page that asks it to."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"expected Content-Type: application/json, got {kind!r:.60}")


async def unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """Does the work unless the client leaves; raises ``ClientDisconnect`` then."""
    task, gone = asyncio.ensure_future(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


class Idle:
    """Makes an event loop, and tells other threads when it has nothing to do."""

    def __init__(self) -> None:
        self._asked = deque[threading.Event]()
        self._loop: asyncio.AbstractEventLoop | None = None

    def make_loop(self) -> asyncio.AbstractEventLoop:
        asked = self._asked

        class Watched(selectors.DefaultSelector):
            def select(self, timeout: float | None = None) -> list[Any]:
                known = len(asked)  # those who ask later may have sent something since
                events = super().select(0)
                if events or timeout == 0:
                    return events
                for _ in range(known):
                    asked.popleft().set()
                return super().select(timeout)

        self._loop = asyncio.SelectorEventLoop(Watched())
        return self._loop

    def wait(self, seconds: float) -> None:
        """Waits until it is idle, at most so long."""
        assert self._loop is not None
        idle = threading.Event()
        self._asked.append(idle)
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(lambda: None)
            idle.wait(seconds)


async def _left(request: Request) -> None:
    receive: Callable[[], Awaitable[Any]] = request.receive
    while (await receive())["type"] != "http.disconnect":
        pass


class Events(StreamingResponse):
    """Server-sent events, which break off when their time is over, however slowly they are read."""

    def __init__(self, bodies: AsyncIterator[dict[str, Any]], seconds: float) -> None:
        super().__init__(_events(bodies), media_type="text/event-stream")
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await super().__call__(scope, receive, send)
        except (TimeoutError, ApiError):
            pass  # its beginning is sent: it can only break off


async def _events(bodies: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    async for body in bodies:
        yield f"data: {jsonlines.dumps(body)}\n\n"
    yield "data: [DONE]\n\n"


def _impatient(limits: Limits) -> type[H11Protocol]:
    """Uvicorn's protocol, which closes connections whose next head does not come in time, whose
    client does not read, or that have shown no key."""
    strangers = set[Any]()
    seconds = limits.read_seconds

    class Impatient(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.set_write_buffer_limits(0)  # to hear of all that is not read
            strangers.add(self)
            patience = seconds if len(strangers) <= limits.strangers else min(1.0, seconds)
            self._stranger = self.loop.call_later(patience, self._reset)
            self.app_state = {"admit": self._admit}
            self._set_timer()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._expect_less(math.inf)

        def resume_writing(self) -> None:
            super().resume_writing()
            _end(self._unread)

        def _expect_less(self, than: float) -> None:
            """Gives up a client that has read nothing since it was looked at before."""
            unread = self.transport.get_write_buffer_size()
            if unread >= than:
                return self._reset()
            self._unread = self.loop.call_later(seconds, self._expect_less, unread)

        def _reset(self) -> None:
            """Closes the connection; the system keeps nothing for a client that may never read."""
            own = self.transport.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()

        def _admit(self) -> None:
            strangers.discard(self)
            self._stranger.cancel()

        def data_received(self, data: bytes) -> None:
            idle = self._is_idle()
            super().data_received(data)
            if not self._is_idle():
                self._unset_timer()
            elif not idle:
                self._set_timer()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._is_idle():
                self._set_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._admit()
            self._unset_timer()
            _end(self._unread)
            super().connection_lost(exc)

        def _is_idle(self) -> bool:
            cycle: Any = self.cycle  # None before the first call
            return cycle is None or cycle.response_complete

        def _set_timer(self) -> None:
            self._unset_timer()
            self._timer = self.loop.call_later(seconds, self.transport.close)

        def _unset_timer(self) -> None:
            _end(self._timer)

    return Impatient


def _end(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
