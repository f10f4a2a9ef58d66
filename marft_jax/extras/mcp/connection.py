"""A connection to an MCP server, which may hang, die or write anything.

All connections live in one event loop in the background. A connection is made by its first
call, and anew by the first call after it was lost. It ends with its object or with the process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import logging
import os
import weakref
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from mcp import Client, MCPError
from mcp.types import (
    INVALID_PARAMS,
    REQUEST_TIMEOUT,
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    ContentBlock,
)
from pydantic import TypeAdapter, ValidationError

from marft_jax.background import Background
from marft_jax.tools import ToolError

_T = TypeVar("_T")

START_SECONDS = 60.0  # in which a server must have started
_PROBE_SECONDS = 2.0  # in which a server must list its tools after it did not answer a call
_CLOSE_SECONDS = 5.0  # for all servers when the process ends

logging.getLogger("mcp").setLevel(logging.CRITICAL)  # it logs each line of junk, with a traceback


@functools.cache
def _background() -> Background:
    atexit.register(_finish)
    return Background("mcp")


def _finish() -> None:
    """Waits until the servers of connections that were closed have ended."""

    async def wait() -> None:
        if _HELD:
            await asyncio.wait(_HELD, timeout=_CLOSE_SECONDS)

    with contextlib.suppress(Exception):
        run(wait())


_HELD = set[asyncio.Task[None]]()
"""Tasks that hold the open connections."""


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs a coroutine in the loop of the connections, and waits for its result."""
    return _background().run(work)


def _shown(part: Mapping[str, Any]) -> str:
    """Text of a part of a result; a part without a text is shown by its kind and its address."""
    content = part.get("resource") or part
    about = " ".join(str(part[key]) for key in ("type", "uri") if key in part)
    return str(content["text"]) if "text" in content else f"({about})"


_PART = TypeAdapter[Any](ContentBlock)


class Accepted:
    """A stream of messages in which the SDK accepts what many servers send: tools whose schema has
    no type, and parts of a result whose kind it does not know, which become texts."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def __aenter__(self) -> Accepted:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._inner.__aexit__(*error)

    def __aiter__(self) -> Accepted:
        return self

    async def __anext__(self) -> Any:
        message = await self._inner.__anext__()
        result = getattr(getattr(message, "message", None), "result", None)
        for name, mend in (("tools", _with_type), ("content", _with_kind)):
            if isinstance(result, dict) and isinstance(result.get(name), list):
                result[name] = [mend(x) if isinstance(x, dict) else x for x in result[name]]
        return message


def _with_type(tool: dict[str, Any]) -> dict[str, Any]:
    schema = tool.get("inputSchema") or {}
    if not isinstance(schema, dict):
        return tool
    return {**tool, "inputSchema": {"type": "object"} | schema}


def _with_kind(part: dict[str, Any]) -> dict[str, Any]:
    try:
        _PART.validate_python(part)
    except ValidationError:
        return {"type": "text", "text": _shown(part)}
    return part


class Connection:
    """Connection to a server.

    Args:
        make: makes a client of the server.
        seconds: time limit of a call.
    """

    def __init__(
        self, make: Callable[[], AbstractAsyncContextManager[Client]], seconds: float
    ) -> None:
        self._make, self._seconds = make, seconds
        self._lock = asyncio.Lock()
        self._client: Client | None = None
        self._stops: list[asyncio.Event] = []  # of this connection, where it is open
        self._finalizer = weakref.finalize(self, _stop_all, self._stops)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Calls a tool.

        Raises:
            ToolError: the tool answered with an error.
            Exception: there was no answer.
        """
        return run(self._call(name, dict(arguments)))

    def close(self) -> None:
        """Ends the connection and its server, soon."""
        self._finalizer()

    async def client(self) -> Client:
        """Returns the client of the open connection.

        Raises:
            Exception: the server cannot be reached.
        """
        async with self._lock:
            if (client := self._client) is None:
                ready, stop = asyncio.get_running_loop().create_future(), asyncio.Event()
                self._stops.append(stop)
                held = asyncio.create_task(_hold(self._make, ready, stop))
                _HELD.add(held)
                held.add_done_callback(_HELD.discard)
                self._client = client = await ready
            return client

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        client = await self.client()
        try:
            # not client.call_tool: it lists the tools once more, to check what is not used here
            result = await client.session.send_request(
                CallToolRequest(params=CallToolRequestParams(name=name, arguments=arguments)),
                CallToolResult,
                request_read_timeout_seconds=self._seconds,
            )
        except Exception as error:
            if isinstance(error, MCPError) and error.code == INVALID_PARAMS:
                raise ToolError(error.message) from None
            if not await _is_alive(client):
                await self._lose(client)
            if not isinstance(error, MCPError):
                raise
            kind = TimeoutError if error.code == REQUEST_TIMEOUT else ConnectionError
            raise kind(error.message) from None
        texts = [_shown(part.model_dump(exclude_none=True)) for part in result.content]
        if not any(texts) and result.structured_content is not None:
            texts = [json.dumps(result.structured_content, ensure_ascii=False)]
        text = "\n".join(texts)
        if result.is_error:
            raise ToolError(text)
        return text

    async def _lose(self, client: Client) -> None:
        """Gives a connection up, unless another call has done so."""
        async with self._lock:
            if self._client is client:
                self._client = None
                self._stops.pop().set()


async def _hold(
    make: Callable[[], AbstractAsyncContextManager[Client]],
    ready: asyncio.Future[Client],
    stop: asyncio.Event,
) -> None:
    """Opens a connection, and closes it in the same task."""
    try:
        async with contextlib.AsyncExitStack() as stack:
            async with _starts(), asyncio.timeout(START_SECONDS):
                client = await stack.enter_async_context(make())
            ready.set_result(client)
            await stop.wait()
    except BaseException as error:
        if not ready.done():
            ready.set_exception(_first(error))


@functools.cache
def _starts() -> asyncio.Semaphore:
    """Lets as many servers start at once as there are processors."""
    return asyncio.Semaphore(os.cpu_count() or 1)


def _first(error: BaseException) -> BaseException:
    """The first error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _is_alive(client: Client) -> bool:
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_PROBE_SECONDS):
            await client.list_tools(cache_mode="refresh")
            return True
    return False


def _stop_all(stops: list[asyncio.Event]) -> None:
    for stop in stops:
        _background().loop.call_soon_threadsafe(stop.set)
