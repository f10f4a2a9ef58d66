"""Calls as fenced blocks, for models whose chat template has no tools.

    ```call add
    {"a": 1, "b": 2}
    ```

The system prompt describes the tools, and answers come as a message of the user. A tool whose only
parameter is a text takes this text itself in place of JSON.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from marft_jax.tools.forms import Message, Tools, only_text

_BEGINNING = "To call a tool, write a block like these; then read its answer."


def write(messages: Sequence[Message], tools: Tools, begins: bool) -> tuple[list[Message], Tools]:
    """Writes a conversation with tools as a conversation of plain texts.

    Args:
        begins: its system message describes the tools; otherwise an earlier part does so.
    """
    rewritten = list[Message]()
    for is_answer, group in itertools.groupby(messages, lambda m: m["role"] == "tool"):
        if is_answer:
            lines = [f"{m.get('name', 'answer')}: {m['content']}" for m in group]
            rewritten.append({"role": "user", "content": "\n".join(lines)})
        else:
            rewritten += map(_with_blocks, group)
    if tools and begins:
        first = rewritten.pop(0)["content"] + "\n\n" if rewritten[0]["role"] == "system" else ""
        rewritten.insert(0, {"role": "system", "content": first + _description(tools)})
    return rewritten, ()


def _with_blocks(message: Message) -> Message:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    if not functions:
        return message
    blocks = [write_block(call["name"], call["arguments"]) for call in functions]
    return {"role": message["role"], "content": "\n".join([message["content"] or "", *blocks])}


def write_block(name: str, body: str) -> str:
    """Writes a call as a fenced block."""
    return f"```call {name}\n{body}\n```"


def _description(tools: Tools) -> str:
    lines = [_BEGINNING]
    for function in (tool["function"] for tool in tools):
        body = only_text(function) or _arguments(function.get("parameters") or {})
        lines += [write_block(function["name"], body), function.get("description") or ""]
    return "\n".join(lines)


def _arguments(schema: Mapping[str, Any]) -> str:
    """Shows the arguments as JSON, each with its type; the whole schema where that says more."""
    if "$defs" in schema:
        return json.dumps(schema)
    shown = dict[str, Any]()
    for name, parameter in (schema.get("properties") or {}).items():
        pairs = parameter.items() if isinstance(parameter, Mapping) else ()  # true: any value
        more = {key: value for key, value in pairs if key != "title"}
        shown[name] = more["type"] if more.keys() == {"type"} else more or "any"
    return json.dumps(shown, ensure_ascii=False)
