"""The entry ``mcp`` of an agent's tools: the tools of an MCP server.

    tools:
      - mcp: {command: [python, server.py], only: [search]}
      - mcp: {url: "http://localhost:8000/mcp", per: run}

The tools are listed when the run starts. A later change of the server's list has no effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import field
from string import Template
from typing import IO, TYPE_CHECKING, Any, Literal, TextIO, cast

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from marft_jax.errors import BadInput, described
from marft_jax.plugins import text_of
from marft_jax.tools import Options, Source, Tool, parse_options

if TYPE_CHECKING:
    from mcp import Client

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST = 1000  # tools of a server
_LONGEST = 100_000  # characters of a tool's schema
_SHOWN = 20  # names in a message
_LIST_SECONDS = 90.0  # in which a server must have started and listed its tools
_UNBOUNDED = 1e9  # seconds; a connection ends its calls itself, and a server may have to start


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class ServerOptions(Options):
    """Options of an MCP server."""

    command: tuple[str, ...] = ()  # starts a server that talks over its standard input and output
    url: str = ""  # of a server that talks over HTTP
    only: tuple[str, ...] = ()  # names of the tools to offer; none: all
    per: Literal["episode", "run"] = "episode"  # what has a connection, and a server, of its own
    variables: tuple[str, ...] = ()  # of the environment, that the server gets too
    headers: dict[str, str] = field(default_factory=dict)  # of HTTP; $NAME: of the environment


def source(entry: Mapping[str, Any], where: str) -> Source:
    """Connects to a server and lists its tools.

    Raises:
        BadInput: an option does not fit, the server cannot be reached, or it lacks a tool.
    """
    options: ServerOptions = parse_options(ServerOptions, entry, where)
    if bool(options.command) == bool(options.url):
        raise BadInput(f"{where}: expected either `command: [...]` or `url: ...`")
    try:
        headers = {k: Template(v).substitute(os.environ) for k, v in options.headers.items()}
    except (KeyError, ValueError) as error:
        what = "expected $NAME of a variable of the environment ($$ is a dollar sign)"
        raise BadInput(f"{where}: headers: {what}, got {error}") from None
    try:
        from marft_jax.extras.mcp.connection import Connection, run
    except ImportError as error:
        what = 'the package mcp, version 2 or newer: pip install -e ".[mcp]"'
        raise BadInput(f"{where}: it needs {what} ({described(error)})") from None

    quiet = open(os.devnull, "w")  # noqa: SIM115 (servers write their errors to it)

    def connect(errors: IO[str]) -> Connection:
        return Connection(lambda: _client(options, headers, errors), options.seconds)

    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        first = connect(errors)
        try:
            tools = run(_list(first.client, options, where))
        except BadInput:
            raise
        except Exception as error:
            errors.seek(0)
            said = errors.read().strip().rpartition("\n")[2]
            why = f"{described(error)}{said and f' ({said:.200})'}"
            raise BadInput(f"{where}: cannot be reached: {why}") from None
        finally:
            first.close()
    shared = connect(quiet) if options.per == "run" else None

    @contextlib.contextmanager
    def open_one() -> Iterator[Callable[[str, Mapping[str, Any]], str]]:
        connection = shared or connect(quiet)
        yield connection.call
        if connection is not shared:
            connection.close()

    return Source(tools, open_one, keeps_state=shared is None)


@contextlib.asynccontextmanager
async def _http(url: str, headers: dict[str, str]) -> AsyncIterator[Any]:
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    async def check(answer: Any) -> None:
        if answer.status_code in (401, 403):
            what = f"{answer.status_code} {answer.reason_phrase}:"
            raise PermissionError(f"{what}; expected `headers` with a key that it knows")

    async with create_mcp_http_client(headers) as client:
        client.event_hooks = {"response": [check]}
        async with streamable_http_client(url, http_client=client) as streams:
            yield streams


@contextlib.asynccontextmanager
async def _accepted(transport: AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
    from marft_jax.extras.mcp.connection import Accepted

    async with transport as (messages, *others):
        yield Accepted(messages), *others


def _client(
    options: ServerOptions, headers: dict[str, str], errors: IO[str]
) -> AbstractAsyncContextManager[Client]:
    from mcp import Client, StdioServerParameters, stdio_client

    if options.url:
        return Client(_accepted(_http(options.url, headers)))
    # beside these it gets PATH, HOME and little more
    variables = {name: os.environ[name] for name in options.variables if name in os.environ}
    command, *args = options.command
    server = StdioServerParameters(
        command=command, args=args, env=variables, encoding_error_handler="replace"
    )
    return Client(_accepted(stdio_client(server, cast(TextIO, errors))))


async def _list(
    connect: Callable[[], Awaitable[Client]], options: ServerOptions, where: str
) -> tuple[Tool, ...]:
    """Lists the tools that are wanted; what no prompt should have is left out."""
    listed, cursor = list[Any](), None
    async with asyncio.timeout(_LIST_SECONDS):
        client = await connect()
        for _ in range(_MOST):  # pages, which may be empty
            page = await client.list_tools(cursor=cursor)
            listed, cursor = listed + page.tools, page.next_cursor
            if cursor is None or len(listed) >= _MOST:
                break
    named = [_tool(tool, options) for tool in listed[:_MOST] if _NAME.fullmatch(tool.name)]
    tools = {tool.name: tool for tool in named if len(str(tool.schema)) <= _LONGEST}
    wanted = options.only or tuple(tools)
    if not wanted or not {*wanted} <= {*tools}:
        names = ", ".join([*tools][:_SHOWN]) or "none with a plain name"
        raise BadInput(f"{where}: only: expected tools that it has ({names}), got {options.only}")
    return tuple(tools[name] for name in wanted)


def _tool(listed: Any, options: ServerOptions) -> Tool:
    limits = Options(seconds=_UNBOUNDED, characters=options.characters, cost=options.cost)
    schema = text_of("schema", json.dumps(listed.input_schema, ensure_ascii=False))
    description = text_of("description", listed.description or "")
    return Tool(listed.name, description, json.loads(schema), limits)
