"""Calls of OpenAI's API as plain values.

Fields that nobody knows are ignored; those that are known and not offered are refused.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, NoReturn

from pydantic import AfterValidator, TypeAdapter

from marft_jax.extras.gateway.errors import ApiError, naming
from marft_jax.formats import foreign
from marft_jax.models.tokenizers.tokenizer import Message
from marft_jax.plugins import load_extra, shown, text_of
from marft_jax.settings.setting import checked
from marft_jax.team.profiles import SAMPLING

_MOST_CHOICES = 128
_ROLES = {name: name for name in ("system", "user", "assistant", "tool")} | {"developer": "system"}
_NEUTRAL: dict[str, Sequence[Any]] = {
    name: values
    for names, values in (
        ("audio allowed_token_ids truncate_prompt_tokens prompt_logprobs structured_outputs", ()),
        ("chat_template", ()),
        ("prefix echo ignore_eos include_stop_str_in_output use_beam_search", (False,)),
        ("continue_final_message", (False,)),
        ("add_generation_prompt skip_special_tokens", (True,)),
        ("top_logprobs presence_penalty frequency_penalty min_tokens", (0,)),
        ("repetition_penalty length_penalty", (1,)),
        ("functions stop_token_ids bad_words documents", ([],)),
        ("logit_bias chat_template_kwargs", ({},)),
        ("modalities", (["text"],)),
    )
    for name in names.split()
}
"""Fields of OpenAI and of other servers that change an answer and are not offered, each with its
values that ask for nothing."""
_MOST_TOKENS = ("max_completion_tokens", "max_tokens")
_MINUS_ONE = {"top_k": 0, "seed": None} | dict.fromkeys(_MOST_TOKENS)
"""What -1 stands for in calls for other servers."""


def _names(value: Any, **kinds: Any) -> bool:
    """True for an object whose function has a name, and further fields of these kinds."""
    function = value.get("function") if isinstance(value, dict) else None
    kinds = {"name": str} | kinds
    return isinstance(function, dict) and all(
        isinstance(function.get(name), kind) for name, kind in kinds.items()
    )


def _is_choice(value: Any) -> bool:
    match value:
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}:
            return mode in ("auto", "required") and all(map(_names, tools))
    return value in ("auto", "none", "required") or _names(value)


def _list_of(expected: str, **kinds: Any) -> TypeAdapter[Any]:
    """Lists of objects whose functions have names, and further fields of these kinds."""
    fits = functools.partial(_names, **kinds)
    return _kind(list[Any], f"a list of {expected}", lambda values: all(map(fits, values)))


def _kind(kind: Any, expected: str, fits: Callable[[Any], bool]) -> TypeAdapter[Any]:
    def check(value: Any) -> Any:
        if not fits(value):
            raise ValueError(expected)
        return value

    return TypeAdapter(Annotated[kind, AfterValidator(check)])  # pyright: ignore


_FLAGS = "stream include_usage logprobs return_token_ids parallel_tool_calls"
_FIELDS: dict[str, TypeAdapter[Any]] = {
    **SAMPLING,
    **dict.fromkeys(_MOST_TOKENS, SAMPLING["max_new_tokens"]),
    **dict.fromkeys(_FLAGS.split(), TypeAdapter(bool)),
    **dict.fromkeys(("model", "instructions"), TypeAdapter(str)),
    **dict.fromkeys(("stream_options", "text"), TypeAdapter(dict[str, Any])),
    "messages": _kind(list[Any], "a list, not empty", bool),
    "n": _kind(int, f"1 to {_MOST_CHOICES}", lambda n: 1 <= n <= _MOST_CHOICES),
    "seed": TypeAdapter(int),
    "include": TypeAdapter(list[Any]),
    "tools": _list_of('{"type": "function", "function": {"name": ...}}', parameters=dict | None),
    "tool_choice": _kind(
        Any,
        'auto, none, required, {"type": "function", "function": {"name": ...}}, or {"type": '
        '"allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}',
        _is_choice,
    ),
    "tool_calls": _list_of(
        '{"function": {"name": ..., "arguments": "{...}"}}', arguments=str | None
    ),
}
"""The types of fields that are read."""


class Call(NamedTuple):
    """An answer that is asked for.

    Attributes:
        prompts: texts or token ids that are continued as they are, instead of messages.
        sampling: fields of ``types.Sampling`` that differ from the agent's own.
        seed: None where the samples need not be repeatable.
        ids: also answer with token ids.
        tools: definitions of those that it may call.
        form: JSON schema that the answer follows, unless it is a call of a tool, as text; "" for
            any answer.
        required: names of tools, of which it must call one; empty: it may answer without a call.
        parallel: it may call several tools at once.
    """

    model: str
    messages: tuple[Message, ...]
    sampling: Mapping[str, Any] = {}
    n: int = 1
    seed: int | None = None
    stream: bool = False
    usage: bool = False
    logprobs: bool = False
    ids: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    form: str = ""
    required: tuple[str, ...] = ()
    parallel: bool = True
    prompts: tuple[str | tuple[int, ...], ...] = ()

    @property
    def choices(self) -> int:
        """Number of choices, of all prompts together."""
        return self.n * max(1, len(self.prompts))

    @property
    def stop(self) -> tuple[str, ...]:
        return self.sampling.get("stop", ())


def read_json(body: bytes) -> Any:
    """Reads a body of JSON; raises ``ApiError``, 400."""
    try:
        return foreign.loads(body.decode(), constant=_refuse)
    except ValueError as error:
        raise ApiError(400, f"expected JSON: {error}"[:200]) from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"got {constant}")


def read_object(body: bytes) -> dict[str, Any]:
    """Reads the fields of a call."""
    fields = read_json(body)
    if not isinstance(fields, dict):
        raise ApiError(400, f"expected a JSON object, got {shown(fields)}")
    return fields


def refuse_unless_neutral(fields: Mapping[str, Any], known: Mapping[str, Sequence[Any]]) -> None:
    """Refuses fields that are not offered, but for values that ask for nothing."""
    for name, neutral in known.items():
        if fields.get(name) is not None and fields[name] not in neutral:
            raise ApiError(400, f"{name}: not offered here", name, "unsupported_parameter")


def call_of(fields: Mapping[str, Any], prompts: Sequence[str | tuple[int, ...]] = ()) -> Call:
    """Makes a call of the fields of a chat completion, with messages or with prompts."""
    refuse_unless_neutral(fields, _NEUTRAL)
    if fields.get("stream_options") and not field(fields, "stream", False):
        raise ApiError(400, "stream_options: expected together with stream: true", "stream_options")
    messages = [] if prompts else field(fields, "messages", [])
    tools, required = _tools(fields)
    return Call(
        field(fields, "model", ""),
        tuple(_message(f"messages[{i}]", m) for i, m in enumerate(messages)),
        _sampling(fields),
        field(fields, "n", 1),
        field(fields, "seed", None),
        field(fields, "stream", False),
        field(field(fields, "stream_options", {}), "include_usage", False),
        field(fields, "logprobs", False),
        field(fields, "return_token_ids", False),
        tools,
        _form(fields),
        required,
        field(fields, "parallel_tool_calls", True),
        tuple(prompts),
    )


def _tools(fields: Mapping[str, Any]) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...]]:
    """Reads the tools that may be called, and the names of those of which one must be called."""
    tools = tuple(field(fields, "tools", []))
    names = tuple(tool["function"]["name"] for tool in tools)
    chosen, mode = names, field(fields, "tool_choice", "auto")
    match mode:
        case {"allowed_tools": {"mode": mode, "tools": some}}:
            chosen = tuple(tool["function"]["name"] for tool in some)
        case {"function": {"name": name}}:
            chosen, mode = (name,), "named"
    if mode == "none":
        return (), ()
    if mode != "auto" and not chosen or not {*chosen} <= {*names}:
        known = ", ".join(names) or "none"
        got = shown(fields.get("tool_choice"))
        what = f"tool_choice: expected one of the tools ({known}), got {got}"
        raise ApiError(400, what, "tool_choice")
    if mode != "named":
        tools = tuple(tool for tool in tools if tool["function"]["name"] in chosen)
    return tools, () if mode == "auto" else chosen


def _form(fields: Mapping[str, Any]) -> str:
    """Reads ``response_format``: the JSON schema that it asks for, or ""."""
    name, given = "response_format", fields.get("response_format")
    match given:
        case None | {"type": "text"}:
            return ""
        case {"type": "json_object"}:
            schema = {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            pass
        case _:
            what = 'text, json_object, or json_schema with {"json_schema": {"schema": {...}}}'
            raise ApiError(400, f"{name}: expected {what}, got {shown(given)}", name)
    text = json.dumps(schema)
    with naming(name):
        load_extra("form.check")(text, name)
    return text


def field(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    """Reads and checks a field; null is the default."""
    value = fields.get(name)
    value = _MINUS_ONE[name] if value == -1 and name in _MINUS_ONE else value
    with naming(name):
        return default if value is None else checked(name, _FIELDS[name], value)


def _sampling(fields: Mapping[str, Any]) -> dict[str, Any]:
    stop = fields.get("stop")
    stop = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else stop
    fields = {**fields, "stop": None if stop == () else stop}
    limits = [field(fields, name, None) for name in _MOST_TOKENS]
    fields["max_new_tokens"] = next((limit for limit in limits if limit is not None), None)
    sampling = {name: field(fields, name, None) for name in SAMPLING}
    return {name: value for name, value in sampling.items() if value is not None}


def _message(where: str, message: Any) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        what = f"{where}: expected a role of {', '.join(_ROLES)}, got {shown(message)}"
        raise ApiError(400, what, "messages")
    parts = message.get("content")
    if isinstance(parts, str) or parts is None:
        parts = [{"type": "text", "text": parts or ""}]
    known = parts if isinstance(parts, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) else None for part in known]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(400, f"{where}.content: expected text, got {shown(parts)}", "messages")
    content = text_of(where, "".join(map(str, texts)))
    read: Message = {"role": _ROLES[role], "content": content}
    if role == "tool":
        read["tool_call_id"] = str(message.get("tool_call_id") or "")
    if role == "assistant" and (calls := field(message, "tool_calls", [])):
        read["tool_calls"] = [_call(call) for call in calls]
    return read


def _call(call: Mapping[str, Any]) -> Message:
    function = {key: call["function"].get(key) or "" for key in ("name", "arguments")}
    return {"id": str(call.get("id") or ""), "type": "function", "function": function}
