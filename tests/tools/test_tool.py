"""Tools of agents: their schema, their calls in an episode, and what is refused."""

from __future__ import annotations

import json

import pytest
import small
from programs import TAGGED, with_template
from scripted import Scripted, Slow, text

from marft_jax.envs.threads import DaemonThreads
from marft_jax.errors import BadInput
from marft_jax.rollout.rollout import Rollout
from marft_jax.team.profiles import Profile
from marft_jax.team.team_files import Blueprint, dump_team, load_team
from marft_jax.team.workflows import find_workflow
from marft_jax.tools import ToolCall, answer_calls, load_tools


def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b


def shout(text: str) -> str:
    """Writes a text in capitals."""
    return text.upper() + "\ud83d"


def unlike_json(text: str) -> object:
    """Returns what no message can hold."""
    return {1, 2}


def untyped(a):
    """Has no type hint."""


def silent(a: int) -> int:
    return a


HERE = __name__


def test_the_schema_of_a_function_follows_from_its_hints_and_docstring():
    [tool] = load_tools([f"{HERE}:add"], "tools")
    function = tool.definition["function"]
    assert (function["name"], function["description"]) == ("add", "Adds two numbers.")
    assert function["parameters"]["required"] == ["a"]
    assert {k: v["type"] for k, v in function["parameters"]["properties"].items()} == {
        "a": "integer",
        "b": "integer",
    }


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("add", {"a": 2, "b": 3}, "5"),
        ("add", {"a": "2"}, "3"),
        ("add", {}, "error: a: Missing"),
        ("add", {"a": "two"}, "error: a: Input should be a valid integer"),
        ("add", {"a": 1, "c": 2}, "error: c: Unexpected"),
        ("shout", {"text": "a"}, "A\ufffd"),
    ],
)
def test_a_call_is_answered_and_a_wrong_one_is_told_why(name, arguments, answer):
    tools = load_tools([f"{HERE}:add", f"{HERE}:shout"], "tools")
    [message] = answer_calls(tools, [ToolCall(name, json.dumps(arguments))])
    assert (message["role"], message["name"]) == ("tool", name)
    assert message["content"].startswith(answer) and "\n" not in message["content"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["add"], "expected package.module:function, got 'add'"),
        ([f"{HERE}:nothing"], "has no 'nothing'"),
        ([f"{HERE}:HERE"], "is no function"),
        ([f"{HERE}:untyped"], "a type hint for each parameter"),
        ([f"{HERE}:silent"], "a docstring"),
        ([f"{HERE}:add"] * 2, "distinct names"),
    ],
)
def test_what_is_no_tool_is_said_when_the_team_is_made(names, message):
    with pytest.raises(BadInput, match=message):
        load_tools(names, "tools")


def test_an_answer_that_no_message_can_hold_is_named():
    [tool] = load_tools([f"{HERE}:unlike_json"], "tools")
    with pytest.raises(BadInput, match="tool unlike_json: expected what JSON can hold"):
        answer_calls([tool], [ToolCall("unlike_json", '{"text": ""}')])


def test_tools_are_read_from_team_files_and_refused_where_they_cannot_be_used(tmp_path):
    file = tmp_path / "team.yaml"
    file.write_text(f"agents: [{{name: solver, answers: true, tools: '{HERE}:add'}}]")
    blueprint = load_team(str(file))
    assert blueprint.agents[0].tools == (f"{HERE}:add",)
    file.write_text(dump_team(blueprint))
    assert load_team(str(file)) == blueprint
    with pytest.raises(BadInput, match="chat template of this model has none"):
        small.team_of(blueprint)
    with pytest.raises(BadInput, match="--team.context own"):
        small.team_of(blueprint, team_context="shared")
    file.write_text("agents: [{name: solver, answers: true, tools: [3]}]")
    with pytest.raises(BadInput, match=r"tools\[0\]: expected a valid string, got 3"):
        load_team(str(file))


CALL = '<tool_call>{"name": "add", "arguments": {"a": %d}}</tool_call>'


class Adds(Slow):
    """Has a tool of its own, for whoever writes ADD."""

    def tool(self, turn):
        return "7" if turn.text == "ADD" else None


def play(speak, monkeypatch, env=Slow, **rollout):
    """Plays a planner without tools and a solver that may add."""
    tools = ((), load_tools([f"{HERE}:add"], "tools"))
    team = small.team_of(
        Blueprint((Profile("planner", "p"), Profile("solver", "s", answers=True))),
        context=2000,
        max_new_tokens=200,
    )._replace(tools=tools)
    team = small.with_tokenizer(team, with_template(TAGGED))
    engine = Scripted(speak)
    rollout = Rollout(
        engine, team, find_workflow("sequential"), lambda: env(1), DaemonThreads(), **rollout
    )
    return rollout.play(small.samples([0]), 0).episodes[0], engine


def test_an_agent_calls_its_tools_and_goes_on_in_the_same_turn(monkeypatch):
    def speak(request):
        shown = text(request.prompt)
        if "answer: 5" in shown:
            return "so 5, 6"
        return CALL % 4 + CALL % 5

    episode, engine = play(speak, monkeypatch)
    planner, asked, solver = episode.turns
    assert "Adds two numbers" not in text(planner.prompt) and planner.tool is None
    assert "Adds two numbers" in text(asked.prompt)
    assert (asked.tool, asked.answers, solver.answers) == ("5\n6", False, True)
    known = [*asked.prompt.tolist(), *asked.action.tolist()]
    assert solver.prompt[: solver.start].tolist() == known
    assert text(solver.prompt[solver.start :]).endswith("<u>answer: 5<u>answer: 6<a>")
    assert solver.sees == (0, 1) and len({request.key for request in engine.requests}) == 3


def test_calls_are_bounded_and_the_environments_tool_is_asked_where_the_agents_are_not(monkeypatch):
    episode, _ = play(lambda request: CALL % 1, monkeypatch, max_tool_calls=3)
    assert [turn.tool for turn in episode.turns] == [None, "2", "2", "2", None]
    answers = {b"answer: 2": "ADD", b"7": "done"}

    def speak(request):
        shown = bytes(i for i in request.prompt.tolist() if i < 256)
        return next((say for end, say in answers.items() if shown.endswith(end)), CALL % 1)

    episode, _ = play(speak, monkeypatch, env=Adds)
    assert [turn.tool for turn in episode.turns] == [None, "2", "7", None]
    assert [turn.text for turn in episode.turns][2:] == ["ADD", "done"]
