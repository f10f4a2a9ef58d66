"""Tools: definitions in the prompt, calls in what is sampled, their answers in what comes next."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import openai
import pytest
import small
from programs import LLAMA, MISTRAL, TAGGED, play, user, with_template

from marft_jax.extras.gateway.paths import READS
from marft_jax.models.tokenizers.tokenizer import FALLBACK_TEMPLATE, ByteTokenizer
from marft_jax.tools import find_calls, for_model

ADD = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}
ANOTHER = TAGGED.replace('"name": "', "call: ").replace('", "arg', ", arg")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [(" ", "{}"), ("null", "{}"), (None, "{}"), ('{"zone": "x"}', '{"zone": "x"}'),
     ("x = 1", '"x = 1"')],
)  # fmt: skip
def test_arguments_of_an_earlier_call_are_shown_as_an_object(arguments, shown):
    tokenizer = with_template(TAGGED)
    function = {"name": "clock", "arguments": arguments}
    own = {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}
    body = json.dumps({"model": "solver", "messages": [user("a"), own, user("b")]})
    read = READS["/chat/completions"]
    messages, tools = for_model(read(body.encode()).call.messages, (), tokenizer)
    assert f'"arguments": {shown}}}' in tokenizer.decode(tokenizer.chat(messages, tools))


ONE = '{"name": "add", "arguments": %s}'
FORMS = {
    "tagged": (TAGGED, f"<tool_call>{ONE}</tool_call>", f"<tool_call>{ONE}</tool_call>" * 2),
    "bare": (LLAMA, ONE.replace("arguments", "parameters"), f"[{ONE}, {ONE}]"),
    "marked": (MISTRAL, f"[TOOL_CALLS] [{ONE}]", f"[TOOL_CALLS] [{ONE}, {ONE}]"),
    "fenced": (FALLBACK_TEMPLATE, "```call add\n%s\n```", "```call add\n%s\n```\n" * 2),
}
"""Templates, and how a model calls a tool there once and twice."""


@pytest.mark.parametrize("cut", ["<", "</tool_call"])
def test_a_call_that_is_cut_off_in_its_closing_tag_leaves_no_text(cut):
    written = f"ok <tool_call>{ONE % '{}'}\n{cut}"
    content, calls = find_calls([*written.encode()], [ADD], with_template(TAGGED))
    assert content.strip() == "ok" and len(calls) == 1


def speak(request):
    """Calls a tool where the prompt ends with a question."""
    number = sum(request.key) % 89
    called = FORMS["tagged"][1].replace("%s", json.dumps({"a": number}))
    return f" {called}" if asks(request) else f"  is {number} "


def asks(request):
    asked = bytes(i for i in request.prompt.tolist() if i < 256)
    return asked.removesuffix(b"\nAssistant:").endswith(b"?")


@pytest.mark.parametrize("form", FORMS)
def test_what_was_sampled_is_trained_through_tools_and_calls_side_by_side(form, monkeypatch):
    """What is sampled cannot be had by encoding its text."""
    kinds, (template, once, twice) = set(), FORMS[form]

    def says(request):
        """Calls a tool once, twice, or with broken JSON."""
        number = sum(request.key) % 89
        called = (once, once, twice)[number % 3]
        arguments = json.dumps({"a": number})[number % 7 == 0 :]
        return f" {called.replace('%s', arguments)}" if asks(request) else f"  is {number} "

    async def talk(client, name, first):
        messages = [user(first)]
        for i in range(4):
            talk = dict(model=name, messages=messages, tools=[ADD], max_tokens=199)
            [choice] = (await client.chat.completions.create(**talk)).choices
            messages.append(choice.message)
            calls = choice.message.tool_calls or []
            assert (choice.finish_reason == "tool_calls") == bool(calls)
            kinds.add(len(calls))
            answers = [{"role": "tool", "tool_call_id": c.id, "content": str(i)} for c in calls]
            messages += answers or [user(f"{i}?")]

    async def run(task, client):
        talks = [("planner", "a?"), ("solver", "b?"), ("solver", "c?"), ("solver", "c?")]
        await asyncio.gather(*(talk(client, *one) for one in talks))
        return 1.0

    team = small.team(2, context=4000, max_new_tokens=199)
    team = small.with_tokenizer(team, with_template(template))
    played, engine = play(run, monkeypatch, range(6), says, team=team)
    assert len(engine.requests) == 6 * 16 and kinds == {0, 1, 2}
    for episode in played.episodes:
        assert episode.results[0].info["rewritten"] == 0
        rows = set()
        for turn in episode.turns:
            known = turn.prompt[: turn.start].tobytes()
            assert known == b"" or known in rows, "a prompt that nobody has read and written"
            rows.add(turn.prompt.tobytes() + turn.action.tobytes())
            assert turn.action[-1] == ByteTokenizer.END
        assert len([t for t in episode.turns if t.start == 0]) == 4 and len(episode.turns) == 16
    written = [says(request).encode() for request in engine.requests]
    actions = sorted(bytes(t.action[:-1].tolist()) for e in played.episodes for t in e.turns)
    assert actions == sorted(written)


def test_what_changes_a_conversation_with_tools_starts_a_row_and_is_counted(monkeypatch):
    other = {"type": "function", "function": {"name": "sub", "parameters": {}}}
    wanted = {
        "none": lambda call, tools: None,
        "another tool": lambda call, tools: tools.append(other),
        "its arguments": lambda call, tools: call["function"].update(arguments='{"a": 99}'),
    }

    def run(task, client):
        ask, tools = client.chat.completions.create, [ADD]
        first = ask(model="solver", messages=[user("a?")], tools=tools, max_tokens=99)
        [call] = first.choices[0].message.tool_calls
        call = {"id": call.id, "type": "function", "function": vars(call.function)}
        [*wanted.values()][task](call, tools)
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        answer = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
        ask(model="solver", messages=[user("a?"), said, answer], tools=tools)
        return 1.0

    team = small.team(2, context=4000, max_new_tokens=99)
    team = small.with_tokenizer(team, with_template(TAGGED))
    played, _ = play(run, monkeypatch, range(3), speak, team=team)
    assert [e.results[0].info["rewritten"] for e in played.episodes] == [0, 1, 1]
    assert [e.turns[1].start > 0 for e in played.episodes] == [True, False, False]
    assert played.episodes[0].turns[1].sees == (0,)


def test_another_agent_may_be_handed_the_conversation(monkeypatch):
    """It reads it anew, which is no rewriting; D has whom it read."""

    def run(task, client):
        first = client.chat.completions.create(model="planner", messages=[user("a")])
        said = {"role": "assistant", "content": first.choices[0].message.content}
        client.chat.completions.create(model="solver", messages=[user("a"), said, user("b")])
        return 1.0

    [episode] = play(run, monkeypatch)[0].episodes
    assert episode.results[0].info["rewritten"] == 0
    assert np.array_equal(episode.dependency, [[False, False], [True, False]])


def test_a_call_that_is_required_constrains_what_is_sampled_and_an_answer_may_follow_a_schema(
    monkeypatch,
):
    """Conversations with and without it are the same; what cannot be required is refused."""
    add = {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}
    sub = {"name": "sub"}
    tools = [{"type": "function", "function": own} for own in (add, sub)]
    named = {"type": "function", "function": {"name": "sub"}}

    def some(mode, name="sub"):
        tools = [{"type": "function", "function": {"name": name}}]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    answer = {"type": "json_schema", "json_schema": {"schema": {"type": "boolean"}}}

    def run(task, client):
        def ask(**more):
            talk = {"model": "solver", "messages": [user("a?")], "tools": tools}
            return client.chat.completions.create(**(talk | more)).choices[0]

        for choice in ("auto", "required", named):
            assert ask(tool_choice=choice).finish_reason == "tool_calls"
        ask(response_format=answer)
        ask(response_format=answer, tool_choice="none")
        odd = [{"type": "function", "function": {"name": "a b"}}]
        for more, message in (
            ({"tool_choice": some("auto", "odd")}, r"expected one of the tools \(add, sub\), got"),
            ({"parallel_tool_calls": 3}, "parallel_tool_calls: expected"),
            ({"tool_choice": "any"}, "tool_choice: expected auto, none, required, "),
            ({"tool_choice": named, "tools": tools[:1]}, r"expected one of the tools \(add\), got"),
            ({"tool_choice": "required", "tools": odd}, "expected a name that a call of"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                ask(**more)
        return 1.0

    team = small.team(2, context=4000, max_new_tokens=99)
    call = '```call add\n{"a": 1}\n```'
    played, engine = play(run, monkeypatch, team=team, speak=lambda request: call)
    assert played.episodes[0].results[0].info["rewritten"] == 0
    forms = [json.loads(request.form or "null") for request in engine.requests]
    closed = {"type": "object", "additionalProperties": False}
    adds = ["```call add\n", closed | add["parameters"], "\n```"]
    subs = ["```call sub\n", closed | {"properties": {}}, "\n```"]
    either = [[{"type": "boolean"}], adds, subs]
    assert forms == [None, [adds, subs], [subs], either, {"type": "boolean"}]
    assert len({request.prompt.tobytes() for request in engine.requests[:4]}) == 1


def test_tools_are_refused_where_the_form_of_the_templates_calls_is_unknown(monkeypatch):
    team = small.with_tokenizer(small.team(2, context=300), with_template(ANOTHER))

    def run(task, client):
        ask = client.chat.completions.create
        answer = {"role": "tool", "content": "1", "tool_call_id": "a"}
        for more in ({"tools": [ADD]}, {"messages": [user("a"), answer]}):
            with pytest.raises(openai.BadRequestError, match="template that writes calls as"):
                ask(**{"model": "solver", "messages": [user("a")], **more})
        ask(model="solver", messages=[user("a")], tools=[ADD], tool_choice="none")
        return 1.0

    assert play(run, monkeypatch, team=team)[0].episodes[0].reward == 1.0


def test_a_template_without_tools_has_fenced_calls_of_known_tools_alone(monkeypatch):
    said = iter(['```call add\n{"a": 1}\n```', "2", "```call sub\n```"])

    def run(task, client):
        ask, talk = client.chat.completions.create, [user("a?")]
        [call] = ask(model="solver", messages=talk, tools=[ADD]).choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
        function = vars(call.function)
        own = {"role": "assistant", "tool_calls": [{"id": call.id, "function": function}]}
        talk += [own, {"role": "tool", "content": "2", "tool_call_id": call.id}]
        assert ask(model="solver", messages=talk, tools=[ADD]).choices[0].message.content == "2"
        plain = ask(model="solver", messages=[user("b?")], tools=[ADD]).choices[0].message
        assert plain.tool_calls is None and plain.content == "```call sub\n```"
        return 1.0

    team = small.team(2, context=600, max_new_tokens=60)
    played, _ = play(run, monkeypatch, team=team, speak=lambda request: next(said))
    first, second, _ = played.episodes[0].turns
    assert second.start == len(first.prompt) + len(first.action)
    assert played.episodes[0].results[0].info["rewritten"] == 0


def test_a_caller_may_want_one_call_at_a_time_and_some_of_the_tools_alone(monkeypatch):
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "sub")]
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools[:1]}}

    def run(task, client):
        def called(**more):
            talk = {"model": "solver", "messages": [user("a?")], "tools": tools, **more}
            message = client.chat.completions.create(**talk).choices[0].message
            return [call.function.name for call in message.tool_calls or []]

        assert called() == ["sub", "add", "add"]
        assert called(parallel_tool_calls=False) == ["sub"]
        assert called(tool_choice=some) == ["add", "add"]
        return 1.0

    team = small.team(2, context=4000, max_new_tokens=99)
    say = "".join(f"```call {name}\n{{}}\n```\n" for name in ("sub", "add", "add"))
    played, engine = play(run, monkeypatch, team=team, speak=lambda request: say)
    assert played.episodes[0].reward == 1.0
    shown = [bytes(i for i in r.prompt.tolist() if i < 256) for r in engine.requests]
    assert [b"call sub" in prompt for prompt in shown] == [True, True, False]
