"""How chat templates write calls of tools, and how calls are found in a sampled text.

A form of calls is known where parsing the call that the chat template writes gives that call back.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from marft_jax.errors import BadInput
from marft_jax.formats import foreign
from marft_jax.tools.fenced import Message, Tools, only_text, rewrite, write_block


class ToolCall(NamedTuple):
    """A call of a tool; ``arguments`` is a JSON object as text, if the model wrote one."""

    name: str
    arguments: str


class CallWriter(Protocol):
    """A tokenizer, as far as calls are concerned."""

    def write_call(
        self, name: str, arguments: Mapping[str, Any], *, special: bool = False
    ) -> str | None:
        """Text in which an assistant calls a tool; None where the template has no tools.

        Args:
            special: with the special tokens that are part of the call.
        """
        ...


Form = Callable[[str, Tools], tuple[str, list[ToolCall]]]
"""Parses a text that may call some tools; returns the text without its calls, and the calls."""

_THINKING = r"<think>.*?(?:</think>|\Z)|</think>"  # or the end of what the prompt opened
_TAGGED = re.compile(rf"{_THINKING}|<tool_call>(.*?)</tool_call>", re.DOTALL)
_FENCED = re.compile(
    rf"{_THINKING}|^```call[ \t]+([^\s`]+)[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE
)
_MARK = re.compile(r"(?:\A|(?<=</think>))\s*(?:\[TOOL_CALLS\]|<\|python_tag\|>)")
"""Mark in front of bare calls; where it is a special token, a sampled text has none."""


def find_calls(text: str, tools: Tools, tokenizer: CallWriter) -> tuple[str, list[ToolCall]]:
    """Finds calls in a sampled text; returns the text without them, and the calls.

    Args:
        tools: those that the agent has. A text may call others, too.
    """
    form = find_form(tokenizer) if tools else None
    return form(text, tools) if form else (text, [])


def with_ids(calls: Sequence[ToolCall], prefix: str) -> tuple[dict[str, Any], ...]:
    """Calls as a message holds them, each with an id.

    Args:
        prefix: five characters: some templates accept only ids of nine.
    """
    return tuple(
        {"id": f"{prefix}{i:04d}", "type": "function", "function": call._asdict()}
        for i, call in enumerate(calls)
    )


def for_template(message: Message) -> Message:
    """Message as chat templates expect it: the arguments of its calls are objects, not texts."""
    if not (calls := message.get("tool_calls")):
        return message
    opened = []
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        own = _arguments(arguments)
        function = {"name": name, "arguments": arguments if own is None else own}
        opened.append({**call, "function": function})
    return {**message, "tool_calls": opened}


def for_model(
    messages: Sequence[Message], tools: Tools, tokenizer: CallWriter, *, begins: bool = True
) -> tuple[list[Message], Tools]:
    """Messages and tools as the model's chat template takes them.

    Args:
        begins: the messages begin a conversation; otherwise they continue one.
    """
    has_calls = any(m["role"] == "tool" or m.get("tool_calls") for m in messages)
    if (tools or has_calls) and find_form(tokenizer) is _parse_fenced:
        return rewrite(messages, tools if begins else ()), ()
    return [*map(for_template, messages)], tools


@functools.lru_cache(maxsize=8)
def find_form(tokenizer: CallWriter) -> Form | None:
    """Finds the form in which a model writes calls: that of its chat template, or fenced blocks
    where the template has no tools; None where the template's form is unknown."""
    written = tokenizer.write_call("qxz", {"a": "b"})
    if written is None:
        return _parse_fenced
    forms, call = (_parse_tagged, _parse_bare), ToolCall("qxz", '{"a": "b"}')
    return next((form for form in forms if form(written, ()) == ("", [call])), None)


def check_form(tokenizer: CallWriter) -> None:
    """Checks that the form in which the model writes calls is known.

    Raises:
        BadInput: its chat template has tools, but another form of calls.
    """
    if find_form(tokenizer) is None:
        raise BadInput(
            "tools: the chat template of this model writes calls in a form that is not known; use "
            "another base"
        )


