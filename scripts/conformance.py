"""Sends some 400 calls to `serve` and to vLLM with the same model, and compares the answers.

    python scripts/conformance.py base FOLDER  # writes the model: the built-in one
    python -m marft_jax.serve --base FOLDER --model.context 1024 --team.max_new_tokens 120
    vllm serve FOLDER --port 8001 ...          # with the flags in VLLM
    python scripts/conformance.py compare --ours http://127.0.0.1:8000 --other http://127.0.0.1:8001

It compares status, fields and their types, and the text where it is greedy. It prints what differs,
but for `MEANT`, and exits with 1 if anything does. `--record FILE` keeps the answers of vLLM for
the tests, and `--recorded FILE` compares with those.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

VLLM = ["--served-model-name", "solver", "--host", "127.0.0.1", "--enforce-eager"]
VLLM += ["--dtype", "float32", "--generation-config", "vllm", "--enable-auto-tool-choice"]
VLLM += ["--tool-call-parser", "hermes", "--logprobs-mode", "processed_logprobs"]
VLLM += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
TEMPLATE = """\
{%- if tools %}<|system|>{% for t in tools %}{{ t.function | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|user|>answer: {{ m.content }}
{%- else %}<|{{ m.role }}|>{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endif %}
{%- if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
ADD = {"name": "add", "description": "adds", "parameters": _SCHEMA, "strict": True}
_TOOL, _SUB = ({"type": "function", "function": {**ADD, "name": n}} for n in ("add", "sub"))
_FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}
_HOT = {"temperature": 2, "seed": 2, "max_tokens": 200, "max_output_tokens": 200}
"""What ends a call of vLLM: greedily the model would write white space for ever."""
_USER = {"role": "user", "content": "1+2+3=?"}
_SYSTEM = {"role": "system", "content": "solve"}
_ASKS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": "x"}'}}
    ],
}
_ANSWERS = {"role": "tool", "tool_call_id": "c1", "content": "3"}
_NUMBERS = [None, 0, 1, 0.5, -1, -2, 1.5, 3, "x", [1]]
_FLAGS = [None, True, False, "x"]
_SAMPLING: dict[str, list[Any]] = {
    "temperature": [None, 0, 0.0, 1, 2.0, -1, "x", [0], True],
    "top_p": _NUMBERS,
    "top_k": _NUMBERS,
    "min_p": _NUMBERS,
    "n": [None, 0, 1, 2, -1, 1.5, "x", True],
    "seed": [None, 0, 7, -1, 2**63 - 1, 2**63, 1.5, "x"],
    "stop": [None, [], "", "=", ["=", ","], [""], [1], "zzz", {}],
    "presence_penalty": [None, 0, 0.0, 1, -3, "x"],
    "frequency_penalty": [None, 0, 1, 3, "x"],
    "repetition_penalty": [None, 1, 1.0, 1.5, 0, "x"],
    "logit_bias": [None, {}, {"49": 5}, {"x": 1}, []],
    "stop_token_ids": [None, [], [61], ["x"], 61],
    "include_stop_str_in_output": _FLAGS,
    "ignore_eos": _FLAGS,
    "min_tokens": [None, 0, 20, -1, "x"],
    "skip_special_tokens": _FLAGS,
    "allowed_token_ids": [None, [49, 257], []],
    "bad_words": [None, [], ["1"], "1"],
    "use_beam_search": [False, True],
    "length_penalty": [1, 1.0, 2.0],
    "truncate_prompt_tokens": [None, 4, -1],
    "prompt_logprobs": [None, 0, 1],
    "structured_outputs": [None, {"choice": ["x", "y"]}],
    "return_token_ids": _FLAGS,
    "user": ["me", 3],
    "unknown": [{"a": 1}],
    "priority": [0, 1],
}
_CHAT: dict[str, list[Any]] = {
    "model": [None, "nobody", "", 3, ["solver"]],
    "messages": [
        None, [], {}, "x", [None], [{}], [_USER, _USER], [_SYSTEM],
        [{"role": "king", "content": "a"}], [{"role": 3, "content": "a"}],
        [{"role": "developer", "content": "solve"}, _USER],
        [{"role": "user", "content": [{"type": "text", "text": "1+2+3=?"}]}],
        [{"role": "user", "content": [{"type": "text", "text": t} for t in ("1+2", "+3=?")]}],
        [{"role": "user", "content": []}], [{"role": "user", "content": None}],
        [{"role": "user", "content": 3}], [{"role": "user", "content": {"a": 1}}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": "1+2+3=?", "name": "me"}],
        [_USER, {"role": "assistant", "content": "6"}, _USER],
        [_USER, {"role": "assistant", "content": "6", "refusal": None, "tool_calls": None}, _USER],
        [_USER, {"role": "assistant"}, _USER], [_USER, {"role": "assistant", "content": "6"}],
        [{"role": "user", "content": ""}], [{"role": "user", "content": "1" * 2000}],
        [{"role": "user", "content": "é€😀 \n"}], [{"role": "tool", "content": "3"}, _USER],
        [_USER, _ASKS, _ANSWERS], [_USER, {**_ASKS, "content": ""}, _ANSWERS],
        [_USER, {"role": "assistant", "tool_calls": []}, _USER],
        [_USER, {"role": "assistant", "tool_calls": "f()"}],
        [_USER, {"role": "assistant", "tool_calls": [{}]}],
    ],
    "max_tokens": [None, 1, 3, 0, -1, -2, 1.5, "x", 10**9],
    "max_completion_tokens": [None, 1, 3, 0, -1, 1.5, "x"],
    "logprobs": [None, True, False, "x", 0, 1],
    "top_logprobs": [None, 0, 2, -1, "x"],
    "stream": _FLAGS,
    "stream_options": [None, {}, {"include_usage": True}, [1], "x"],
    "response_format": [
        None, {"type": "text"}, {"type": "json_object"}, _FORM, {"type": "json_schema"},
        {"type": "yaml"}, {}, "json", {"type": "json_schema", "json_schema": {"name": "a"}},
    ],
    "tools": [None, [], [_TOOL], [_TOOL, _SUB], {}, [{}], [{"type": "function"}], "x", [_TOOL, 3]],
    "tool_choice": [
        "none", "auto", "required", "x", {"type": "function", "function": {"name": "add"}},
    ],
    "parallel_tool_calls": _FLAGS,
    "echo": [False, True],
    "add_generation_prompt": [True, False],
    "continue_final_message": [False, True],
    "chat_template": [None, "{{ messages[0].content }}"],
    "chat_template_kwargs": [None, {}, {"enable_thinking": False}],
    "documents": [None, [{"text": "a"}]],
    "reasoning_effort": [None, "low", "x"],
    "service_tier": ["auto"],
    "metadata": [{"a": "b"}],
    "store": [False],
}  # fmt: skip
_COMPLETIONS: dict[str, list[Any]] = {
    "prompt": [
        None, "1+2+3=?", "", [], [""], ["1+2", "3+4"], [49, 43, 50], [[49, 43], [50]], [300], [-1],
        [1.5], {}, 3, ["a", 3], [[]], "1" * 2000, "é€😀 \n",
    ],
    "max_tokens": [None, 1, 0, -1, "x"],
    "logprobs": [None, 0, 2, -1, True, "x"],
    "echo": _FLAGS,
    "suffix": [None, "a"],
    "best_of": [1],
    "stream": [True],
    "response_format": [_FORM],
    "n": [1, 0],
    "stop": ["="],
    "return_token_ids": [True],
}  # fmt: skip
_ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1+2+3=?"}]}
_RUN = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": "x"}'}
_RAN = {"type": "function_call_output", "call_id": "c1", "output": "3"}
_FLAT = {"type": "function", **ADD}
_RESPONSES: dict[str, list[Any]] = {
    "input": [
        None, "", [], [_USER], [_ITEM], [_SYSTEM, _USER], {}, 3, [3], [{}], [_USER, _RUN, _RAN],
        [{"role": "king", "content": "a"}], [{"type": "x"}],
        [_USER, {**_USER, "role": "assistant"}, _USER],
        [{"role": "developer", "content": "solve"}, _USER],
    ],
    "instructions": [None, "solve", 3],
    "max_output_tokens": [None, 1, 0, -1, "x"],
    "stream": [True],
    "temperature": [1, -1],
    "include": [None, [], ["message.output_text.logprobs"], ["x"], "x"],
    "text": [
        None, {}, {"format": {"type": "text"}}, {"format": {"type": "json_object"}}, "x",
        {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}},
        {"format": {"type": "x"}},
    ],
    "tools": [None, [], [_FLAT], "x", [{}]],
    "previous_response_id": [None, "resp_1"],
    "background": [False, True],
    "metadata": [{"a": "b"}],
    "parallel_tool_calls": [True, False],
    "truncation": ["disabled"],
    "store": [False],
}  # fmt: skip
_MORE = {
    "/chat/completions": [
        {"stream": True, "logprobs": True},
        {"stream": True, "return_token_ids": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "stop": "="},
        {"stream": True, "n": 2, "temperature": 1, "seed": 1},
        {"stream": True, "model": "nobody"},
        {"stream": True, "response_format": _FORM, **_HOT},
        {"logprobs": True, "top_logprobs": 0},
        {"logprobs": True, "top_logprobs": 2},
        {"logprobs": True, "n": 2, "temperature": 1},
        {"n": 2, "temperature": 1, "return_token_ids": True},
        {"tools": [_TOOL], "tool_choice": "required", **_HOT},
        {"tools": [_TOOL], "tool_choice": "required", **_HOT, "stream": True},
        {"tools": [_TOOL], "tool_choice": "none"},
        {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}},
         **_HOT},
        {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "mul"}}},
        {"tools": [_TOOL], "tool_choice": {"type": "function"}},
        {"tools": [_TOOL], "messages": [_SYSTEM, _USER, _ASKS, _ANSWERS]},
        {"tools": [_TOOL], "response_format": _FORM, **_HOT},
    ],
    "/completions": [
        {"stream": True, "logprobs": 0},
        {"stream": True, "prompt": ["1+2", "3+4"]},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "return_token_ids": True},
        {"n": 2, "temperature": 1, "prompt": ["1+2", "3+4"]},
        {"model": "nobody"},
    ],
    "/responses": [
        {"tools": [_FLAT], "tool_choice": "required", **_HOT},
        {"tools": [_FLAT], "tool_choice": "required", **_HOT, "stream": True},
        {"tools": [_FLAT], "tool_choice": {"type": "function", "name": "add"},
         **_HOT},
        {"tools": [_FLAT], "tool_choice": "none"},
        {"tool_choice": "required"},
        {"model": "nobody"},
        {"stream": True, "include": ["message.output_text.logprobs"]},
    ],
}  # fmt: skip
_RAW = [b"", b"{", b"[]", b"null", b"\xff", b'{"a": NaN}', b'"x"']


