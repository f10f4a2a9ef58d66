"""Calls of OpenAI's API as plain values.

Fields that nobody knows are ignored; those that are known and not offered are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from marft_jax.errors import BadInput
from marft_jax.extras.gateway.errors import ApiError
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


def _has_name(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _is_tool(value: Any) -> bool:
    return _has_name(value) and isinstance(value["function"].get("parameters"), dict | None)


def _is_call(value: Any) -> bool:
    return _has_name(value) and isinstance(value["function"].get("arguments"), str | None)


def _is_choice_of_some(value: Any) -> bool:
    match value:
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}:
            return mode in ("auto", "required") and _list_of(_has_name)(tools)
    return False


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_TRUTH = "true or false", lambda v: isinstance(v, bool)
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("stream", "include_usage", "logprobs", "return_token_ids"), _TRUTH),
    "parallel_tool_calls": _TRUTH,
    "model": ("a name", lambda v: isinstance(v, str)),
    "messages": ("a list, not empty", lambda v: isinstance(v, list) and bool(v)),
    "n": (f"1 to {_MOST_CHOICES}", lambda v: _is_whole(v) and 1 <= v <= _MOST_CHOICES),
    "seed": ("a whole number", _is_whole),
    **dict.fromkeys(("stream_options", "text"), ("an object", lambda v: isinstance(v, dict))),
    "include": ("a list", _list_of(lambda _: True)),
    "instructions": ("a text", lambda v: isinstance(v, str)),
    "tools": ('a list of {"type": "function", "function": {"name": ...}}', _list_of(_is_tool)),
    "tool_choice": (
        'auto, none, required, {"type": "function", "function": {"name": ...}}, or {"type": '
        '"allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}',
        lambda v: v in ("auto", "none", "required") or _has_name(v) or _is_choice_of_some(v),
    ),
    "tool_calls": (
        'a list of {"function": {"name": ..., "arguments": "{...}"}}',
        _list_of(_is_call),
    ),
}
"""Fields that are read, but those of sampling: what is expected, and the test of a value."""


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


def read_call(body: bytes) -> Call:
    """Reads a chat completion; raises ``ApiError``, 400, with the field that is wrong."""
    return call_of(read_object(body))


def read_object(body: bytes) -> dict[str, Any]:
    """Reads the fields of a call."""
    try:
        fields = foreign.loads(body.decode())
    except ValueError as error:
        raise ApiError(400, f"expected JSON: {error}"[:200]) from None
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
    chosen, mode, given = names, field(fields, "tool_choice", "auto"), fields.get("tool_choice")
    match mode:
        case {"allowed_tools": {"mode": mode, "tools": some}}:
            chosen = tuple(tool["function"]["name"] for tool in some)
        case {"function": {"name": name}}:
            chosen, mode = (name,), "named"
    if mode == "none":
        return (), ()
    if mode != "auto" and not chosen or not {*chosen} <= {*names}:
        known = ", ".join(names) or "none"
        what = f"tool_choice: expected one of the tools ({known}), got {shown(given)}"
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
    try:
        load_extra("form.check")(text, name)
    except BadInput as error:
        raise ApiError(400, str(error), name) from None
    return text


def field(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    """Reads and checks a field; null is the default."""
    value = default if fields.get(name) is None else fields[name]
    value = _MINUS_ONE[name] if value == -1 and name in _MINUS_ONE else value
    kind = "max_new_tokens" if name in _MOST_TOKENS else name
    if kind in SAMPLING:
        try:
            return None if value is None else checked(name, SAMPLING[kind], value)
        except BadInput as error:
            raise ApiError(400, str(error), name) from None
    expected, fits = _FIELDS[name]
    if not (value is None or fits(value)):
        raise ApiError(400, f"{name}: expected {expected}, got {shown(value)}", name)
    return value


def _sampling(fields: Mapping[str, Any]) -> dict[str, Any]:
    stop = fields.get("stop")
    stop = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else stop
    fields = {**fields, "stop": None if stop == () else stop}
    names = [name for name in SAMPLING if name != "max_new_tokens"]
    found = {name: field(fields, name, None) for name in names}
    most = [field(fields, name, None) for name in _MOST_TOKENS]
    found["max_new_tokens"] = next((number for number in most if number is not None), None)
    return {name: value for name, value in found.items() if value is not None}


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
    own: dict[str, Any] = {"role": _ROLES[role], "content": content}
    if role == "tool":
        own["tool_call_id"] = str(message.get("tool_call_id") or "")
    if role == "assistant" and (calls := field(message, "tool_calls", [])):
        own["tool_calls"] = [_call(call) for call in calls]
    return own


def _call(call: Mapping[str, Any]) -> Message:
    function = {key: call["function"].get(key) or "" for key in ("name", "arguments")}
    return {"id": str(call.get("id") or ""), "type": "function", "function": function}
