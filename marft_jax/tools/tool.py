"""A tool, a source of tools, and how a Python function becomes a tool."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError, validate_call
from pydantic.dataclasses import dataclass

from marft_jax.background import finished
from marft_jax.errors import BadInput, reason
from marft_jax.settings.setting import Count, NonNegative, Seconds, fault_of


class ToolError(ValueError):
    """A call that a tool cannot answer; the agent is shown the message as the answer."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Options:
    """Options that an entry of ``tools`` may give to any tool."""

    seconds: Seconds = 30.0  # time limit of a call
    characters: Count = 10_000  # of an answer; the rest is cut off
    cost: NonNegative = 0.0  # of a call, subtracted from the agent's reward


class Tool(NamedTuple):
    """A tool of an agent.

    Attributes:
        name: the name by which the agent calls it.
        description: what it does, shown to the agent.
        schema: JSON schema of its arguments, an object.
        options: limits and cost of a call.
    """

    name: str
    description: str
    schema: Mapping[str, Any]
    options: Options = Options()

    @property
    def definition(self) -> dict[str, Any]:
        """The tool as chat templates show it, in the form of OpenAI's API."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}


Call = Callable[[str, Mapping[str, Any]], Any]
"""Calls the tool of a name with arguments; returns a text, or a value that JSON can hold. Raises
``ToolError`` for arguments that do not fit; any other exception is a failure of the tool."""


class Source(NamedTuple):
    """Tools that an episode opens together.

    Attributes:
        open: opens them for an episode; the context gives the function that calls them. It is
            opened at the episode's first call, and closed with the episode.
        keeps_state: an answer may depend on the calls before it in the episode.
    """

    tools: tuple[Tool, ...]
    open: Callable[[], AbstractContextManager[Call]]
    keeps_state: bool = False


def parse_options(kind: type[Any], given: Mapping[str, Any], where: str) -> Any:
    """Reads the options of an entry.

    Args:
        kind: ``Options``, or a dataclass with more fields.
        where: whose options they are, for messages.

    Raises:
        BadInput: an unknown option, or a value that does not fit.
    """
    try:
        return TypeAdapter(kind).validate_python(dict(given))
    except ValidationError as error:
        raise BadInput(f"{where}: {fault_of(error, kind)}") from None


def function_source(function: Callable[..., Any], options: Options, where: str) -> Source:
    """Makes a tool of a function, plain or async; its schema is derived from its type hints.

    Raises:
        BadInput: the function has no type hints or no docstring, a parameter that cannot be given
            by its name, or one of a type that has no JSON schema.
    """

    @functools.wraps(function)
    def plain(*given: Any, **named: Any) -> Any:
        return finished(function(*given, **named))

    inner: Any = getattr(function, "func", function)  # of a partial
    description, name = inspect.getdoc(inner), getattr(inner, "__name__", type(inner).__name__)
    try:
        signature = inspect.signature(function, eval_str=True)
        hints = {p.name: p.annotation for p in signature.parameters.values()}
        vars(plain).update(__signature__=signature)
        plain.__annotations__ = hints
        schema: dict[str, Any] = TypeAdapter[Any](plain).json_schema()  # pyright: ignore[reportArgumentType]
        checked = validate_call(plain)
    except Exception as error:  # annotations are code
        raise BadInput(f"{where}: expected a function of JSON values: {reason(error)}") from None
    if not description or inspect.Parameter.empty in hints.values():
        raise BadInput(f"{where}: expected a function with a docstring and a type hint for each "
                       "parameter; the agent is shown both")  # fmt: skip
    kinds = inspect.isclass, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if schema["type"] != "object" or any(is_kind(inner) for is_kind in kinds):
        what = "a function that returns a value, and whose parameters can be given by name"
        raise BadInput(f"{where}: expected {what}, got {name}{signature}")

    def call(name: str, arguments: Mapping[str, Any]) -> Any:
        try:
            return checked(**arguments)
        except ValidationError as error:
            mistake = error.errors(include_url=False)[0]
            where = ".".join(map(str, mistake["loc"]))
            raise ToolError(f"{where}: {mistake['msg']}") from None

    tool = Tool(name, description, schema, options)
    return Source((tool,), lambda: contextlib.nullcontext(call))
