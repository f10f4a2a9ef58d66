"""Responses of OpenAI's API, which the server does not store."""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from marft_jax.extras.gateway.answers import Answer, Choice, usage
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.protocol import (
    Call,
    call_of,
    field,
    read_object,
    refuse_unless_neutral,
)
from marft_jax.plugins import shown

_NEUTRAL: dict[str, Sequence[Any]] = {
    "background": (False,),
    "conversation": (),
    "previous_response_id": (),
    "prompt": (),
    "n": (1,),
}
_NAMES = {"max_completion_tokens": "max_output_tokens", "messages": "input"}
_NAMES |= {"response_format": "text.format"}
_SHOWN = "instructions metadata temperature top_p max_output_tokens max_tool_calls tool_choice "
_SHOWN += "tools parallel_tool_calls reasoning text top_logprobs truncation user"
_DEFAULTS = {"tool_choice": "auto", "tools": [], "parallel_tool_calls": True, "background": False}
_DEFAULTS |= {"truncation": "disabled", "presence_penalty": 0.0, "frequency_penalty": 0.0}

_ITEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "message": ("msg", {"role": "assistant"}),
    "reasoning": ("rs", {"summary": []}),
    "function_call": ("fc", {}),
}
_PARTS: dict[str, dict[str, Any]] = {
    "message": {"type": "output_text", "annotations": []},
    "reasoning": {"type": "reasoning_text"},
}


def read(body: bytes) -> Answer:
    """Reads the body of a response; raises ``ApiError``, 400, with the field that is wrong."""
    fields = read_object(body)
    refuse_unless_neutral(fields, _NEUTRAL)
    chat = {**fields, "max_tokens": None, "stream_options": None}
    chat["max_completion_tokens"] = fields.get("max_output_tokens")
    chat["logprobs"] = "message.output_text.logprobs" in field(fields, "include", [])
    chat["response_format"] = _form(field(fields, "text", {}).get("format"))
    if isinstance(tools := fields.get("tools"), list):
        chat["tools"] = [*map(_tool, tools)]
    chat["tool_choice"] = _choice(fields.get("tool_choice"))
    chat["messages"] = _messages(fields.get("input"))
    if system := field(fields, "instructions", ""):
        chat["messages"].insert(0, {"role": "system", "content": system})
    try:
        return _Response(call_of(chat), fields)
    except ApiError as error:  # which names fields of a chat completion
        named = _NAMES.get(error.param or "", error.param)
        message = re.sub(rf"{error.param}(\[\d+\])?", str(named), str(error))
        raise ApiError(error.status, message, named, error.code or "") from None


