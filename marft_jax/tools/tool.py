"""Tools: what an agent may call in its turn, and the answers that it is shown."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError, validate_call

from marft_jax.errors import BadInput
from marft_jax.plugins import load_function, text_of
from marft_jax.tools.calls import Message, ToolCall, with_ids


class ToolError(ValueError):
    """A call that a tool cannot answer; the agent is shown the message as the answer."""


class Tool(NamedTuple):
    """A tool of an agent.

    Attributes:
        name: the name by which the agent calls it.
        description: what it does, shown to the agent.
        schema: JSON schema of its arguments, an object.
        call: takes the arguments by name; returns a text, or a value that JSON can hold. It raises
            ``ToolError`` for arguments that do not fit. Another exception fails the episode.
    """

    name: str
    description: str
    schema: Mapping[str, Any]
    call: Callable[..., Any]

    @property
    def definition(self) -> dict[str, Any]:
        """The tool as chat templates show it, in the form of OpenAI's API."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}


def load_tools(names: Sequence[str], where: str) -> tuple[Tool, ...]:
    """Makes a tool of each function that ``package.module:function`` names.

    Args:
        where: whose tools they are, for messages.

    Raises:
        BadInput: a function cannot be imported, has no type hints or no docstring, or has the name
            of another one.
    """
    tools = tuple(_make_tool(load_function(name, where, {}), f"{where}: {name}") for name in names)
    if len({tool.name for tool in tools}) < len(tools):
        raise BadInput(f"{where}: expected functions of distinct names, got {', '.join(names)}")
    return tools


def answer_calls(tools: Sequence[Tool], calls: Sequence[ToolCall]) -> list[Message]:
    """Calls tools, one after another, and returns their answers as messages of the role ``tool``.

    Raises:
        BadInput: an answer is neither a text nor what JSON can hold.
    """
    known = {tool.name: tool for tool in tools}
    return [
        {"role": "tool", "tool_call_id": own["id"], "name": call.name}
        | {"content": _answer(known[call.name], call.arguments)}
        for own, call in zip(with_ids(calls, "calls"), calls, strict=True)
    ]


def _answer(tool: Tool, arguments: str) -> str:
    try:
        answer = tool.call(**json.loads(arguments))
    except ToolError as error:
        return f"error: {error}"
    try:
        text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"tool {tool.name}: expected what JSON can hold: {error}") from error
    return text_of(f"tool {tool.name}", text)


def _make_tool(function: Callable[..., Any], where: str) -> Tool:
    """Makes a tool of a function; its schema is derived from its type hints."""
    parameters = inspect.signature(function).parameters.values()
    description = inspect.getdoc(function)
    if not description or any(p.annotation is p.empty for p in parameters):
        raise BadInput(f"{where}: expected a function with a docstring and a type hint for each "
                       "parameter; the agent is shown both")  # fmt: skip
    checked = validate_call(function)

    def call(**arguments: Any) -> Any:
        try:
            return checked(**arguments)
        except ValidationError as error:
            raise ToolError(_first(error)) from None

    schema = TypeAdapter[Any](function).json_schema()  # pyright: ignore[reportArgumentType]
    return Tool(function.__name__, description, schema, call)


def _first(error: ValidationError) -> str:
    """The first mistake in the arguments of a call, on one line."""
    mistake = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, mistake['loc']))}: {mistake['msg']}"
