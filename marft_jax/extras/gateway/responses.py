"""Responses of OpenAI's API, which the server does not store."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from marft_jax.extras.gateway.answers import Answer, Choice, Parted, usage
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.protocol import Call, call_of, read_object, refuse_unless_neutral
from marft_jax.plugins import shown

_NEUTRAL: dict[str, Sequence[Any]] = {
    "background": (False,),
    "conversation": (),
    "previous_response_id": (),
    "prompt": (),
    "n": (1,),
}
_SHOWN = "instructions metadata temperature top_p max_output_tokens max_tool_calls tool_choice "
_SHOWN += "tools parallel_tool_calls reasoning text top_logprobs truncation user"
_DEFAULTS = {"tool_choice": "auto", "tools": [], "parallel_tool_calls": True, "background": False}
_DEFAULTS |= {"truncation": "disabled", "presence_penalty": 0.0, "frequency_penalty": 0.0}


def read(body: bytes) -> Answer:
    """Reads the body of a response; raises ``ApiError``, 400, with the field that is wrong."""
    fields = read_object(body)
    refuse_unless_neutral(fields, _NEUTRAL)
    given = {**fields, "max_tokens": None, "stream_options": None}
    given["max_completion_tokens"] = fields.get("max_output_tokens")
    given["logprobs"] = "message.output_text.logprobs" in _expected(fields, "include", list, [])
    given["response_format"] = _form(_expected(fields, "text", dict, {}).get("format"))
    given["tools"] = [_tool(tool) for tool in _expected(fields, "tools", list, [])]
    given["tool_choice"] = _choice(fields.get("tool_choice"))
    system = _expected(fields, "instructions", str, "")
    given["messages"] = [{"role": "system", "content": system}] * bool(system) + _messages(fields)
    return _Response(call_of(given), fields)


def _expected(fields: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = default if fields.get(name) is None else fields[name]
    if not isinstance(value, kind):
        what = {list: "a list", dict: "an object", str: "a text"}[kind]
        raise ApiError(400, f"{name}: expected {what}, got {shown(value)}", name)
    return value


def _messages(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Messages of a chat completion; calls side by side belong to one message."""
    items, found = fields.get("input"), list[dict[str, Any]]()
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    for item in _expected({"input": items}, "input", list, None):
        kind = item.get("type") or "message" if isinstance(item, dict) else None
        if kind == "message":
            found.append(item)
        elif kind == "function_call":
            own = {"id": item.get("call_id"), "function": item}
            if not (found and found[-1].get("tool_calls")):
                before = found and found[-1].get("role") == "assistant"
                found.append(dict(found.pop() if before else {"role": "assistant"}, tool_calls=[]))
            found[-1]["tool_calls"].append(own)
        elif kind == "function_call_output":
            answer = {"role": "tool", "tool_call_id": item.get("call_id")}
            found.append(answer | {"content": item.get("output")})
        elif kind != "reasoning":  # a template shows no earlier thoughts
            what = "message, function_call, function_call_output or reasoning"
            raise ApiError(
                400, f"input: expected items of the type {what}, got {shown(item)}", "input"
            )
    return found


def _form(given: Any) -> Any:
    if isinstance(given, dict) and given.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": given}
    return given


def _tool(given: Any) -> Any:
    if not isinstance(given, dict) or given.get("type") != "function":
        raise ApiError(400, f"tools: expected type: function, got {shown(given)}", "tools")
    return {"type": "function", "function": {k: v for k, v in given.items() if k != "type"}}


def _choice(given: Any) -> Any:
    match given:
        case {"type": "function", "name": _}:
            return {"type": "function", "function": given}
        case {"type": "allowed_tools", "tools": list(tools)}:
            some = {**given, "tools": [{"function": tool} for tool in tools]}
            return {"type": "allowed_tools", "allowed_tools": some}
    return given


