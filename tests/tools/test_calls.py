"""Calls of tools in what is sampled, in the forms of chat templates."""

from __future__ import annotations

import json

import pytest
from programs import BARE, TAGGED, with_template

from marft_jax.models.tokenizers.tokenizer import ByteTokenizer
from marft_jax.tools import find_calls, for_model

ADD = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]


def found_in(text, tools, tokenizer):
    return find_calls(tokenizer.encode(text), tools, tokenizer)


CALL = '{"name": "add", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("template", "text", "content", "calls"),
    [
        (TAGGED, f"so <tool_call>{CALL}</tool_call>", "so", ["add"]),
        (TAGGED, f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>", "", ["add"] * 2),
        (TAGGED, f"<tool_call>{CALL[:-1]}", f"<tool_call>{CALL[:-1]}", []),
        (TAGGED, "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
        (TAGGED, CALL, CALL, []),
        (TAGGED, f"<tool_call>{CALL}</tool_call>".replace("add", "sub"), "", ["sub"]),
        (BARE, CALL.replace("add", "sub"), "", ["sub"]),
        (BARE, '{"name": "sub", "age": 3}', '{"name": "sub", "age": 3}', []),
        (BARE, f"[TOOL_CALLS] [{CALL}]", "", ["add"]),
        (BARE, f"<|python_tag|>{CALL}", "", ["add"]),
        (BARE, f"[{CALL}, {CALL}]", "", ["add"] * 2),
        (BARE, f"so {CALL}", f"so {CALL}", []),
    ],
)
def test_calls_are_found_in_the_form_of_the_template(template, text, content, calls):
    found = found_in(text, ADD, with_template(template))
    assert (found[0], [call.name for call in found[1]]) == (content, calls)
    assert all(json.loads(call.arguments) == {"a": 1} for call in found[1])


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("", {}), (', "arguments": null', {}), (', "arguments": ""', {}),
        (', "arguments": "null"', {}), (', "parameters": null', {}),
        (', "arguments": null, "parameters": {"a": 1}', {"a": 1}),
        (', "arguments": "{\\"a\\": 1}"', {"a": 1}), (', "arguments": "a = 1"', None),
        (', "arguments": "[1]"', None), (', "arguments": [1]', None), (', "arguments": 0', None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("template", [TAGGED, BARE])
def test_arguments_may_be_absent_or_a_text(template, given, read):
    call = f'{{"name": "add"{given}}}'
    call = f"<tool_call>{call}</tool_call>" if template == TAGGED else call
    content, calls = found_in(call, ADD, with_template(template))
    assert [json.loads(one.arguments) for one in calls] == ([] if read is None else [read])
    assert content == (call if read is None else "")


TAG = f"<tool_call>{CALL}</tool_call>"


def written(value, **how):
    return json.dumps({"name": "add", "arguments": {"a": value}}, **how)


HELD = (  # texts of an argument
    "echo '</tool_call>' >> notes.md", "<tool_call>", "</think> <think>", "{ [ } ] }{",
    '"quoted" \\" \\\\', "```json\n{}\n```", "one\ntwo\tthree\r\n", "[TOOL_CALLS]",
    written("nested"), TAG,
)  # fmt: skip


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    ("template", "form", "content", "number"),
    [
        (TAGGED, "<tool_call>{}</tool_call>", "", 1),
        (TAGGED, "so\n<tool_call>\n{}\n</tool_call>\n" + TAG, "so", 2),
        (TAGGED, TAG + "<tool_call>{}", "", 2),
        (TAGGED, "<think>or " + TAG + "</think><tool_call>{}</tool_call>", None, 1),
        (BARE, "{}", "", 1),
        (BARE, "[{}]", "", 1),
        (BARE, "<think>so</think>\n{}", "<think>so</think>", 1),
        (BARE, f"<think>{CALL}?</think>\n{{}}", f"<think>{CALL}?</think>", 1),
    ],
)
def test_a_call_ends_with_its_json_whatever_its_texts_hold(
    template, form, content, number, held, raw
):
    own = written(held)
    if raw:  # control characters as they are
        own = own.replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r")
    found, calls = found_in(form.replace("{}", own), ADD, with_template(template))
    assert len(calls) == number and (content is None or found == content)
    assert {"a": held} in [json.loads(call.arguments) for call in calls]


BROKEN = '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>'


@pytest.mark.parametrize(
    ("template", "text", "content", "number"),
    [
        (TAGGED, f"<tool_call>{CALL}{CALL}</tool_call>", "", 2),
        (TAGGED, f"<tool_call>{CALL}, {CALL}</tool_call>", "", 2),
        (TAGGED, f"<tool_call>[{CALL}, {CALL}]</tool_call>", "", 2),
        (TAGGED, f"<tool_call>{CALL}<tool_call>{CALL}", "", 2),
        (TAGGED, f"<tool_call>{CALL}}}</tool_call>", "", 1),  # a bracket too many
        (TAGGED, f"<tool_call>\n```json\n{CALL}\n```\n</tool_call>", "", 1),
        (TAGGED, f"<tool_call>{CALL}</tool_call>{CALL}", CALL, 1),
        (TAGGED, f"{TAG} so", "so", 1),
        (TAGGED, f"{BROKEN}{TAG}", BROKEN, 1),
        (TAGGED, f'<tool_call>[{CALL}, 5, {{"a": 1}}]</tool_call>', "", 1),
        (TAGGED, f"{TAG}<tool_call>{CALL[:20]}", f"<tool_call>{CALL[:20]}", 1),
        (BARE, f"{CALL}{CALL}", "", 2),
        (BARE, f"{CALL}; {CALL}", "", 2),
        (BARE, f"```json\n{CALL}\n```", "", 1),
        (BARE, f"[TOOL_CALLS]{CALL}{CALL}", "", 2),
        (BARE, f"{CALL}{CALL[:20]}", CALL[:20], 1),
        (BARE, f"{CALL} is my call", "is my call", 1),
        (BARE, "{" * 90 + "}" * 90, "{" * 90 + "}" * 90, 0),
        (BARE, "</think>{", "</think>{", 0),
    ],
)
def test_a_broken_call_costs_itself_alone(template, text, content, number):
    found, calls = found_in(text, ADD, with_template(template))
    assert (found, [json.loads(call.arguments) for call in calls]) == (content, [{"a": 1}] * number)


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        (r'{"a": "half \ud83d"}', {"a": "half \ufffd"}),
        (r'{"\udc00": 1}', {"\ufffd": 1}),
        (r'{"a": "\ud83d\ude00"}', {"a": "😀"}),
        (json.dumps(json.dumps(json.dumps({"a": "1\n2"}))), {"a": "1\n2"}),
        ('"{\\"a\\": \\"1\n2\\"}"', {"a": "1\n2"}),
    ],
)
@pytest.mark.parametrize("template", [TAGGED, BARE])
def test_the_arguments_of_a_call_are_json_that_any_client_takes(template, arguments, read):
    call = f'{{"name": "add", "arguments": {arguments}}}'
    text = f"<tool_call>{call}</tool_call>" if template == TAGGED else call
    _, [own] = found_in(text, ADD, with_template(template))
    assert json.loads(own.arguments.encode()) == read