def calls() -> Iterator[tuple[str, str, bytes]]:
    """Name, path and body of each call."""
    plain = {
        "/chat/completions": {"messages": [_SYSTEM, _USER], "max_tokens": 16},
        "/completions": {"prompt": "1+2+3=?", "max_tokens": 16},
        "/responses": {"input": "1+2+3=?", "instructions": "solve", "max_output_tokens": 16},
    }
    fields = {
        "/chat/completions": _SAMPLING | _CHAT,
        "/completions": _COMPLETIONS,
        "/responses": _RESPONSES,
    }
    for path, own in plain.items():
        shared = {"model": "solver", "temperature": 0, **own}
        changes = [{name: value} for name, values in fields[path].items() for value in values]
        for change in [{}, *changes, *_MORE[path]]:
            name = f"{path} {json.dumps(change, ensure_ascii=False)}"
            if _is_talk(change.get("messages")):  # else an agent's own system prompt comes first
                change = {**change, "messages": [_SYSTEM, *change["messages"]]}
            body = json.dumps({**shared, **change}).encode()
            yield name, path, body
        for raw in _RAW:
            yield f"{path} raw {raw!r}", path, raw


def _is_talk(value: Any) -> bool:
    roles = [m.get("role") if isinstance(m, dict) else None for m in value or [None]]
    return all(role in ("user", "assistant", "tool") for role in roles)