def form_of_call(tool: Mapping[str, Any], tokenizer: CallWriter) -> tuple[str, Any, str]:
    """Form of a text that is a call of a tool: the text before its arguments, their JSON schema,
    and the text behind them. Parameters that the tool does not name are left out.

    Raises:
        BadInput: the model's form of calls cannot hold the tool's name.
    """
    function = tool["function"]
    name, own = function["name"], function.get("parameters") or {"properties": {}}
    texts = [
        tokenizer.write_call(name, _EXAMPLE, special=special)
        or write_block(name, json.dumps(_EXAMPLE))
        for special in (False, True)
    ]
    form, around = find_form(tokenizer), _EXAMPLE_TEXT.split(texts[1])
    if form is None or form(texts[0], ()) != ("", [ToolCall(name, json.dumps(_EXAMPLE))]):
        raise BadInput(
            f"tools: expected a name that a call of this model holds, got {name!r:.60}; rename it"
        )
    if len(around) != 2:
        raise BadInput(
            "tool_choice: expected a chat template that writes arguments as a JSON object, got one "
            "that writes a text; use auto"
        )
    closed = {"type": "object", "additionalProperties": False} if "properties" in own else {}
    return around[0], {**closed, **own}, around[1]


_EXAMPLE = {"qxz": "qxz"}
_EXAMPLE_TEXT = re.compile(r'\{\s*"qxz"\s*:\s*"qxz"\s*\}')


def _parse_tagged(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as of Hermes and Qwen."""
    tags = _after_thinking(_TAGGED, text)
    calls = [_call(_object(tag[1])) for tag in tags]
    if not calls or None in calls:
        return text, []
    return _without(text, tags), [call for call in calls if call]


def _parse_fenced(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """Blocks, see ``fenced``."""
    blocks = _after_thinking(_FENCED, text)
    own = {tool["function"]["name"]: only_text(tool["function"]) for tool in tools}
    calls: list[ToolCall] = []
    for block in blocks:
        name, body = block[1], block[2].strip("\n")
        given, parameter = _arguments(body), own.get(name)
        if parameter is not None and (given is None or given.keys() != {parameter}):
            given = {parameter: body}
        arguments = body if given is None else json.dumps(given, ensure_ascii=False)
        calls.append(ToolCall(name, arguments))
    return (_without(text, blocks), calls) if calls else (text, [])


def _after_thinking(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Finds the calls behind all thinking."""
    parts = list(pattern.finditer(text))
    begins = max((part.end() for part in parts if part[0] == "</think>"), default=0)
    return [part for part in parts if part[1] is not None and part.start() >= begins]


def _without(text: str, found: Sequence[re.Match[str]]) -> str:
    for part in reversed(found):
        text = text[: part.start()] + text[part.end() :]
    return text.strip()


def _parse_bare(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """JSON alone, an object or a list of objects, after thinking or not: as of Llama, Mistral."""
    plain, names = _MARK.sub("", text), [tool["function"]["name"] for tool in tools]
    is_json = plain.lstrip().startswith(("{", "["))
    thinking, end, _ = ("", "", "") if is_json else plain.partition("</think>")
    thinking = thinking + end if end else ""
    found = _object(plain[len(thinking) :].strip(), list | dict)
    calls = [_call(own) for own in (found if isinstance(found, list) else [found])]
    # an object with a name, but neither a tool's nor with arguments, is an answer
    if not all(call and (call.name in names or call.arguments != "{}") for call in calls):
        return text, []
    return (thinking.strip(), [call for call in calls if call]) if calls else (text, [])


def _call(found: Any) -> ToolCall | None:
    name = found.get("name") if isinstance(found, dict) else None
    if not isinstance(name, str):
        return None
    given = found.get("arguments")
    arguments = _arguments(found.get("parameters") if given is None else given)
    return None if arguments is None else ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _arguments(given: Any) -> dict[str, Any] | None:
    """Arguments of a call, an object or its JSON text; empty if absent, None for anything else."""
    if given is None or isinstance(given, str) and given.strip() in ("", "null"):
        return {}
    return _object(given) if isinstance(given, str) else given if isinstance(given, dict) else None


def _object(text: Any, kind: Any = dict) -> Any:
    try:
        found = foreign.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, kind) else None