QUOTED = TAG.replace("1", '"<think>"')


@pytest.mark.parametrize(
    ("text", "content", "number"),
    [
        (f"<think>or {TAG}?</think>4", None, 0),
        (f"<think>or {TAG}?</think>\n{TAG}", f"<think>or {TAG}?</think>", 1),
        (f"or {TAG}?</think>{TAG}", f"or {TAG}?</think>", 1),  # the prompt opened it
        (f"<think>or {TAG}", None, 0),  # cut off
        (f"{TAG}<think>a</think>{TAG}<think>{TAG}", f"<think>a</think><think>{TAG}", 2),
        (f"{QUOTED}{QUOTED}", "", 2),
        (f"<think>{QUOTED.replace('<think>', '')}</think>{QUOTED}", None, 1),
    ],
)
def test_what_is_thought_is_no_call(text, content, number):
    found = found_in(text, ADD, with_template(TAGGED))
    assert len(found[1]) == number
    assert content is None and (number or found[0] == text) or found[0] == content


def function(name, **properties):
    schema = {"type": "object", "properties": properties}
    own = {"name": name, "description": f"Does {name}.", "parameters": schema}
    return {"type": "function", "function": own}


TOOLS = [function("say", text={"type": "string"}), function("add", a={"type": "integer"})]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('so\n```call add\n{"a": 1}\n```', "so", [("add", '{"a": 1}')]),
        ("```call say\na\nb\n```", "", [("say", '{"text": "a\\nb"}')]),
        ('```call say\n{"text": "a"}\n```', "", [("say", '{"text": "a"}')]),
        ('```call say\n{"a": 1}\n```', "", [("say", '{"text": "{\\"a\\": 1}"}')]),
        ("```call sub\n```\n```call add\n1\n```", "", [("sub", "{}"), ("add", "1")]),
        ("```call add\n{}", "```call add\n{}", []),
        ('```call add\n{"a": "1\n\t2"}\n```', "", [("add", '{"a": "1\\n\\t2"}')]),
        ('```call add\n{"a": "\\ud83d"}\n```', "", [("add", '{"a": "\ufffd"}')]),
        ("```python\n1\n```", "```python\n1\n```", []),
        ("<think>\n```call say\na\n```\n</think>4", None, []),
    ],
)
def test_a_template_without_tools_has_calls_as_fenced_blocks(text, content, calls):
    found = found_in(text, TOOLS, ByteTokenizer())
    assert found == (text if content is None else content, calls)


def test_without_tools_in_the_template_the_system_prompt_describes_them():
    tokenizer = ByteTokenizer()
    call = {"id": "a", "function": {"name": "add", "arguments": '{"a": 1}'}}
    talk = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "tool", "content": "3"},
    ]
    messages, tools = for_model(talk, TOOLS, tokenizer)
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"] and not tools
    for text in ("```call say\ntext\n```\nDoes say.", '```call add\n{"a": "integer"}\n```'):
        assert text in messages[0]["content"]
    assert messages[2]["content"].endswith('```call add\n{"a": 1}\n```')
    assert messages[3]["content"] == "add: 2\nanswer: 3"
    system = {"role": "system", "content": "Solve."}
    [first, *_], _ = for_model([system, *talk], TOOLS, tokenizer)
    assert first["content"].startswith("Solve.\n\n") and "call say" in first["content"]
    assert for_model(talk[2:], TOOLS, tokenizer, begins=False)[0] == messages[3:]