def ask(client: httpx.Client, path: str, body: bytes) -> dict[str, Any]:
    """What is compared of an answer: its status, the types of its fields, and its text."""
    head = {"content-type": "application/json"}
    reply = client.post(f"/v1{path}", content=body, headers=head)
    kind = reply.headers.get("content-type", "").partition(";")[0]
    found: dict[str, Any] = {"status": reply.status_code, "kind": kind}
    if kind == "text/event-stream":
        lines = [line for line in reply.text.split("\n") if line.startswith("data: ")]
        bodies = [line.removeprefix("data: ") for line in lines]
        found["done"] = bodies[-1] == "[DONE]"
        bodies = [json.loads(one) for one in bodies if one != "[DONE]"]
    else:
        bodies = [reply.json()]
    shape = {place: kind for one in bodies for place, kind in _shape(one)}
    found["shape"] = dict(sorted(shape.items()))
    if reply.status_code == 200:
        return found | {"said": _said(bodies)}
    code = bodies[0].get("error", {}).get("code")
    return found | ({"code": code} if isinstance(code, str) else {})


def _shape(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Places of all fields but null ones, with the types of their values."""
    if isinstance(value, dict):
        for name, own in value.items():
            name = re.sub(r"^\d+$", "*", name)
            yield from _shape(own, f"{place}.{name}" if place else name)
    elif isinstance(value, list):
        for own in value:
            yield from _shape(own, f"{place}[]")
    elif value is not None:
        kind = "number" if isinstance(value, int | float) else type(value).__name__
        yield place, "bool" if isinstance(value, bool) else kind


def _said(bodies: list[dict[str, Any]]) -> list[Any]:
    """Texts, calls, reasons to end and used tokens, of a whole answer or of its pieces."""
    if bodies[-1].get("error"):
        return ["an error"]
    if "type" in bodies[-1]:  # events of a response
        bodies = [bodies[-1]["response"]]
    if "output" in bodies[0]:
        [body] = bodies
        parts = [p["text"].strip() for item in body["output"] for p in item.get("content") or []]
        used = body["usage"]["input_tokens"], body["usage"]["output_tokens"]
        calls = [i["arguments"] for i in body["output"] if i["type"] == "function_call"]
        return [parts, [*map(_read, calls)], body["status"], list(used)]
    choices: dict[int, list[Any]] = {}
    for choice in (choice for body in bodies for choice in body["choices"]):
        text, calls, why = choices.get(choice["index"], ["", "", None])
        own = choice.get("message") or choice.get("delta") or choice
        text += own.get("content") or own.get("text") or ""
        calls += "".join(c["function"].get("arguments") or "" for c in own.get("tool_calls") or [])
        choices[choice["index"]] = [text, calls, choice["finish_reason"] or why]
    found: list[Any] = [
        [text.strip(), _read(calls), why] for _, (text, calls, why) in sorted(choices.items())
    ]
    used = next((body["usage"] for body in reversed(bodies) if body.get("usage")), {})
    return [*found, used.get("prompt_tokens"), used.get("completion_tokens")]


def _read(arguments: str) -> Any:
    try:
        return json.loads(arguments or "null")
    except ValueError:
        return arguments


MEANT: dict[str, list[tuple[str, str]]] = {
    "The code of an error is OpenAI's text or null, not the status.": [
        ("", r"(with|without) (error\.(param|code)|detail) |error\.code is str"),
        (r"raw b'.xff'", r"with error\."),
    ],
    "Answers omit `system_fingerprint`, `service_tier`, `stop_reason` and others.": [
        ("", r"without (response\.)?(system_fingerprint|service_tier) "),
        ("", r"without .*(stop_reason|tool_output_tokens) "),
        ("^/responses", r"with logprobs\[\]\.bytes"),
    ],
    "Default sampling is greedy; other sampled texts differ.": [
        (r'"temperature": (null|[12])', "said|with(out)? .*incomplete_details"),
    ],
    "JSON of a schema has spaces, so it has more tokens.": [("_format|json_schema", "said")],
    "Calls without `model` get 404.": [('"model": (null|"")', "status 404")],
    "A call without a system message gets the agent's.": [
        ('"instructions": null', "said"),
    ],
    "`max_tokens` of -1 means no limit; a limit above the agent's is the agent's.": [
        (r'"max_(completion_|output_)?tokens": (-1|10{9})', "status 200"),
    ],
    "A greedy call may ask for several choices, which are equal.": [('"n": 2', "status 200")],
    "Types are strict: 1 is not true.": [
        (r'"(temperature|n|logprobs)": (true|[01])', "status 400"),
    ],
    "Fields without effect are not checked.": [
        (r'"(user|seed|reasoning_effort|include)": ', "status 200"),
        (r'\{"(tools": (\[\]|null)|tool_choice": "auto")\}', "status 200"),
    ],
    "Null means the default; messages may lack content.": [
        (r'": null|"content": null', "status 200"),
    ],
    "Roles are OpenAI's; `input` is a text or a list.": [
        ("king", "status 400"),
        ("developer", "said"),
        (r'"input": \{\}', "status 400"),
    ],
    "Unsupported fields are refused, unless their value has no effect.": [
        ("", "status 400 unsupported_parameter, not (200|404)"),
    ],
    "Message parts are joined without line breaks.": [
        (r'\[\{"type": "text", "text": "1\+2"\}', "said"),
    ],
    "`tool_choice: none` hides tools from prompts.": [('"tool_choice": "none"', "said")],
    "Beside calls, empty content is null.": [
        ("tool_choice|response_format", r"without choices\[\]\.message\.content "),
    ],
    "Responses show only the settings sent.": [
        (
            "^/responses",
            r"without (response\.)?(temperature|top_p|max_output_tokens|top_logprobs) ",
        ),
    ],
}
"""Differences that we mean: why, and patterns of a call's name and of what differs. They stand in
the README of the gateway."""


def differences(name: str, ours: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Lines about what differs, but for what is meant."""
    found: list[str] = []
    if ours["status"] != other["status"]:
        status = f"{ours['status']} {ours.get('code') or ''}".strip()
        found.append(f"status {status}, not {other['status']}")
    elif ours["kind"] != other["kind"] or ours.get("done") != other.get("done"):
        found.append("another kind of stream")
    else:
        a, b = ours["shape"], other["shape"]
        found += [f"without {place} ({b[place]})" for place in b if place not in a]
        found += [f"with {place} ({a[place]})" for place in a if place not in b]
        found += [f"{p} is {a[p]}, not {b[p]}" for p in a if p in b and a[p] != b[p]]
        if ours.get("said") != other.get("said"):
            found.append(f"said {ours.get('said')}, not {other.get('said')}")
    return [line for line in found if not _is_meant(name, line)]


def _is_meant(name: str, line: str) -> bool:
    meant = [pair for pairs in MEANT.values() for pair in pairs]
    return any(re.search(call, name) and re.match(what, line) for call, what in meant)


def record(answers: dict[str, dict[str, Any]]) -> str:
    """Answers as JSON, a line for each, with each shape once."""
    shapes = list({json.dumps(answer["shape"]): None for answer in answers.values()})
    number = {shape: i for i, shape in enumerate(shapes)}
    rows = [
        json.dumps({name: {**answer, "shape": number[json.dumps(answer["shape"])]}})[1:-1]
        for name, answer in answers.items()
    ]
    return "[[\n" + ",\n".join(shapes) + "\n], {\n" + ",\n".join(rows) + "\n}]\n"


def recorded(file: Path) -> dict[str, dict[str, Any]]:
    """Reads the answers of such a file."""
    shapes, rows = json.loads(file.read_text())
    return {name: {**answer, "shape": shapes[answer["shape"]]} for name, answer in rows.items()}


def write_base(folder: Path) -> None:
    import jax.numpy as jnp

    from marft_jax.extras.export import huggingface
    from marft_jax.models.weights.load import load_base
    from marft_jax.settings.config import Model

    base = load_base(Model(base="tiny"), lambda axes, array: jnp.asarray(array))
    huggingface.write_model(folder, base, {}, 1.0, {})
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def ask_all(url: str) -> dict[str, Any]:
    """Answers of all calls."""
    with httpx.Client(base_url=url, timeout=120) as client:
        return {name: ask(client, path, body) for name, path, body in calls()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["base", "compare"])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--ours")
    parser.add_argument("--other")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--recorded", type=Path)
    own = parser.parse_args()
    if own.what == "base":
        write_base(own.folder)
        return 0
    other = recorded(own.recorded) if own.recorded else ask_all(own.other)
    if own.record:
        own.record.write_text(record(other))
    ours = ask_all(own.ours)
    wrong = {name: differences(name, ours[name], other[name]) for name in ours}
    for name, lines in wrong.items():
        for line in lines:
            print(f"{name}: {line}")
    number = sum(map(bool, wrong.values()))
    print(f"{len(ours)} calls, {number} differ", file=sys.stderr)
    return 1 if number else 0


if __name__ == "__main__":
    sys.exit(main())
