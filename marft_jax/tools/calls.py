"""How chat templates write calls of tools, and how calls are found in a sampled text.

A form of calls is known where parsing the call that the chat template writes gives that call back.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from marft_jax.errors import BadInput
from marft_jax.formats import foreign

Message = Mapping[str, Any]
"""A message of a conversation, as ``models.tokenizers`` has it."""


class ToolCall(NamedTuple):
    """A call of a tool; ``arguments`` is a JSON object as text."""

    name: str
    arguments: str


class CallWriter(Protocol):
    """A tokenizer, as far as calls are concerned."""

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """Text in which an assistant calls a tool; None where the template has no tools."""
        ...


Form = Callable[[str], tuple[str, list[ToolCall]]]
"""Parses a text; returns the text without its calls, and the calls."""

_TAGGED = re.compile(r"<think>.*?(?:</think>|\Z)|</think>|<tool_call>(.*?)</tool_call>", re.DOTALL)
"""Thinking, the end of thinking that the prompt opened, or a call."""


def find_calls(
    text: str, names: Collection[str], tokenizer: CallWriter
) -> tuple[str, list[ToolCall]]:
    """Finds calls in a sampled text; returns the text without them, and the calls.

    Args:
        names: the tools that may be called. A text that calls any other tool has no calls.
    """
    form = find_form(tokenizer) if names else None
    content, calls = form(text) if form else (text, [])
    return (content, calls) if all(call.name in names for call in calls) else (text, [])


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


@functools.lru_cache(maxsize=8)
def find_form(tokenizer: CallWriter) -> Form | None:
    """Finds the form in which the model's chat template writes calls; None if it is unknown."""
    written = tokenizer.write_call("qxz", {"a": "b"}) or ""
    forms = (_parse_tagged, _parse_bare)
    return next((f for f in forms if f(written) == ("", [ToolCall("qxz", '{"a": "b"}')])), None)


def check_form(tokenizer: CallWriter) -> None:
    """Checks that the model's chat template has tools.

    Raises:
        BadInput: it has none, or writes calls in an unknown form.
    """
    if find_form(tokenizer) is None:
        raise BadInput(
            "tools: the chat template of this model has none, or writes calls in a form that is "
            "not known; use another base"
        )


def _parse_tagged(text: str) -> tuple[str, list[ToolCall]]:
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


def _parse_bare(text: str) -> tuple[str, list[ToolCall]]:
    """JSON alone, an object or a list of objects, after thinking or not: as of Llama, Mistral."""
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
