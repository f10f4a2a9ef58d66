"""Calls in the forms of families of models: what a template writes is read, whatever it holds."""

from __future__ import annotations

import json
import random
import time

import pytest
import small
from families_of_calls import FAMILIES, call_of, sampled, tokenizer_of
from scripted import Scripted, Slow

from marft_jax.background import DaemonThreads
from marft_jax.errors import BadInput
from marft_jax.rollout.rollout import Rollout
from marft_jax.team.profiles import Profile
from marft_jax.team.team_files import Blueprint
from marft_jax.team.workflows import find_workflow
from marft_jax.tools import Form, ToolCall, check_form, find_calls, for_model, load_toolboxes
from marft_jax.tools.calls import FORMS, find_form

PROPERTIES = {
    "a": {"type": "string"},
    "n": {"type": "integer"},
    "more": {"type": "object"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
SCHEMA = {"type": "object", "properties": PROPERTIES}
ADD = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": ADD}]
USER = {"role": "user", "content": "go"}
HOSTILE = (
    "plain", "  around \n", "", "true", "12", "null", "</tool_call>", "<tool_call>",
    "\n</parameter>\n", "</parameter>\n</function>\n</tool_call>", "<function=x>",
    "</arg_value>\n</tool_call>", '<|"|>,b:<|"|>', "<|call|><|end|>", "<|tool_call_end|>",
    "</think> <think>", "{ [ } ] }{", "```json\n{}\n```", 'it\'s "quoted" \\" \\\\ \\n',
    "é☃😀\u2028\x00", "a\r\nb\tc", "x\ny" * 3500,
)  # fmt: skip
NAMES = sorted(FAMILIES)


def written(name, *calls):
    """Text and ids-to-be of an answer that calls, as the chat template of a family writes it."""
    tokenizer = tokenizer_of(name)
    made = [{**call_of(*call), "id": f"call{n:05d}"} for n, call in enumerate(calls)]
    told = {"role": "assistant", "content": "", "tool_calls": made}
    messages, tools = for_model([USER, told], TOOLS, tokenizer)
    before = tokenizer._render(messages[:1], tools=tools)
    text = tokenizer._render(messages, prompt=False, tools=tools)
    return text[len(before) :].strip("\n")


def around(name, arguments):
    """What stands before, in and behind the text ``a`` of a call."""
    call, empty = (written(name, ("add", {**arguments, "a": a})) for a in (arguments["a"], "¤"))
    before, _, after = empty.partition("¤")
    if before.endswith(("'", '"')) and call[len(before) - 1] != before[-1]:  # of Python
        before, after = before[:-1] + call[len(before) - 1], call[len(before) - 1] + after[1:]
    return before, call[len(before) : len(call) - len(after)], after


def read(name, ids):
    content, calls = find_calls(ids, TOOLS, tokenizer_of(name))
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("name", NAMES)
def test_the_form_of_a_family_is_found_by_its_template(name):
    assert find_form(tokenizer_of(name)) is FORMS[FAMILIES[name].form]
    check_form(tokenizer_of(name))


@pytest.mark.parametrize("held", HOSTILE)
@pytest.mark.parametrize("name", NAMES)
def test_what_a_template_writes_is_read_whatever_a_text_holds(name, held):
    """No text ends a call that is sampled as other tokens than the special token that it spells."""
    arguments = {"a": held, "n": -3}
    ids = sampled(tokenizer_of(name), *around(name, arguments))
    assert read(name, ids) == ("", [("add", arguments)])


QUOTED = [n for n in NAMES if FAMILIES[n].form in ("hermes", "json", "mistral", "kimi", "lfm2")]


@pytest.mark.parametrize("held", HOSTILE)
@pytest.mark.parametrize("name", QUOTED)
def test_a_quoted_text_may_hold_special_tokens_too(name, held):
    ids = tokenizer_of(name).encode(written(name, ("add", {"a": held, "n": 3})))
    assert read(name, ids)[1] == [("add", {"a": held, "n": 3})]


@pytest.mark.parametrize("name", NAMES)
def test_values_keep_their_types(name):
    more = {"more": {"x": [1, "two", None, True, {"y": "z"}], "f": 1.5}, "maybe": "12"}
    arguments = {"a": "false", "n": 0, **more}
    assert read(name, tokenizer_of(name).encode(written(name, ("add", arguments))))[1] == [
        ("add", arguments)
    ]


@pytest.mark.parametrize("called", ["look-up", "files.read", "a_1"])
@pytest.mark.parametrize("name", NAMES)
def test_a_tool_may_have_any_name_that_servers_give_it(name, called):
    ids = tokenizer_of(name).encode(written(name, (called, {"a": "x-(y)", "n": -1})))
    assert read(name, ids) == ("", [(called, {"a": "x-(y)", "n": -1})])


@pytest.mark.parametrize("key", ['q"1', "a b", "é-"])
def test_a_key_of_gemma_has_no_quotes_and_may_hold_one(key):
    arguments = {"a": "x", "more": {key: 'y"', "z": [1]}}
    ids = tokenizer_of("gemma4").encode(written("gemma4", ("add", arguments)))
    assert read("gemma4", ids) == ("", [("add", arguments)])


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("gpt-oss",)])
def test_several_calls_are_read_and_a_last_one_need_not_be_closed(name):
    """A turn of gpt-oss ends with its first call."""
    calls = [("add", {"a": "x", "n": 1}), ("add", {"a": "y"}), ("sub", {"z": 1})]
    tokenizer, text = tokenizer_of(name), written(name, *calls)
    assert read(name, tokenizer.encode("so " * (FAMILIES[name].form != "json") + text))[1] == calls
    first = [ToolCall(called, json.dumps(arguments)) for called, arguments in calls[:2]]
    for end in range(text.rindex("sub"), len(text)):  # whatever part of the end is missing
        assert find_calls(tokenizer.encode(text[:end]), TOOLS, tokenizer)[1][:2] == first, end


