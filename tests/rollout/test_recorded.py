"""Demonstrations: whatever a team has played can be played again, and what cannot is reported."""

from __future__ import annotations

import json

import numpy as np
import pytest
import small
from scripted import END, Scripted, Slow

from configs.studies.plan_path import PlanPath, Simulated
from configs.studies.products import Products
from marft_jax.background import DaemonThreads
from marft_jax.envs import arithmetic
from marft_jax.errors import BadInput
from marft_jax.formats import jsonlines
from marft_jax.rollout import recorded
from marft_jax.rollout.rollout import Rollout
from marft_jax.run import transcripts
from marft_jax.sampling import stops
from marft_jax.team.dag import Graph, Node
from marft_jax.team.profiles import Profile
from marft_jax.team.team_files import Blueprint, load_team
from marft_jax.team.workflows import find_workflow
from marft_jax.types import Sample, StepResult

THREE = (
    Profile("planner", prompt="p"),
    Profile("solver", prompt="s", answers=True),
    Profile("checker", prompt="c", answers=True),
)
DIAMOND = Graph(
    (Node("a", "planner"), Node("b", "solver"), Node("c", "solver"), Node("d", "checker")),
    (("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")),
)
PAIR = load_team(None)
SUMS = arithmetic.source(arithmetic.Settings(), "train").create


class Lookup(Slow):
    """A tool that half of the agents' words call, and a second step."""

    def tool(self, turn) -> str | None:
        return "found" if "?" in turn.text else None


def demonstrations_in(lines, tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(f"{text}\n" for text in lines), encoding="utf-8")
    return [*recorded.read(str(file))]


def replayed(found, team, workflow, create):
    demonstrations = [each for each in found if not isinstance(each, str)]
    rollout = Rollout(None, team, find_workflow(workflow), create, DaemonThreads())
    return recorded.replay(demonstrations, rollout)


def line(*turns: tuple[str, str], **more: object) -> str:
    said = [{"agent": agent, "text": text} for agent, text in turns]
    return json.dumps({"turns": said, **more})


@pytest.mark.parametrize("workflow", ["sequential", "dag", "debate", "orchestrated"])
@pytest.mark.parametrize("context", ["own", "shared"])
def test_a_transcript_is_played_again_token_by_token(workflow, context, tmp_path):
    """With parallel turns, tools, a second step, and actions that their limit cut off."""
    lead = "planner" if workflow == "orchestrated" else None
    blueprint = Blueprint(THREE, workflow, *DIAMOND, orchestrator=lead)
    sampling = {"max_new_tokens": 30, "temperature": 0.7}
    team = small.team_of(blueprint, context=4000, team_context=context, **sampling)
    words = ["<call>solver</call>", "look?", "b" * 40, "12", "so 5", "ok é"]

    def speak(request) -> str:
        return words[sum(request.key) * 7 % len(words)]

    how = find_workflow(workflow), lambda: Lookup(2), DaemonThreads()
    rollout = Rollout(Scripted(speak), team, *how)
    whole = rollout.play([Sample(i, i) for i in range(5)], 0).episodes
    lines = [jsonlines.dumps(transcripts.record(episode, team.decoders)) for episode in whole]
    again = replayed(demonstrations_in(lines, tmp_path), team, workflow, lambda: Lookup(2))
    assert any(turn.truncated for episode in whole for turn in episode.turns)
    for old, new in zip(whole, again, strict=True):
        assert not isinstance(new, str), new
        assert new.reward == old.reward and np.array_equal(new.dependency, old.dependency)
        for before, now in zip(old.turns, new.turns, strict=True):
            assert before.action.tolist() == now.action.tolist()
            assert before.prompt.tolist() == now.prompt.tolist()
            assert not now.logprobs.any() and now.temperature == 1.0
            plain = {"action": (), "prompt": (), "logprobs": (), "temperature": 1.0}
            assert before._replace(**plain) == now._replace(**plain)


@pytest.mark.parametrize(
    ("ids", "why", "stop"),
    [
        ([0xC3, 0xC3, 49, END], "end", ()),  # encoding U+FFFD gives three bytes
        ([0xC3] * 6, "length", ()),
        ([32, 49, 46], "end", (".",)),  # a text that ends with its stop text
    ],
)
def test_an_action_is_learned_with_the_ids_that_were_sampled(ids, why, stop, tmp_path):
    team = small.team_of(PAIR, context=200, max_new_tokens=6, stop=stop)
    text = stops.text_of(ids, stop, team.decoders[0])
    own = {"agent": "planner", "text": text, "ids": ids, "truncated": why == "length"}
    edited = own | {"text": "7", "truncated": False}  # these are not its ids
    strange = [edited | {"ids": given} for given in ([-1, 9999], 3, ["a", True])]
    rows = [{"task": 1, "turns": [one, {"agent": "solver", "text": "1"}]}
            for one in (own, edited, *strange)]  # fmt: skip
    found = demonstrations_in(map(json.dumps, rows), tmp_path)
    kept, *encoded = replayed(found, team, "sequential", SUMS)
    assert kept.turns[0].action.tolist() == ids and kept.turns[0].text == text
    assert [episode.turns[0].action.tolist() for episode in encoded] == [[55, END]] * 4


