"""Tools of a call: their definitions, and the calls of them in what was sampled.

A form of calls is known where reading what the chat template writes of a call gives that call.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from marft_jax.extras.gateway.errors import ApiError
from marft_jax.formats import foreign
from marft_jax.models.tokenizers.tokenizer import Message, Tokenizer
from marft_jax.plugins import shown


class ToolCall(NamedTuple):
    """A tool that an agent calls; ``arguments`` are JSON."""

    name: str
    arguments: str


Form = Callable[[str], tuple[str, list[ToolCall]]]
"""A text to what is beside its calls, and the calls."""

_TAGGED = re.compile(r"<think>.*?(?:</think>|\Z)|</think>|<tool_call>(.*?)</tool_call>", re.DOTALL)
"""Thinking, the end of thinking that the prompt opened, or a call."""


def read_tools(value: Any, choice: Any) -> tuple[dict[str, Any], ...]:
    """Reads ``tools``; none where ``tool_choice`` is ``none``.

    Raises:
        ApiError: 400.
    """
    form = '{"type": "function", "function": {"name": ...}}'
    tools = _list("tools", value, _is_tool, form, "tools")
    if choice not in (None, "none", "auto"):
        what = f"tool_choice: expected auto or none, got {shown(choice)}"
        raise ApiError(400, what, "tool_choice", "unsupported_parameter")
    return () if choice == "none" else tuple(tools)


def read_calls(where: str, value: Any) -> list[dict[str, Any]]:
    """Reads ``tool_calls`` of an assistant's message.

    Raises:
        ApiError: 400.
    """
    form = '{"function": {"name": ..., "arguments": "{...}"}}'
    calls = _list(f"{where}.tool_calls", value, _is_call, form, "messages")
    return [
        {"id": str(call.get("id") or ""), "type": "function"}
        | {"function": {key: call["function"].get(key) or "" for key in ("name", "arguments")}}
        for call in calls
    ]


def for_template(message: Message) -> Message:
    """Message as chat templates expect it: the arguments of its calls are objects."""
    if not (calls := message.get("tool_calls")):
        return message
    opened = []
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        own = _arguments(arguments)
        function = {"name": name, "arguments": arguments if own is None else own}
        opened.append({**call, "function": function})
    return {**message, "tool_calls": opened}


def find_calls(
    text: str, tools: Sequence[dict[str, Any]], tokenizer: Tokenizer
) -> tuple[str, list[ToolCall]]:
    """Finds the calls of these tools in a text, and what is written beside them; a text that calls
    anything else is a text."""
    form = form_of(tokenizer) if tools else None
    content, calls = form(text) if form else (text, [])
    known = {tool["function"]["name"] for tool in tools}
    return (content, calls) if all(call.name in known for call in calls) else (text, [])


def named(calls: Sequence[ToolCall], prefix: str) -> tuple[Message, ...]:
    """Calls as in a message; ids of nine characters are all that some templates take."""
    return tuple(
        {"id": f"{prefix}{i:04d}", "type": "function", "function": call._asdict()}
        for i, call in enumerate(calls)
    )


@functools.lru_cache(maxsize=8)
def form_of(tokenizer: Tokenizer) -> Form | None:
    """Form in which the model's chat template writes calls; None where none is known."""
    written = tokenizer.write_call("qxz", {"a": "b"}) or ""
    forms = (_tagged, _bare)
    return next((f for f in forms if f(written) == ("", [ToolCall("qxz", '{"a": "b"}')])), None)


def check_form(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
) -> None:
    """Raises ``ApiError`` for tools and their answers where the chat template has none."""
    has_tools = tools or any("tool_calls" in m or m["role"] == "tool" for m in messages)
    if has_tools and form_of(tokenizer) is None:
        what = "tools: the chat template of this model has none, or in a form that is not known"
        raise ApiError(400, what, "tools", "unsupported_parameter")


def _tagged(text: str) -> tuple[str, list[ToolCall]]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as of Hermes and Qwen."""
    parts = list(_TAGGED.finditer(text))
    begins = max((part.end() for part in parts if part[0] == "</think>"), default=0)
    tags = [part for part in parts if part[1] is not None and part.start() >= begins]
    calls = [_call(_object(tag[1])) for tag in tags]
    if not calls or None in calls:
        return text, []
    for tag in reversed(tags):
        text = text[: tag.start()] + text[tag.end() :]
    return text.strip(), [call for call in calls if call]


def _bare(text: str) -> tuple[str, list[ToolCall]]:
    """JSON and nothing else but thinking before it, an object or a list of them, as of Llama and
    Mistral."""
    is_json = text.lstrip().startswith(("{", "["))
    thinking, end, _ = ("", "", "") if is_json else text.partition("</think>")
    thinking = thinking + end if end else ""
    found = _object(text[len(thinking) :].strip(), list | dict)
    calls = [_call(own) for own in (found if isinstance(found, list) else [found])]
    if not calls or None in calls:
        return text, []
    return thinking.strip(), [call for call in calls if call]


def _call(found: Any) -> ToolCall | None:
    name = found.get("name") if isinstance(found, dict) else None
    if not isinstance(name, str):
        return None
    given = found.get("arguments")
    arguments = _arguments(found.get("parameters") if given is None else given)
    return None if arguments is None else ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _arguments(given: Any) -> dict[str, Any] | None:
    """Arguments of a call, which may be written as a text; an empty object where there are none,
    None for anything else."""
    if given is None or isinstance(given, str) and given.strip() in ("", "null"):
        return {}
    return _object(given) if isinstance(given, str) else given if isinstance(given, dict) else None


def _object(text: Any, kind: Any = dict) -> Any:
    try:
        found = foreign.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, kind) else None


def _list(
    where: str, value: Any, fits: Callable[[Any], bool], form: str, param: str
) -> list[dict[str, Any]]:
    """Reads a list, an empty one where there is none; raises ``ApiError``."""
    found = [] if value is None else value
    if not isinstance(found, list) or not all(map(fits, found)):
        raise ApiError(400, f"{where}: expected a list of {form}, got {shown(value)}", param)
    return found


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    return isinstance(function.get("arguments"), str | None)
