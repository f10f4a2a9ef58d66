"""An MCP server that does what a test wants: ``python mcp_server.py``, or with ``http PORT``."""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from pydantic import BaseModel

print("junk that is no message", flush=True)
server, calls = MCPServer("test"), []


class Node(BaseModel):
    value: int
    children: "list[Node]" = []


@server.tool()
def count(n: int) -> str:
    """Adds to a total."""
    calls.append(n)
    return str(sum(calls))


@server.tool()
def total(node: Node) -> str:
    """Adds up a tree."""
    return str(node.value + sum(int(total(child)) for child in node.children))


@server.tool()
def variables() -> str:
    """Lists the variables of the environment."""
    return " ".join(sorted(os.environ))


@server.tool()
def act(what: str) -> str:
    """Does something wrong."""
    if what == "die":
        os._exit(3)
    if what == "hang":
        time.sleep(600)
    if what == "junk":
        print("junk\n{}\n[1]\n" * 100, flush=True)
    if what == "flood":
        while True:
            sys.stdout.write("a" * 100_000)
    if what == "fail":
        raise ValueError("no such thing")
    return what


server.tool(name="red\x1b[31m", description="Has a name that no prompt should have.")(lambda: "")

if sys.argv[1:2] == ["http"]:
    server.run("streamable-http", port=int(sys.argv[2]))
server.run("stdio")