def test_what_the_workflow_cannot_replay_is_told_with_its_line(tmp_path):
    plan, answer = ("planner", "1+1=2"), ("solver", "17")
    lines = {
        "no JSON": '{"task": 1, "turns": [',
        "expected {": json.dumps([1]),
        "turns[0]: expected": json.dumps({"task": 1, "turns": ["x"]}),
        "turns[0].text: expected": json.dumps({"task": 1, "turns": [{"agent": "planner"}]}),
        "number or the text of its task": line(plan, answer),
        "got -1": line(plan, answer, index=-1),
        "reward: expected a number or none, got inf": line(plan, answer, reward=1)[:-2] + "1e400}",
        "turn 1: expected planner, whose turn it is, got 'solver'": line(answer, plan, task=1),
        "it has no turn 2": line(plan, task=1),
        "ends after turn 2 of 3": line(plan, answer, answer, task=1),
        "turn 2: expected at most the 24 tokens that solver may write there, got 31": line(
            plan, ("solver", "9" * 30), task=1
        ),
        "task 1 of this environment is": line(plan, answer, index=1, task="2+2=?"),
        "too many for --model.context": line(plan, answer, task="1" * 400),
        "good": line(plan, answer, task=1),
        "no JSON: nested": "[" * 100_000,
    }
    found = demonstrations_in(lines.values(), tmp_path)
    team = small.team_of(PAIR, context=200, max_new_tokens=24)
    played = iter(replayed(found, team, "sequential", SUMS))
    told = [one if isinstance(one, str) else next(played) for one in found]
    for number, (want, got) in enumerate(zip(lines, told, strict=True), 1):
        if want == "good":
            assert not isinstance(got, str)
            continue
        assert isinstance(got, str) and got.startswith(f"{tmp_path / 'lines.jsonl'}:{number}: ")
        assert want.removesuffix(": nested") in got and "\n" not in got


def test_the_token_that_ends_a_turn_cannot_stand_inside_of_one(tmp_path):
    team = small.team_of(PAIR, context=200)
    ends = small.with_tokenizer(team, _Ending())
    [fault] = replayed(
        demonstrations_in([line(("planner", "a;b"), ("solver", "c"), task=1)], tmp_path),
        ends, "sequential", SUMS,
    )  # fmt: skip
    assert isinstance(fault, str) and "spells out the token that ends a turn" in fault


class _Ending(small.ByteTokenizer):
    """Spells the end of a turn as a semicolon."""

    def encode(self, text: str) -> list[int]:
        return [END if i == ord(";") else i for i in super().encode(text)]


def test_a_task_of_which_only_the_text_is_known_is_shown_and_not_graded(tmp_path):
    turns = ("planner", "a"), ("solver", "b")
    lines = [line(*turns, task="What?"), line(*turns, task="Who?", reward=0.5)]
    team = small.team_of(PAIR, context=200)
    played = replayed(demonstrations_in(lines, tmp_path), team, "sequential", None)
    assert [(e.task, e.reward) for e in played] == [("What?", 0.0), ("Who?", 0.5)]


@pytest.mark.parametrize("create", [SUMS, Products])
def test_demonstrations_give_right_answers_for_teams_of_any_size(create):
    for profiles in (PAIR.agents, THREE, THREE[1:2]):
        found = [*recorded.demonstrated(create, profiles, range(5))]
        team = small.team_of(Blueprint(profiles), context=400, max_new_tokens=30)
        for episode in replayed(found, team, "sequential", create):
            assert episode.reward == 1.0 and len(episode.turns) == len(profiles)


def test_an_environment_of_ones_own_may_demonstrate():
    class Echo:
        def reset(self, seed: int) -> str:
            self.seed = seed
            return f"say {seed}"

        def demonstrate(self, agents):
            return [{"agent": agent.name, "text": str(self.seed)} for agent in agents]

        def step(self, turns):
            return StepResult("", float(turns[-1].text == str(self.seed)), done=True)

    found = [*recorded.demonstrated(Echo, PAIR.agents, range(3))]
    episodes = replayed(found, small.team_of(PAIR, context=200), "sequential", Echo)
    assert [(e.task, e.reward) for e in episodes] == [(f"say {i}", 1.0) for i in range(3)]
    with pytest.raises(BadInput, match=r"demonstrate\(agents\)"):
        [*recorded.demonstrated(lambda: Slow(1), PAIR.agents, range(1))]


@pytest.mark.parametrize(("kind", "file"), [(PlanPath, "plan_path"), (Simulated, "plan_path"),
                                            (PlanPath, "plan_path_alone")])  # fmt: skip
def test_shortest_paths_are_demonstrated_to_each_team_of_plan_path(kind, file):
    blueprint = load_team(f"configs/studies/teams/{file}.yaml")
    team = small.team_of(blueprint, context=400, max_new_tokens=8)
    found = list(recorded.demonstrated(kind, blueprint.agents, range(20)))
    for episode in replayed(found, team, "sequential", kind):
        best = episode.results[-1].info["shortest"]
        assert episode.reward == pytest.approx(1.5 - 0.01 * best)
        tried = [turn.tool for turn in episode.turns if turn.tool is not None]
        steps = len(episode.results)
        assert tried == ([*["free"] * (steps - 1), "goal"] if kind is Simulated else [])