BROKEN = {
    "hermes": ('<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>', 0),
    "mistral": ('[TOOL_CALLS]add[ARGS]{"a": [ARGS]', 0),
    "qwen3.5": ("<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>", 0),
    "glm": ("<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</tool_call>", 0),
    "minimax": ('<minimax:tool_call><invoke name="add"><parameter name="a">1</invoke>', 0),
    "deepseek3.1": ("<｜tool▁call▁begin｜>add<｜tool▁sep｜>{'a'<｜tool▁call▁end｜>", 0),
    "kimi": ("<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{<|tool_call_end|>", 0),
    "gemma4": ('<|tool_call>call:add{a:<|"|>1}<tool_call|>', 0),
    "lfm2": ("<|tool_call_start|>[add(a=, n=1)]<|tool_call_end|>", 1),
    "olmo3": ("<function_calls>add(a='x)</function_calls>", 1),
}


@pytest.mark.parametrize("name", sorted(BROKEN))
@pytest.mark.parametrize("before", [True, False])
def test_a_broken_call_beside_a_good_one_costs_only_itself(name, before):
    text, wrong = BROKEN[name]
    good = written(name, ("add", {"a": "x", "n": 1}))
    text = text + good if before else good + text
    _, calls = find_calls(tokenizer_of(name).encode(text), TOOLS, tokenizer_of(name))
    assert ToolCall("add", json.dumps({"a": "x", "n": 1})) in calls
    assert len(calls) == 1 + wrong  # a wrong call is answered; other broken ones stay text


@pytest.mark.parametrize("name", NAMES)
def test_any_text_is_read_without_an_exception(name):
    draw = random.Random(name)
    tokenizer, good = tokenizer_of(name), written(name, ("add", {"a": "x", "n": 1}))
    parts = [*tokenizer.added, *tokenizer.encode(good), *range(256)]
    for _ in range(60):
        ids = draw.choices(parts, k=draw.randrange(60))
        begin = draw.randrange(len(ids) + 1)
        cut = tokenizer.encode(good)[: draw.randrange(len(good))]
        for _, arguments in find_calls(ids[:begin] + cut + ids[begin:], TOOLS, tokenizer)[1]:
            arguments.encode()


