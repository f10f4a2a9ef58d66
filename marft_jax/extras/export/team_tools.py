"""Calls the tools of this team for ``team.py``, and holds texts to their JSON schemas; ``forms.py``
reads the calls."""

import asyncio
import importlib
import json
import os
import string
import sys
from typing import Any


def read(turn: Any, tokenizer: Any, ids: Any) -> tuple[str, Any]:
    """Text of what was sampled without its calls, and the calls."""
    forms: Any = importlib.import_module("forms")
    text = tokenizer.decode(ids, skip_special_tokens=False).strip()
    if not any(own in text for own in turn["openings"]):  # its grammar decides if it is a call
        return text, []
    return forms.FORMS[turn["form"]].read(text, turn["definitions"])


def messages(turn: Any, tokenizer: Any, ids: Any) -> list[Any]:
    """The message in which an agent called tools, and their answers; none if it called none."""
    said, calls = read(turn, tokenizer, ids)
    answers = [answer(turn, *call) for call in calls]
    if turn["form"] in ("fenced", "lfm2"):  # whose templates write no calls
        text = tokenizer.decode(ids, skip_special_tokens=turn["form"] == "fenced")
        told = {"role": "assistant", "content": text}
        lines = [f"{call[0]}: {own}" for call, own in zip(calls, answers, strict=True)]
        if turn["form"] == "fenced":
            return [told, {"role": "user", "content": "\n".join(lines)}] if calls else []
    else:
        told = {"role": "assistant", "content": said, "tool_calls": []}
    found: list[Any] = [told]
    for n, ((name, given), own) in enumerate(zip(calls, answers, strict=True)):
        key = f"functions.{name}:{n}" if turn["form"] == "kimi" else f"calls{n:04d}"
        function = {"name": name, "arguments": _object(given) or {}}
        if "tool_calls" in told:
            told["tool_calls"].append({"id": key, "type": "function", "function": function})
        found.append({"role": "tool", "tool_call_id": key, "name": name, "content": own})
    return found if calls else []


def answer(turn: Any, name: str, given: str) -> str:
    """Answers a call as in training: with the tool's text, or one line that begins with error."""
    tool = next((own for own in turn["tools"] if name in own["names"]), None)
    if tool is None:
        known = ", ".join(name for own in turn["tools"] for name in own["names"])
        return f"error: expected one of the tools {known}, got {name!r:.60}"
    if (arguments := _object(given)) is None:
        return f"error: expected a JSON object, got {given!r:.60}"
    try:
        if "mcp" in tool["entry"]:
            own = asyncio.run(_of_server(tool["entry"]["mcp"], name, arguments))
        else:
            module, _, attribute = tool["entry"]["function"].partition(":")
            sys.path.append(os.getcwd())
            own = _checked(getattr(importlib.import_module(module), attribute))(**arguments)
            own = asyncio.run(own) if asyncio.iscoroutine(own) else own
        text = own if isinstance(own, str) else json.dumps(own, ensure_ascii=False)
    except Exception as error:
        return f"error: {' '.join(_described(error).split())}"
    most = tool["characters"]
    return text if len(text) <= most else f"{text[:most]} ... (cut off at {most} characters)"


def _checked(function: Any) -> Any:
    """A function whose arguments are checked and converted as in training, with pydantic."""
    try:
        from pydantic import validate_call
    except ImportError:
        return function
    return validate_call(function)


def _described(error: Any) -> str:
    kind = type(error).__name__
    if kind == "ValidationError" and hasattr(error, "errors"):
        mistake = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, mistake['loc']))}: {mistake['msg']}"
    return str(error) if kind == "ToolError" else f"{kind}: {error}"


def masks(turn: Any, tokenizer: Any, eos: Any, begin: int) -> list[Any]:
    """Processors of logits that hold a text to its agent's JSON schema; none without a schema, or
    without llguidance.

    Args:
        begin: length of the prompt.
    """
    if not turn["grammar"]:
        return []
    try:
        from llguidance import LLMatcher, hf
        from llguidance import numpy as bitmasks
    except ImportError:
        what = "its texts are not held to their JSON schema without `pip install llguidance`"
        sys.stderr.write(f"{turn['agent']}: {what}\n")
        return []
    matcher: Any = None

    def mask(ids: Any, scores: Any) -> Any:
        nonlocal matcher, begin
        size = scores.shape[-1]
        matcher = matcher or LLMatcher(hf.from_tokenizer(tokenizer, size, eos), turn["grammar"])
        matcher.consume_tokens(ids[0, begin:].tolist())
        begin, bits = ids.shape[1], bitmasks.allocate_token_bitmask(1, size)
        bitmasks.fill_next_token_bitmask(matcher, bits, 0)
        own = [i for i in range(size) if not bits[0, i // 32] >> (i % 32) & 1]
        if matcher.is_stopped():  # the text is complete
            own = [i for i in range(size) if i not in eos]
        scores[:, own] = -float("inf")
        return scores

    return [mask]


def _object(text: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


async def _of_server(options: Any, name: str, arguments: Any) -> str:
    """Calls a tool of an MCP server (``pip install "mcp>=2"``), which starts anew for each call."""
    from mcp import Client, StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    if options.get("url"):
        headers = {
            key: string.Template(value).substitute(os.environ)
            for key, value in options.get("headers", {}).items()
        }
        http = create_mcp_http_client(headers)
        made = Client(streamable_http_client(options["url"], http_client=http))
    else:
        command, *args = options["command"]
        env = {own: os.environ[own] for own in options.get("variables", ()) if own in os.environ}
        server = StdioServerParameters(command=command, args=args, env=env)
        made = Client(stdio_client(server, open(os.devnull, "w")))  # noqa: SIM115
    async with made as client:
        result = await client.call_tool(name, arguments)
    texts = [getattr(part, "text", f"({part.type})") for part in result.content]
    text = "\n".join(texts) or json.dumps(result.structured_content, ensure_ascii=False)
    return f"error: {' '.join(text.split())}" if result.is_error else text