class _Response(Answer):
    """Events of a response, of which the last one has it whole."""

    prefix = "resp"

    def __init__(self, call: Call, fields: Mapping[str, Any]):
        super().__init__(call)
        self._shown = {name: fields.get(name) for name in _SHOWN.split()}
        self._shown |= {k: v for k, v in _DEFAULTS.items() if self._shown.get(k) is None}
        self._id = self._id.replace("-", "_")
        self._items: list[dict[str, Any]] = []
        self._text: str | None = None  # so far, of the last item, while it is open
        self._numbers = itertools.count()

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        *_, last = self.ends(choices)
        return last["response"]

    def piece(
        self, index: int, thought: str, text: str, end: Choice | None = None
    ) -> Iterator[dict[str, Any]]:
        if not self._begun:
            self._begun.add(index)
            for name in ("created", "in_progress"):
                yield self._event(name, response=self._response("in_progress"))
        for kind, more in (("reasoning", thought), ("message", text)):
            if more:
                yield from self._write(kind, more)

    def ends(
        self, choices: Sequence[Choice], sent: Sequence[Parted] = ()
    ) -> Iterator[dict[str, Any]]:
        [choice] = choices
        (thought, text), now = sent[0] if sent else ("", ""), self.parted(choice.text)
        yield from self.piece(0, now[0][len(thought) :], now[1][len(text) :])
        yield from self._close(self._rows(choice) if self.call.logprobs else None)
        for call in choice.calls:
            yield from self._call_of(call)
        tokens = usage(choices, 1)
        used: dict[str, Any] = {"input_tokens": tokens["prompt_tokens"]}
        used |= {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
        used |= {"output_tokens": tokens["completion_tokens"]}
        used |= {"output_tokens_details": {"reasoning_tokens": 0}}
        used |= {"total_tokens": tokens["total_tokens"]}
        why = {"incomplete_details": {"reason": "max_output_tokens"}} if choice.length else {}
        more = {"turns": choice.turns} if choice.turns else {}
        response = self._response("incomplete" if choice.length else "completed")
        yield self._event("completed", response=response | {"usage": used} | why | more)

    def _write(self, kind: str, more: str) -> Iterator[dict[str, Any]]:
        if self._text is not None and self._items[-1]["type"] != kind:
            yield from self._close()
        if self._text is None:
            own = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._add(kind, content=[], **own)
            yield self._event("content_part.added", **self._place, part=self._part(""))
            self._text = ""
        self._text += more
        logprobs = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"{self._name}.delta", **self._place, delta=more, **logprobs)

    def _close(self, rows: Sequence[Mapping[str, Any]] | None = None) -> Iterator[dict[str, Any]]:
        """Ends the message or the thought that is open."""
        if (text := self._text) is None:
            return
        logprobs = {"logprobs": rows or []} if self._items[-1]["type"] == "message" else {}
        yield self._event(f"{self._name}.done", **self._place, text=text, **logprobs)
        part, self._text = self._part(text, rows), None
        yield self._event("content_part.done", **self._place, part=part)
        yield self._done(content=[part])

    def _call_of(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        function = call["function"]
        yield from self._add(
            "function_call", name=function["name"], arguments="", call_id=call["id"]
        )
        text, name = function["arguments"], "function_call_arguments"
        place = {k: v for k, v in self._place.items() if k != "content_index"}
        yield self._event(f"{name}.delta", **place, delta=text)
        yield self._event(f"{name}.done", **place, arguments=text, name=function["name"])
        yield self._done(arguments=text)

    @property
    def _name(self) -> str:
        return "output_text" if self._items[-1]["type"] == "message" else "reasoning_text"

    @property
    def _place(self) -> dict[str, Any]:
        index = len(self._items) - 1
        return {"item_id": self._items[-1]["id"], "output_index": index, "content_index": 0}

    def _part(self, text: str, rows: Any = None) -> dict[str, Any]:
        own = {"type": self._name, "text": text}
        is_message = self._items[-1]["type"] == "message"
        return own | ({"annotations": [], "logprobs": rows} if is_message else {})

    def _add(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        own = {"type": kind, "id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress"}
        self._items.append(own | fields)
        index = len(self._items) - 1
        yield self._event("output_item.added", item=self._items[-1], output_index=index)

    def _done(self, **fields: Any) -> dict[str, Any]:
        self._items[-1] = self._items[-1] | fields | {"status": "completed"}
        index = len(self._items) - 1
        return self._event("output_item.done", item=self._items[-1], output_index=index)

    def _event(self, event: str, **fields: Any) -> dict[str, Any]:
        number = next(self._numbers)
        return {"type": f"response.{event}", "sequence_number": number, **fields}

    def _response(self, status: str) -> dict[str, Any]:
        own = {"id": self._id, "object": "response", "created_at": self._created}
        own |= {"model": self.call.model, "status": status, "output": [*self._items]}
        own |= {"error": None, "incomplete_details": None, "usage": None}
        return own | self._shown
