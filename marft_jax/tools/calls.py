"""The form in which a model writes calls of tools, found by its chat template.

A form is known where parsing the call that the chat template writes gives that call back.
"""

from __future__ import annotations

import functools
import json
import os.path
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from marft_jax.errors import BadInput
from marft_jax.plugins import load_plugin, text_of
from marft_jax.tools import fenced, forms
from marft_jax.tools.fenced import write_block
from marft_jax.tools.forms import BROKEN, Form, Message, ToolCall, Tools, as_object


class CallWriter(Protocol):
    """A tokenizer, as far as calls are concerned.

    Attributes:
        calls: name of the form of calls; "auto": that of the chat template.
    """

    calls: str

    @property
    def added(self) -> Mapping[int, str]:
        """Tokens that a text is first split at, by their ids: special tokens and others."""
        ...

    def write_call(
        self, name: str, arguments: Mapping[str, Any], key: str = "call00000"
    ) -> str | None:
        """Text in which an assistant calls a tool, with the special tokens of the call; None where
        the template has no tools."""
        ...

    def spell(self, ids: Sequence[int], mark: str) -> str:
        """Text of sampled ids with all special tokens. The mark stands behind the first character
        of whatever is spelled like a special token, but is none."""
        ...

    def show(self, text: str, mark: str) -> str:
        """What ``decode`` gives of the ids of a spelled text."""
        ...


def find_calls(
    ids: Sequence[int], tools: Tools, tokenizer: CallWriter, form: str = ""
) -> tuple[str, list[ToolCall]]:
    """Finds calls in what was sampled; returns its text without them, and the calls.

    Args:
        tools: those that the agent has. A text may call others, too.
        form: of the text (``Request.form``), which decides if it is a call; "": any text.
    """
    text, calls = tokenizer.spell(ids, BROKEN).strip(), list[ToolCall]()
    may_call = not form or any(opening in text for opening in openings_of(form))
    if tools and may_call and (model_form := find_form(tokenizer)) is not None:
        text, calls = model_form.read(text, tools)
    plain = [(text_of("a call", part.replace(BROKEN, "")) for part in call) for call in calls]
    return tokenizer.show(text, BROKEN), [ToolCall(*call) for call in plain]


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
        read = as_object(arguments)
        function = {"name": name, "arguments": arguments if read is None else read}
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
    form = find_form(tokenizer) if tools or has_calls else None
    if form is not None and form.write is not None:
        messages, tools = form.write(messages, tools, begins)
    return [*map(for_template, messages)], tools


def _as_python(
    messages: Sequence[Message], tools: Tools, begins: bool
) -> tuple[list[Message], Tools]:
    """Writes calls into the texts, because templates of LFM2 leave them out or do not quote."""
    rewritten = list[Message]()
    for message in messages:
        texts = []
        for function in (call["function"] for call in message.get("tool_calls") or ()):
            values = as_object(function["arguments"]) or {}
            arguments = ", ".join(f"{key}={value!r}" for key, value in values.items())
            texts.append(f"{function['name']}({arguments})")
        text = f"<|tool_call_start|>[{', '.join(texts)}]<|tool_call_end|>" if texts else ""
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        rewritten.append({**plain, "content": (message["content"] or "") + text})
    return rewritten, tools


def _with_kimis_ids(
    messages: Sequence[Message], tools: Tools, begins: bool
) -> tuple[list[Message], Tools]:
    """Puts the name of a function into the id of its call: templates of Kimi show nothing else."""
    rewritten, known = list[Message](), dict[str, str]()
    for message in messages:
        if calls := message.get("tool_calls"):
            for call in calls:
                known[call["id"]] = f"functions.{call['function']['name']}:{len(known)}"
            message = {**message, "tool_calls": [{**c, "id": known[c["id"]]} for c in calls]}
        if (old := message.get("tool_call_id")) is not None:
            new = f"functions.{message.get('name', 'tool')}:0"
            message = {**message, "tool_call_id": known.get(old, new)}
        rewritten.append(message)
    return rewritten, tools


FORMS: dict[str, Form] = {
    **forms.FORMS,
    "lfm2": forms.FORMS["lfm2"]._replace(write=_as_python),
    "kimi": forms.FORMS["kimi"]._replace(write=_with_kimis_ids),
    "fenced": forms.FORMS["fenced"]._replace(write=fenced.write),
}
_PROBE = ToolCall("qxz", '{"a": "b"}')
_EXAMPLE = {"qxz": "qxz"}
_EXAMPLE_TEXT = re.compile(r'\{\s*"qxz"\s*:\s*"qxz"\s*\}')


