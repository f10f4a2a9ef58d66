"""How chat templates write calls of tools, and how calls are found in a sampled text.

A form of calls is known where parsing the call that the chat template writes gives that call back.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from marft_jax.errors import BadInput
from marft_jax.formats import foreign
from marft_jax.plugins import text_of
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
_FENCE = r"\s*(?:```\w*\s*)?"
_TAGGED = re.compile(rf"{_THINKING}|(<tool_call>){_FENCE}", re.DOTALL)
"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as of Hermes and Qwen."""
_BARE = re.compile(
    rf"{_THINKING}|(?:\A|(?<=</think>))\s*(\[TOOL_CALLS\]|<\|python_tag\|>|){_FENCE}(?=[\[{{])",
    re.DOTALL,
)
"""JSON alone, an object or a list of objects, after thinking or not: as of Llama, Mistral. The mark
in front of it is a special token, which a sampled text lacks, or a text."""
_AFTER = re.compile(r"[\s,;}\]`]*(</tool_call>)?")  # some models write a bracket too many
_FENCED = re.compile(
    rf"{_THINKING}|^```call[ \t]+([^\s`]+)[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE
)


def find_calls(text: str, tools: Tools, tokenizer: CallWriter) -> tuple[str, list[ToolCall]]:
    """Finds calls in a sampled text; returns the text without them, and the calls.

    Args:
        tools: those that the agent has. A text may call others, too.
    """
    form = find_form(tokenizer) if tools else None
    content, calls = form(text, tools) if form else (text, [])
    return content, [ToolCall(*(text_of("a call", part) for part in call)) for call in calls]


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
    forms, call = (
        (functools.partial(_parse_json, x) for x in (_TAGGED, _BARE)),
        ToolCall("qxz", '{"a": "b"}'),
    )
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


def _parse_json(opening: re.Pattern[str], text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """Calls as JSON behind an opening. A call ends with its JSON, whose texts may hold tags."""
    names = {tool["function"]["name"] for tool in tools}
    calls, spans, at = list[ToolCall](), list[tuple[int, int]](), 0
    while part := opening.search(text, at):
        start, at = part.span()
        if part[0] == "</think>":  # so all before it was thought
            calls, spans = [], []
        with contextlib.suppress(ValueError):
            while part[1] is not None:
                value, end = foreign.load_first(text, at)
                after = next(_AFTER.finditer(text, end))
                found = map(_call, value if isinstance(value, list) else [value])
                # JSON alone with a name, but neither a tool's nor with arguments, is an answer
                own = [
                    c for c in found if c and (part[1] or c.name in names or c.arguments != "{}")
                ]
                calls, spans = calls + own, spans + [(start, after.end())] * bool(own)
                start = at = after.end()
                if after[1]:
                    break
        at = max(at, part.start() + 1)
    return (_without(text, spans), calls) if calls else (text, [])


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
    return (_without(text, [b.span() for b in blocks]), calls) if calls else (text, [])


def _after_thinking(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Finds the calls behind all thinking."""
    parts = list(pattern.finditer(text))
    begins = max((part.end() for part in parts if part[0] == "</think>"), default=0)
    return [part for part in parts if part[1] is not None and part.start() >= begins]


def _without(text: str, spans: Sequence[tuple[int, int]]) -> str:
    for start, end in reversed(spans):
        text = text[:start] + text[end:]
    return text.strip()


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
    with contextlib.suppress(ValueError):
        while isinstance(given, str):
            given = foreign.loads(given, strict=False)
    return given if isinstance(given, dict) else None
