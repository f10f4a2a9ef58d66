"""An MCP server without a library that breaks the rules in one way: ``hostile_mcp.py MODE``."""

import json
import sys
import time

MODE = sys.argv[1]
DEEP = '{"a":' * 5000 + "1" + "}" * 5000
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
TOOLS = [{"name": "act", "inputSchema": SCHEMA}]


def write(text):
    sys.stdout.buffer.write(text if isinstance(text, bytes) else text.encode())
    sys.stdout.buffer.write(b"\n")
    sys.stdout.flush()


def answer(number, result, **more):
    write(json.dumps({"jsonrpc": "2.0", "id": number, "result": result} | more))


def text(said):
    return {"content": [{"type": "text", "text": said}]}


def listed(cursor=None):
    if MODE == "an empty first page":
        return {"tools": TOOLS} if cursor else {"tools": [], "nextCursor": "2"}
    if MODE == "one tool on each page":
        page = int(cursor or 0)
        more = {"nextCursor": str(page + 1)} if page < 2 else {}
        return {"tools": [{"name": f"t{page}", "inputSchema": SCHEMA}] * (page != 1)} | more
    if MODE == "dies in the start":
        sys.exit("no key")
    if MODE == "thousands of tools":
        return {"tools": [{"name": f"t{i}", "inputSchema": SCHEMA} for i in range(5000)]}
    if MODE == "schemas without a type":
        untyped = ({}, {"properties": {"a": True, "b": {"description": "any"}, "c": {}}}, None)
        tools = [{"name": f"t{n}", "inputSchema": own} for n, own in enumerate(untyped)]
        return {"tools": [*tools, {"name": "t3"}]}
    if MODE == "two hundred tools":
        return {"tools": [{"name": f"t{i}", "inputSchema": SCHEMA} for i in range(200)]}
    if MODE == "pages without an end":
        return {"tools": [], "nextCursor": "more"}
    if MODE == "a huge schema":
        huge = {"name": "huge", "inputSchema": {**SCHEMA, "description": "a" * 5_000_000}}
        return {"tools": [*TOOLS, huge]}
    if MODE == "NaN in a schema":
        odd = {"name": "odd", "inputSchema": {**SCHEMA, "default": float("nan")}}
        return {"tools": [*TOOLS, odd]}
    if MODE == "a schema that is no object":
        return {"tools": [*TOOLS, {"name": "odd", "inputSchema": [1]}]}
    return {"tools": TOOLS}


def call(number):
    if MODE == "another id":
        answer(number + 1000, text("to nobody"))
    elif MODE == "wrong JSON-RPC":
        for line in ("[]", "{}", "null", '{"jsonrpc": "1.0"}', json.dumps({"id": number})):
            write(line)
        answer(number, text("wrong"), error={"code": 1, "message": "both"}, jsonrpc="1.0")
    elif MODE == "a result of another kind":
        answer(number, {"content": "text"})
    elif MODE.startswith("{"):
        answer(number, json.loads(MODE))
    elif MODE == "slow drip":
        for _ in range(600):
            sys.stdout.write(" ")
            sys.stdout.flush()
            time.sleep(0.05)
    elif MODE == "endless lines":
        while True:
            write('{"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": 1, '
                  '"level": "info"}}')  # fmt: skip
    elif MODE == "deep nesting":
        write(f'{{"jsonrpc": "2.0", "id": {number}, "result": {DEEP}}}')
    elif MODE == "bytes that are no UTF-8":
        said = json.dumps({"jsonrpc": "2.0", "id": number, "result": text("o QQ")})
        write(said.encode().replace(b"QQ", b"\xff\xfe"))
    elif MODE == "NaN in a result":
        answer(number, {**text("o"), "structuredContent": {"a": float("nan")}})
    elif MODE == "an error without a code":
        write(json.dumps({"jsonrpc": "2.0", "id": number, "error": {"message": "no"}}))
    else:
        if MODE == "changes its list":
            write('{"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}')
            TOOLS[0] = {"name": "other", "inputSchema": SCHEMA}
        answer(number, text("o"))
    if MODE == "ends after each call":
        sys.exit()


for line in sys.stdin:
    asked = json.loads(line)
    number, method = asked.get("id"), asked["method"]
    if method == "initialize":
        version = asked["params"]["protocolVersion"]
        about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "a", "version": "1"}}
        answer(number, {"protocolVersion": version, **about})
    elif method == "tools/list":
        answer(number, listed((asked.get("params") or {}).get("cursor")))
    elif method == "tools/call":
        call(number)
    elif number is not None:
        refusal = {"code": -32601, "message": "no such method"}
        write(json.dumps({"jsonrpc": "2.0", "id": number, "error": refusal}))