@functools.lru_cache(maxsize=8)
def find_form(tokenizer: CallWriter) -> Form | None:
    """Finds the form in which a model writes calls: that of its chat template, or fenced blocks
    where the template has no tools; None where the template's form is unknown.

    Raises:
        BadInput: the setting names no form.
    """
    if (name := tokenizer.calls) in FORMS:
        return FORMS[name]
    if name != "auto":
        form = load_plugin(name, "--model.calls", ("auto", *FORMS), "FORM")
        if not isinstance(form, Form):
            wanted = f"expected {name} to be a marft_jax.tools.Form"
            raise BadInput(f"--model.calls: {wanted}, got {form!r:.80}")
        return form
    written = _write("qxz", tokenizer, {"a": "b"})
    if written is None or FORMS["fenced"].read(written, ())[1]:
        return FORMS["fenced"]
    by_call = (form for form in FORMS.values() if form.read(written, ())[1] == [_PROBE])
    tokens = {*tokenizer.added.values()}
    by_token = (form for form in FORMS.values() if form.token in tokens)
    return next(by_call, None) or next(by_token, None)


def check_form(tokenizer: CallWriter) -> None:
    """Checks that the form in which the model writes calls is known.

    Raises:
        BadInput: its chat template has tools, but another form of calls.
    """
    if find_form(tokenizer) is None:
        written = tokenizer.write_call("qxz", {"a": "b"})
        raise BadInput(
            f"tools: expected a chat template that writes calls as one of {', '.join(FORMS)}, got "
            f"{written!r:.100}; name a form by --model.calls, or use another base"
        )


def form_with_calls(form: str, tools: Tools, tokenizer: CallWriter) -> str:
    """Form of a text that is one call of one of the tools, or of ``form`` (a JSON schema; "": a
    call alone), see ``Request.form``.

    Raises:
        BadInput: see ``form_of_call``.
    """
    ways = [[json.loads(form)]] if form else []
    return json.dumps([*ways, *(form_of_call(tool, tokenizer) for tool in tools)])


def openings_of(form: str) -> list[str]:
    """Returns the texts with which the calls of a form begin; "" where every text is a call."""
    ways = [way[0] for way in json.loads(form) if isinstance(way, list)]  # a schema alone has none
    texts = [text.lstrip() for text in ways if isinstance(text, str)]
    return texts if len(texts) < len(ways) or not ways else [""]


def form_of_call(tool: Mapping[str, Any], tokenizer: CallWriter) -> list[Any]:
    """Form of a text that is a call of a tool, a way of ``Request.form``. Parameters that the tool
    does not name are left out.

    Raises:
        BadInput: the model's form of calls cannot hold the tool's name, or is none of JSON or tags.
    """
    function, form = tool["function"], find_form(tokenizer)
    name, schema = function["name"], function.get("parameters") or {"properties": {}}
    written = _write(name, tokenizer, _EXAMPLE) or write_block(name, json.dumps(_EXAMPLE))
    if form is None or form.read(written, ())[1] != [ToolCall(name, json.dumps(_EXAMPLE))]:
        raise BadInput(
            f"tools: expected a name that a call of this model holds, got {name!r:.60}; rename it"
        )
    closed = {"type": "object", "additionalProperties": False} if "properties" in schema else {}
    if len(around := _EXAMPLE_TEXT.split(written)) == 2:
        return [around[0], {**closed, **schema}, around[1]]
    if form not in map(FORMS.get, ("qwen", "glm", "minimax", "dsml")):
        raise BadInput(
            "tools: expected a chat template that writes arguments as JSON or between tags, got "
            "another; leave tool_choice at auto, and the schema out"
        )
    return _between_tags(name, schema, tokenizer)


def _between_tags(name: str, schema: Mapping[str, Any], tokenizer: CallWriter) -> list[Any]:
    """A call whose arguments stand between tags; a text in it does not hold ``</``."""
    empty, needed = _write(name, tokenizer, {}) or "", schema.get("required") or ()
    way, begin, end = list[Any](), empty, ""
    for key, parameter in (schema.get("properties") or {}).items():
        written = _write(name, tokenizer, {key: "qxz"}) or ""
        begin = re.sub(r"<[^<>]*\Z", "", os.path.commonprefix([empty, written]))
        end = empty[len(begin) :]
        before, _, after = written[len(begin) : len(written) - len(end)].partition("qxz")
        part = [before, [] if "string" in forms.kinds(parameter) else parameter, after]
        way += part if key in needed else [part]
    return [begin, *way, end]


def _write(name: str, tokenizer: CallWriter, arguments: Mapping[str, Any]) -> str | None:
    """Text of a call; templates of Kimi show the name only in the id, others refuse such an id."""
    text = tokenizer.write_call(name, arguments)
    if text is None or name in text:
        return text
    return tokenizer.write_call(name, arguments, f"functions.{name}:0")