def _messages(given: Any) -> list[dict[str, Any]]:
    """Messages of a chat completion; calls side by side belong to one message."""
    messages = list[dict[str, Any]]()
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    for item in items if isinstance(items, list) else [items]:
        match item:
            case {"type": "function_call"}:
                if not (messages and messages[-1].get("role") == "assistant"):
                    messages.append({"role": "assistant"})
                called = {"id": item.get("call_id"), "function": item}
                calls = [*messages[-1].get("tool_calls", []), called]
                messages[-1] = {**messages[-1], "tool_calls": calls}
            case {"type": "function_call_output"}:
                answer = {"role": "tool", "tool_call_id": item.get("call_id")}
                messages.append(answer | {"content": item.get("output")})
            case {"type": "reasoning"}:  # a template shows no earlier thoughts
                pass
            case {"type": "message"} | {"role": str()}:
                messages.append(item)
            case _:
                what = "messages, function_call, function_call_output or reasoning"
                raise ApiError(400, f"input: expected {what}, got {shown(item)}", "input")
    return messages


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

    prefix = "resp_"

    def __init__(self, call: Call, fields: Mapping[str, Any]):
        super().__init__(call)
        sent = {name: fields[name] for name in _SHOWN.split() if fields.get(name) is not None}
        self._shown = dict.fromkeys(_SHOWN.split()) | _DEFAULTS | sent
        self._items: list[dict[str, Any]] = []
        self._text: str | None = None  # so far, of the last item, while it is open
        self._thought = ""  # that the message which is open turned out to be
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
        if self._thought:
            yield from self._close()
            item = {key: self._items[-1][key] for key in ("id", "status")}
            item["content"] = [{**_PARTS["reasoning"], "text": self._thought}]
            self._items[-1] = item | {"type": "reasoning", **_ITEMS["reasoning"][1]}
            self._thought = ""
        for kind, more in (("reasoning", thought), ("message", text)):
            if more:
                yield from self._write(kind, more)

    def _recast(self, thought: str) -> None:
        self._thought = thought

    def ends(self, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        [choice] = choices
        yield from self.piece(0, *self._rest(0, choice.text))
        status = "incomplete" if choice.length else "completed"
        rows = self._rows(choice) if self.call.logprobs else None
        yield from self._close(rows, "completed" if choice.calls else status)
        for called in choice.calls:
            name, arguments = called["function"]["name"], called["function"]["arguments"]
            yield self._begin("function_call", call_id=called["id"], name=name, arguments="")
            yield self._event("function_call_arguments.delta", **self._at, delta=arguments)
            done = {"arguments": arguments, "name": name}
            yield self._event("function_call_arguments.done", **self._at, **done)
            last = called is choice.calls[-1]
            yield self._end_item(status if last else "completed", arguments=arguments)
        response = self._response(status)
        tokens = usage(choices, 1)
        response["usage"] = {
            "input_tokens": tokens["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": tokens["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tokens["total_tokens"],
        }
        if choice.length:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response |= {"turns": choice.turns} if choice.turns else {}
        yield self._event("completed", response=response)

    def _write(self, kind: str, more: str) -> Iterator[dict[str, Any]]:
        if self._text is not None and self._items[-1]["type"] != kind:
            yield from self._close()
        if self._text is None:
            self._text = ""
            yield self._begin(kind, content=[], **_ITEMS[kind][1])
            part = {**_PARTS[kind], "text": ""}
            yield self._event("content_part.added", **self._at, content_index=0, part=part)
        self._text += more
        delta = {"content_index": 0, "delta": more, "logprobs": []}
        yield self._event(f"{_PARTS[kind]['type']}.delta", **self._at, **delta)

    def _close(
        self, rows: Sequence[Mapping[str, Any]] | None = None, status: str = "completed"
    ) -> Iterator[dict[str, Any]]:
        """Ends the message or the thought that is open."""
        if self._text is None:
            return
        part, at = {**_PARTS[self._items[-1]["type"]], "text": self._text}, self._at
        at["content_index"] = 0
        yield self._event(f"{part['type']}.done", **at, text=self._text, logprobs=rows or [])
        part |= {"logprobs": rows} if "annotations" in part else {}
        yield self._event("content_part.done", **at, part=part)
        self._text = None
        yield self._end_item(status, content=[part])

    @property
    def _at(self) -> dict[str, Any]:
        """Where the last item stands."""
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _begin(self, kind: str, **fields: Any) -> dict[str, Any]:
        id = f"{_ITEMS[kind][0]}_{uuid.uuid4().hex}"
        self._items.append({"type": kind, "id": id, "status": "in_progress"} | fields)
        return self._item_event("added")

    def _end_item(self, status: str, **fields: Any) -> dict[str, Any]:
        self._items[-1] = self._items[-1] | fields | {"status": status}
        return self._item_event("done")

    def _item_event(self, what: str) -> dict[str, Any]:
        number = len(self._items) - 1
        return self._event(f"output_item.{what}", item=self._items[-1], output_index=number)

    def _event(self, event: str, **fields: Any) -> dict[str, Any]:
        number = next(self._numbers)
        return {"type": f"response.{event}", "sequence_number": number, **fields}

    def _response(self, status: str) -> dict[str, Any]:
        body = {"id": self._id, "object": "response", "created_at": self._created}
        body |= {"model": self.call.model, "status": status, "output": [*self._items]}
        return body | {"error": None, "incomplete_details": None, "usage": None} | self._shown