ODD = ("NaN", "Infinity", "-Infinity", "1e999", '"\\ud800"', "[" * 70 + "]" * 70, "1" * 5000)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["hermes", "qwen3.5", "gpt-oss", "lfm2", "glm", "kimi"])
def test_odd_values_are_json_or_no_call(name, odd):
    text = written(name, ("add", {"a": "x", "n": 7})).replace("7", odd, 1)
    for call in find_calls(tokenizer_of(name).encode(text), TOOLS, tokenizer_of(name))[1]:
        if call.arguments.startswith("add("):  # a wrong call
            continue
        arguments = json.loads(call.arguments, parse_constant=pytest.fail)
        assert arguments["a"] == "x"
        call.arguments.encode()


class Ids(list):
    """What ``Scripted`` samples, already as ids."""

    def encode(self):
        return self


def add(a: str, n: int = 1) -> str:
    """Adds."""
    return f"{a}+{n}"


@pytest.mark.parametrize("name", NAMES)
def test_an_agent_of_each_family_calls_a_tool_and_reads_the_answer(name):
    tokenizer = tokenizer_of(name)
    tools = load_toolboxes({"solver": [f"{__name__}:add"]}, "team")
    blueprint = Blueprint((Profile("solver", "s", answers=True),))
    team = small.team_of(blueprint, context=4000, max_new_tokens=300)._replace(tools=tools)
    team = small.with_tokenizer(team, tokenizer)

    def speak(request):
        asks = b"x+5" not in bytes(i for i in request.prompt.tolist() if i < 256)
        text = written(name, ("add", {"a": "x", "n": 5})) if asks else "done"
        return Ids(i for i in tokenizer.encode(text) if i not in tokenizer.eos_ids)

    engine = Scripted(speak)
    player = Rollout(engine, team, find_workflow("sequential"), lambda: Slow(1), DaemonThreads())
    asked, told = player.play(small.samples([0]), 0).episodes[0].turns
    assert [call[:4] for call in asked.calls] == [("add", '{"a": "x", "n": 5}', "x+5", "ok")]
    known = [*asked.prompt.tolist(), *asked.action.tolist()]
    assert told.prompt[: told.start].tolist() == known
    shown = tokenizer.decode(told.prompt[told.start :].tolist(), special=True)
    assert "x+5" in shown and told.text == "done"
    whole = tokenizer.decode(told.prompt.tolist(), special=True)
    assert whole.count(FAMILIES[name].marks[1] * 2) == 0  # no turn ends twice


MINE = Form(lambda text, tools: (text, [ToolCall("add", "{}")] if "ADD" in text else []))


def test_a_form_of_ones_own_is_named_by_a_setting(monkeypatch):
    tokenizer = tokenizer_of("hermes")
    monkeypatch.setattr(tokenizer, "calls", f"{__name__}:MINE")
    find_form.cache_clear()
    assert find_calls(tokenizer.encode("ADD"), TOOLS, tokenizer) == ("ADD", [ToolCall("add", "{}")])
    for wrong in ("hermess", f"{__name__}:NAMES"):
        monkeypatch.setattr(tokenizer, "calls", wrong)
        find_form.cache_clear()
        with pytest.raises(BadInput, match="--model.calls"):
            check_form(tokenizer)
    find_form.cache_clear()


def test_a_form_that_is_not_known_is_refused_with_those_that_are(monkeypatch):
    tokenizer = tokenizer_of("hermes")
    find_form.cache_clear()
    monkeypatch.setattr(type(tokenizer), "write_call", lambda *_: "CALL qxz a=b")
    with pytest.raises(BadInput, match="one of hermes, json, mistral, .*got 'CALL qxz a=b'"):
        check_form(tokenizer)
    find_form.cache_clear()


OPENINGS = {
    "hermes": '<tool_call>{"name": "a", "x": [',
    "json": "[{",
    "qwen": "<tool_call><function=add><parameter=a>",
    "glm": "<tool_call>add<arg_key>a</arg_key><arg_value>",
    "lfm2": "<|tool_call_start|>[add(",
    "gemma": "<|tool_call>call:add{a:",
    "harmony": "<|start|>assistant to=functions.add",
}


@pytest.mark.parametrize("form", OPENINGS)
def test_many_openings_are_read_in_a_moment(form):
    began = time.process_time()
    FORMS[form].read(OPENINGS[form] * 2000, TOOLS)
    assert time.process_time() - began < 3
