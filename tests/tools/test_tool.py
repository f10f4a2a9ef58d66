"""Tools of agents: their schema, their calls in an episode, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import threading
from typing import Annotated, Any, Literal

import pytest
import small
from programs import TAGGED, with_template
from scripted import Scripted, Slow, text

from marft_jax.background import DaemonThreads
from marft_jax.errors import BadInput, one_line
from marft_jax.rollout.rollout import Rollout
from marft_jax.team.profiles import Profile
from marft_jax.team.team_files import Blueprint, dump_team, load_team
from marft_jax.team.workflows import find_workflow
from marft_jax.tools import (
    EpisodeTools,
    Options,
    Source,
    Tool,
    Toolbox,
    ToolCall,
    ToolError,
    function_source,
    load_toolboxes,
    toolbox,
)
from marft_jax.types import AnsweredCall


def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b


def shout(text: str) -> str:
    """Writes a text in capitals."""
    return text.upper() + "\ud83d"


def unlike_json(text: str) -> object:
    """Returns what no message can hold."""
    return {1, 2}


def leave(text: str) -> str:
    """Ends the program."""
    raise SystemExit(3)


def refuse(text: str) -> str:
    """Refuses what it is given."""
    raise ToolError(f"no {text},\nnever")


def hang(text: str) -> str:
    """Never answers."""
    FOREVER.wait()
    return ""


FOREVER = threading.Event()
BOTH = threading.Barrier(2)


def meet() -> str:
    """Answers when it is called twice at the same time."""
    BOTH.wait(30)
    return "met"


def untyped(a):
    """Has no type hint."""


def silent(a: int) -> int:
    return a


HERE = __name__


def box_of(*entries):
    [box] = load_toolboxes({"solver": entries}, "team")
    return box


def answers(box, *calls):
    tools = EpisodeTools(DaemonThreads())
    called = [ToolCall(name, given if isinstance(given, str) else json.dumps(given))
              for name, given in calls]  # fmt: skip
    found = tools.answer(box, called)
    tools.close()
    return found


def test_the_schema_of_a_function_follows_from_its_hints_and_docstring():
    [tool] = box_of(f"{HERE}:add").tools
    function = tool.definition["function"]
    assert (function["name"], function["description"]) == ("add", "Adds two numbers.")
    assert function["parameters"]["required"] == ["a"]
    types = {k: v["type"] for k, v in function["parameters"]["properties"].items()}
    assert types == {"a": "integer", "b": "integer"}


@pytest.mark.parametrize(
    ("name", "arguments", "verdict", "answer"),
    [
        ("add", {"a": 2, "b": 3}, "ok", "5"),
        ("add", {"a": "2"}, "ok", "3"),
        ("add", {}, "wrong", "error: a: Missing"),
        ("add", {"a": "two"}, "wrong", "error: a: Input should be a valid integer"),
        ("add", {"a": 1, "c": 2}, "wrong", "error: c: Unexpected"),
        ("add", "a = 1", "wrong", "error: expected a JSON object, got 'a = 1'"),
        ("sub", {}, "wrong", "error: expected one of the tools add, refuse, "),
        ("refuse", {"text": "x"}, "wrong", "error: no x, never"),
        ("shout", {"text": "a"}, "ok", "A\ufffd"),
        ("shout", {"text": "a" * 99}, "ok", "AAAAAAAAAA ... (cut off at 10 characters)"),
        ("unlike_json", {"text": ""}, "failed", "error: TypeError: Object of type set"),
        ("leave", {"text": ""}, "failed", "error: SystemExit: 3"),
        ("hang", {"text": ""}, "failed", "error: no answer after 0.1 s"),
    ],
)
def test_whatever_a_tool_does_the_call_is_answered_and_its_fault_is_known(
    name, arguments, verdict, answer
):
    plain = [f"{HERE}:{name}" for name in ("add", "refuse", "unlike_json", "leave")]
    limited = {f"{HERE}:shout": {"characters": 10}}, {f"{HERE}:hang": {"seconds": 0.1, "cost": 0.5}}
    box = box_of(*plain, *limited)
    [call] = answers(box, (name, arguments))
    assert (call.name, call.verdict, call.cost) == (name, verdict, 0.5 * (name == "hang"))
    assert call.answer.startswith(answer) and "\n" not in call.answer


def test_the_calls_of_an_answer_run_side_by_side_and_are_bounded():
    found = answers(box_of(f"{HERE}:meet"), *[("meet", {})] * 18)
    assert [call.answer for call in found[:16]] == ["met"] * 16
    assert {call.verdict for call in found[16:]} == {"wrong"}


def test_a_failure_is_logged_once_with_its_place(caplog):
    box = box_of(f"{HERE}:unlike_json", f"{HERE}:leave")
    toolbox._report.cache_clear()
    for _ in range(2):
        answers(box, ("leave", {"text": ""}), ("unlike_json", {"text": ""}))
    first, second = sorted(record.getMessage() for record in caplog.records)
    assert first.startswith("tool leave: SystemExit: 3") and "test_tool.py:" in first
    assert second.startswith("tool unlike_json: TypeError")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["add"], "expected calculator, .*or package.module:function, got 'add'"),
        ([f"{HERE}:nothing"], "has no 'nothing'"),
        ([f"{HERE}:HERE"], "is no function"),
        ([f"{HERE}:add"] * 2, "distinct names"),
        ([{"calculator": {"second": 1}}], "team: solver: tools: calculator: second: unknown key; "
         "did you mean 'seconds'"),
        ([{"calculator": {"seconds": 0}}], "seconds: expected a number from 0.1, got 0"),
    ],
)  # fmt: skip
def test_what_is_no_tool_is_said_when_the_team_is_made(entries, message):
    with pytest.raises(BadInput, match=message):
        box_of(*entries)


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        (" (1+2)*3 - -4 ", "13"), ("7/2", "3.5"), ("6/2", "3"), ("7//2 + 7%4", "6"),
        ("2**-1", "0.5"), ("1e3", "1000"), ("10**40", "1" + "0" * 40),
        ("1/0", "error: division by zero"), ("9**9**9", "error: the result is too large"),
        ("1e308*10", "error: the result is too large"),
        ("10**400*1.5", "error: int too large to convert to float"),
        ("(-8)**0.5", "error: the result is not a real number"),
        ("1+", "error: expected numbers, + - * / // % ** and parentheses, got '1+'"),
        ("__import__('os')", "error: expected numbers"), ("True+1", "error: expected numbers"),
        ("1;2\0", "error: expected numbers"), ("(" * 300 + "1" + ")" * 150, "error: expected num"),
        ("1+" * 300 + "1", "error: expected at most 500 characters"),
    ],
)  # fmt: skip
def test_the_calculator_computes_numbers_and_nothing_else(expression, answer):
    [call] = answers(box_of("calculator"), ("calculator", {"expression": expression}))
    assert call.answer.startswith(answer) and call.verdict == ("wrong" if "err" in answer else "ok")


class Counter:
    """A source that keeps state."""

    def __init__(self):
        self.opened, self.closed = 0, 0

    @contextlib.contextmanager
    def open(self):
        self.opened, total = self.opened + 1, 0

        def call(name, arguments):
            nonlocal total
            total += arguments["n"]
            return total

        yield call
        self.closed += 1


def test_a_source_is_opened_by_the_first_call_of_an_episode_and_keeps_its_order():
    counter = Counter()
    box = Toolbox((Source((Tool("count", "Counts.", {}),), counter.open, keeps_state=True),))
    tools = EpisodeTools(DaemonThreads())
    assert counter.opened == 0
    calls = [ToolCall("count", json.dumps({"n": n})) for n in range(1, 9)]
    totals = [call.answer for call in tools.answer(box, calls)]
    assert totals == ["1", "3", "6", "10", "15", "21", "28", "36"]
    tools.close()
    assert (counter.opened, counter.closed) == (1, 1)
    again = EpisodeTools(DaemonThreads())  # as a branch: what was recorded, then a call of its own
    again.repeat(box, [AnsweredCall("count", '{"n": 5}', "9", "ok")] * 2)
    assert counter.opened == 1
    assert [call.answer for call in again.answer(box, calls[:1])] == ["11"]


def test_agents_with_the_same_entry_share_its_source():
    one, other, third = load_toolboxes(
        {"a": ["calculator"], "b": ["calculator"], "c": [{"calculator": {"cost": 1}}]}, "team"
    )
    assert one.sources[0] is other.sources[0] is not third.sources[0]


def test_tools_are_read_from_team_files_and_refused_where_they_cannot_be_used(tmp_path):
    file = tmp_path / "team.yaml"
    entries = f"'{HERE}:add', {{calculator: {{cost: 0.5}}}}"
    file.write_text(f"agents: [{{name: solver, answers: true, tools: [{entries}]}}]")
    blueprint = load_team(str(file))
    assert blueprint.agents[0].tools == (f"{HERE}:add", {"calculator": {"cost": 0.5}})
    file.write_text(dump_team(blueprint))
    assert load_team(str(file)) == blueprint
    [box] = small.team_of(blueprint).tools
    assert [tool.name for tool in box.tools] == ["add", "calculator"]
    with pytest.raises(BadInput, match="--team.context own"):
        small.team_of(blueprint, team_context="shared")
    for entry in ("3", "{a: {}, b: {}}", "{calculator: 3}"):
        file.write_text(f"agents: [{{name: solver, answers: true, tools: [{entry}]}}]")
        with pytest.raises(BadInput, match=r"tools\[0\]: expected a name, or a name with its opt"):
            load_team(str(file))


CALL = '<tool_call>{"name": "add", "arguments": {"a": %d}}</tool_call>'


class Adds(Slow):
    """Has a tool of its own, for whoever writes ADD."""

    def tool(self, turn):
        return "7" if turn.text == "ADD" else None


def play(speak, env=Slow, **rollout):
    """Plays a planner without tools and a solver that may add."""
    tools = load_toolboxes({"planner": [], "solver": [f"{HERE}:add"]}, "team")
    agents = Profile("planner", "p"), Profile("solver", "s", answers=True)
    team = small.team_of(Blueprint(agents), context=2000, max_new_tokens=200)
    team = small.with_tokenizer(team._replace(tools=tools), with_template(TAGGED))
    engine, make = Scripted(speak), find_workflow("sequential")
    rollout = Rollout(engine, team, make, lambda: env(1), DaemonThreads(), **rollout)
    return rollout.play(small.samples([0]), 0).episodes[0], engine


def test_an_agent_calls_its_tools_and_goes_on_in_the_same_turn():
    def speak(request):
        shown = text(request.prompt)
        if "answer: 5" in shown:
            return "so 5, 6"
        return CALL % 4 + CALL % 5

    episode, engine = play(speak)
    planner, asked, solver = episode.turns
    assert "Adds two numbers" not in text(planner.prompt) and planner.tool is None
    assert "Adds two numbers" in text(asked.prompt)
    assert (asked.tool, asked.answers, solver.answers) == ("5\n6", False, True)
    known = [*asked.prompt.tolist(), *asked.action.tolist()]
    assert solver.prompt[: solver.start].tolist() == known
    assert text(solver.prompt[solver.start :]).endswith("<u>answer: 5<u>answer: 6<a>")
    assert solver.sees == (0, 1) and len({request.key for request in engine.requests}) == 3


def test_calls_are_bounded_and_the_environments_tool_is_asked_where_the_agents_are_not():
    episode, _ = play(lambda request: CALL % 1, max_tool_calls=3)
    assert [turn.tool for turn in episode.turns] == [None, "2", "2", "2", None]
    answers = {b"answer: 2": "ADD", b"7": "done"}

    def speak(request):
        shown = bytes(i for i in request.prompt.tolist() if i < 256)
        return next((say for end, say in answers.items() if shown.endswith(end)), CALL % 1)

    episode, _ = play(speak, env=Adds)
    assert [turn.tool for turn in episode.turns] == [None, "2", "7", None]
    assert [turn.text for turn in episode.turns][2:] == ["ADD", "done"]


def test_an_unknown_tool_is_answered_but_the_environments_own_comes_first():
    def speak(request):
        return "done" if request.key.call else (CALL % 1).replace("add", "sub")

    episode, _ = play(speak)
    assert episode.turns[1].tool == "error: expected one of the tools add, got 'sub'"
    assert [call.verdict for call in episode.turns[1].calls] == ["wrong"]

    class Subtracts(Slow):
        def tool(self, turn):
            return "0" if "sub" in turn.text else None

    episode, _ = play(speak, env=Subtracts)
    assert [turn.tool for turn in episode.turns] == ["0", None, "0", None]
    assert not any(turn.calls for turn in episode.turns)


class Adder:
    """Adds to a number that it keeps."""

    def __init__(self, kept: int) -> None:
        self.kept = kept

    def method(self, a: int) -> int:
        """Adds to it."""
        return self.kept + a

    @classmethod
    def build(cls, a: int) -> int:
        """Adds to one."""
        return cls(1).method(a)

    async def __call__(self, a: int) -> int:
        return self.kept + a


async def later(a: int, b: Annotated[int, "second"] = 1) -> int:
    """Adds two numbers, a moment later."""
    await asyncio.sleep(0)
    return a + b


def named(a: int, **more: int) -> int:
    """Adds numbers of any names."""
    return a + 1 + sum(more.values())


def apart(*, a: int, b: Literal[1, 2] = 1, c: int | None = None) -> int:
    """Adds two numbers."""
    return a + b


def wrapped(*given: Any, **more: Any) -> Any:
    return add(*given, **more)


CALLABLES = [
    add, named, apart, later, functools.partial(add, 1), functools.partial(later, b=1),
    functools.lru_cache(add), functools.wraps(add)(wrapped), Adder(1), Adder(1).method, Adder.build,
]  # fmt: skip


@pytest.mark.parametrize("function", CALLABLES, ids=lambda f: type(f).__name__)
def test_what_a_tool_is_shown_to_take_it_takes(function):
    source = function_source(function, Options(), "at")
    [tool] = source.tools
    [first, *_] = tool.schema["properties"]
    assert tool.name in ("add", "named", "apart", "later", "Adder", "method", "build")
    assert tool.description.startswith("Adds ")
    with source.open() as call:
        assert call(tool.name, {first: 2}) == 3
        with pytest.raises(ToolError):
            call(tool.name, {first: "x"})


def and_more(a: int, *args: int) -> int:
    """Adds numbers."""
    return a + sum(args)


def by_place(a: int, /) -> int:
    """Adds numbers."""
    return a


def one_by_one(a: int) -> Any:
    """Counts."""
    yield a


def unknown_hint(a: Nowhere) -> int:  # noqa: F821  # pyright: ignore
    """Has a hint that nothing defines."""
    return 1


def odd_hint(a: Adder) -> int:
    """Takes what JSON cannot hold."""
    return 1


REFUSED = [and_more, by_place, one_by_one, unknown_hint, odd_hint, untyped, silent, Adder]
REFUSED += [Adder.method, max, print, functools.partial(by_place)]


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: type(f).__name__)
def test_a_function_that_no_agent_could_call_is_refused_at_the_start(function):
    with pytest.raises(BadInput, match="^at: expected a function .*") as error:
        function_source(function, Options(), "at")
    assert "\n" not in one_line(str(error.value))
