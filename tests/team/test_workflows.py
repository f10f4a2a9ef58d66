"""Every topology: who acts when, who sees whom, and that D says so."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import small
from scripted import Scripted, Slow, text

from marft_jax.envs.base import Grade, QuestionEnv, Task
from marft_jax.errors import BadInput
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer
from marft_jax.rollout.rollout import Rollout
from marft_jax.team import State, Step
from marft_jax.team.dag import Graph, Node
from marft_jax.team.orchestrator import default_prompt, parse_call
from marft_jax.team.profiles import Profile
from marft_jax.team.team_files import Blueprint
from marft_jax.team.workflows import WORKFLOWS, find_workflow, majority
from marft_jax.types import StepResult

PLANNER, SOLVER = Profile("planner", "p"), Profile("solver", "s", "Solves.", answers=True)
CHECKER = Profile("checker", "c", answers=True)
NODES = (("plan", "planner"), ("left", "solver"), ("right", "solver", "Another way."))
DIAMOND = Graph(
    (*(Node(*node) for node in NODES), Node("end", "checker")),
    (("plan", "left"), ("plan", "right"), ("left", "end"), ("right", "end")),
)


@pytest.fixture(scope="module")
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def play(threads, blueprint, speak, *, env=lambda: Slow(1), tasks=range(1), **settings):
    team = small.team_of(blueprint, **{"context": 600, "max_new_tokens": 60, **settings})
    engine = Scripted(speak)
    rollout = Rollout(engine, team, WORKFLOWS[blueprint.workflow], env, threads, max_failed=0.5)
    return rollout.play(small.samples(tasks), 0).episodes, engine


def who(request) -> str:
    return f"w{request.key.act}"


def question(right: str, horizon: int = 1):
    def grade(said: str, answer: str) -> Grade:
        return Grade(float(answer in said), "right" if answer in said else "wrong")

    return lambda: QuestionEnv(lambda seed: Task("q", right), grade, horizon)


# dag


def test_the_nodes_of_a_layer_act_together_and_see_what_they_depend_on(threads):
    blueprint = Blueprint((PLANNER, SOLVER, CHECKER), "dag", *DIAMOND)
    [episode], engine = play(threads, blueprint, who)
    assert [turn.name for turn in episode.turns] == ["planner", "solver", "solver", "checker"]
    seen = [[0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]
    assert episode.dependency.astype(int).tolist() == seen
    prompts = [text(turn.prompt) for turn in episode.turns]
    assert prompts[1] == "<s>s<u>t0\nplanner: w0<a>"
    assert prompts[2] == "<s>s<u>t0\nplanner: w0\nAnother way.<a>"
    assert prompts[3] == "<s>c<u>t0\nplanner: w0\nsolver: w1\nsolver: w2<a>"
    assert [len(batch) for batch in engine.batches] == [1, 2, 1]  # the layer was one batch


@pytest.mark.parametrize("context", ["own", "shared"])
def test_an_independent_branch_changes_nothing(threads, context):
    """D does not allow it to be seen, so nothing that depends on it alone may change."""
    graph = Graph((Node("a", "planner"), Node("b", "solver"), Node("c", "checker")), (("b", "c"),))

    def played(says: str):
        def speak(request) -> str:
            return says if request.key.act == 0 else f"{len(request.prompt)}"

        blueprint = Blueprint((PLANNER, SOLVER, CHECKER), "dag", *graph)
        [episode], _ = play(threads, blueprint, speak, team_context=context)
        return episode

    one, other = played("x"), played("something much longer")
    assert one.turns[0].text != other.turns[0].text
    for index in (1, 2):
        assert one.turns[index].prompt.tolist() == other.turns[index].prompt.tolist()
    assert not one.dependency[1:, 0].any()


def test_shared_branches_continue_a_snapshot_and_merge_in_order(threads):
    blueprint = Blueprint((PLANNER, SOLVER, CHECKER), "dag", *DIAMOND)
    [episode], _ = play(threads, blueprint, who, team_context="shared")
    plan, left, right, end = (text(turn.prompt) for turn in episode.turns)
    assert plan == "<s>p<u>t0<a>"
    assert left == "<s>p<u>t0<a>w0<e><u>s\nNow it is solver's turn. Solves.<a>"
    assert right == "<s>p<u>t0<a>w0<e><u>s\nAnother way.<a>"
    assert end == (
        "<s>p<u>t0<a>w0<e>"
        "<u>s\nNow it is solver's turn. Solves.<a>w1<e>"
        "<u>s\nAnother way.<a>w2<e>"
        "<u>c\nNow it is checker's turn.<a>"
    )


# orchestrated


def script(*lines):
    return lambda request: lines[request.key.act]


def test_an_orchestrator_calls_until_it_is_done(threads):
    blueprint = Blueprint((Profile("lead"), PLANNER, SOLVER), "orchestrated")
    speak = script("<call>planner</call> be short", "w1", "<CALL> Solver </CALL>", "4", "<done/>")
    [episode], _ = play(threads, blueprint, speak, env=question("4"))
    assert [t.name for t in episode.turns] == ["lead", "planner", "lead", "solver", "lead"]
    assert episode.reward == 1
    prompts = [text(turn.prompt) for turn in episode.turns]
    assert prompts[0] == f"<s>{default_prompt((PLANNER, SOLVER))}<u>q<a>"
    assert prompts[1] == "<s>p<u>q\nlead: be short<a>"  # a call is no speech
    assert prompts[3] == "<s>s<u>q\nlead: be short\nplanner: w1<a>"
    assert episode.turns[3].sees == (0, 1) and episode.turns[4].sees == (0, 1, 3)


def test_max_steps_bounds_the_calls_and_the_last_answer_counts(threads):
    blueprint = Blueprint((Profile("lead"), SOLVER), "orchestrated")
    speak = script(*["<call>solver</call>", "4", "<call>solver</call>", "5"] * 2)
    [episode], _ = play(threads, blueprint, speak, env=question("5"), max_steps=2)
    assert len(episode.turns) == 4 and episode.reward == 1
    assert [turn.answers for turn in episode.turns] == [False, False, False, True]


def test_an_episode_without_a_call_is_graded_and_trained(threads):
    blueprint = Blueprint((SOLVER, Profile("lead")), "orchestrated", orchestrator="lead")
    [episode], _ = play(threads, blueprint, script("I know not"), env=question("5"))
    assert [turn.name for turn in episode.turns] == ["lead"]
    assert episode.reward == 0 and episode.results[0].done


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("<call>solver</call>", "solver"),
        ("words <call>\n SELF-check </call> words", "self-check"),
        ("<call>nobody</call>", None),
        ("<call>solver</call><done>", None),
        ("<call>solver", None),
    ],
)
def test_how_an_orchestrator_is_read(said, expected):
    assert parse_call(said, ["solver", "self-check"]) == expected


# debate


def debaters(judge: str | None = None, *more: Profile) -> Blueprint:
    members = tuple(Profile(name, answers=True) for name in ("ann", "bob", "cy"))
    return Blueprint((*members, *more), "debate", judge=judge)


def test_debaters_answer_side_by_side_then_see_each_others_last_answers(threads):
    [episode], engine = play(threads, debaters(), who, rounds=3)
    see_none, see_all = np.zeros((3, 3)), np.ones((3, 3))
    later = [see_all, see_none, see_none], [see_none, see_all, see_none]
    expected = np.block([[see_none] * 3, *later])
    np.testing.assert_array_equal(episode.dependency, expected)
    assert text(episode.turns[4].prompt) == "<u>t0\nann: w0\nbob: w1\ncy: w2<a>"
    assert [len(batch) for batch in engine.batches] == [3, 3, 3]


def test_the_majority_is_the_teams_answer(threads):
    speak = script("1", "1", "1", "so 7", "it is 5", "5")
    [episode], _ = play(threads, debaters(), speak, env=question("5"))
    assert episode.reward == 1
    assert [turn.answers for turn in episode.turns] == [False] * 4 + [True, False]
    assert episode.results[0].info["votes"] == {"7": 1, "5": 2}


def test_of_equal_votes_the_earliest_wins():
    turns = [small.turn(0, [1], [1], text=said) for said in ("2", "3", "3", "2")]
    assert majority(turns)[0] is turns[0]


def test_a_judge_decides(threads):
    blueprint = debaters("judge", Profile("judge", "j"))
    speak = script("1", "2", "3", "4", "5", "6", "2")
    [episode], _ = play(threads, blueprint, speak, env=question("2"))
    assert episode.reward == 1 and episode.turns[-1].name == "judge"
    assert episode.turns[-1].sees == (3, 4, 5)


# solo, horizons, shared conversations


def test_solo_is_the_answering_agent_alone(threads):
    [episode], _ = play(threads, Blueprint((PLANNER, SOLVER), "solo"), who)
    assert [turn.name for turn in episode.turns] == ["solver"]


@pytest.mark.parametrize("workflow", ["sequential", "dag", "orchestrated", "debate", "solo"])
@pytest.mark.parametrize("context", ["own", "shared"])
def test_every_topology_tries_again_with_feedback(threads, workflow, context):
    members = (PLANNER, SOLVER, CHECKER)
    speak = (lambda request: "<call>solver</call>") if workflow == "orchestrated" else who
    env = question("never", horizon=2)
    blueprint = Blueprint(members, workflow, *DIAMOND)
    settings = {"max_steps": 1, "max_new_tokens": 24, "context": 4000, "team_context": context}
    [episode], _ = play(threads, blueprint, speak, env=env, **settings)
    assert [result.done for result in episode.results] == [False, True]
    assert {turn.step for turn in episode.turns} == {0, 1}
    second = next(turn for turn in episode.turns if turn.step == 1)
    verdict = "judge: The answer is incorrect."
    assert text(second.prompt).count(verdict) == 1
    assert [turn.index for turn in episode.turns] == list(range(len(episode.turns)))
    for i, turn in enumerate(episode.turns):
        assert all(j < i for j in turn.sees)
        if context == "shared":  # everything that was said before, by id
            shown = bytes(turn.prompt.clip(0, 255).tolist())
            said = (episode.turns[j].action[:-1] for j in turn.sees)
            assert all(bytes(ids.tolist()) in shown for ids in said)


def test_a_shared_conversation_with_one_adapter_is_one_nested_sequence(threads):
    """Each prompt begins with the ids of the one before and its action: no id is encoded again."""
    blueprint = Blueprint((PLANNER, SOLVER, CHECKER))
    [episode], _ = play(threads, blueprint, who, team_context="shared", shared=True)
    for before, after in zip(episode.turns, episode.turns[1:], strict=False):
        whole = [*before.prompt.tolist(), *before.action.tolist()]
        assert after.prompt.tolist()[: len(whole)] == whole
    assert text(episode.turns[2].prompt).count("<s>") == 1


def test_a_cut_turn_is_ended_as_the_template_ends_it_whatever_else_ends_an_action():
    class TwoEnds(ByteTokenizer):
        def __init__(self):
            super().__init__()
            self.eos_ids = (self.END, self.PAD)

    team = small.team_of(Blueprint((PLANNER, SOLVER)), team_context="shared", context=600)
    team = small.with_tokenizer(team, TwoEnds())
    cut = small.turn(0, [1, 2], [97, 98])
    prompt = team.act(1, State("task"), [cut]).prompt.tolist()
    assert prompt[:5] == [1, 2, 97, 98, ByteTokenizer.END]


def test_anonymous_teams_have_no_names_and_no_system_prompts(threads):
    for context in ("own", "shared"):
        settings = {"anonymous": True, "team_context": context}
        [episode], _ = play(threads, Blueprint((PLANNER, SOLVER)), who, **settings)
        shown = text(episode.turns[1].prompt)
        assert "planner" not in shown and "solver" not in shown and "<s>" not in shown
        assert "w0" in shown


def test_messages_are_told_to_whom_they_belong(threads):
    blueprint = Blueprint((PLANNER, SOLVER), messages=("Plan!", "Solve!"))
    [episode], _ = play(threads, blueprint, who)
    assert text(episode.turns[0].prompt) == "<s>p<u>t0\nPlan!<a>"
    assert text(episode.turns[1].prompt) == "<s>s<u>t0\nplanner: w0\nSolve!<a>"


def test_a_conversation_that_fills_the_context_ends_its_episode(threads):
    blueprint = Blueprint((PLANNER, SOLVER, CHECKER))
    [episode], _ = play(threads, blueprint, who, team_context="shared", context=130)
    assert 1 <= len(episode.turns) < 3
    assert episode.results[-1].info == {"truncated": "context"}
    assert all(len(turn.prompt) + len(turn.action) <= 130 for turn in episode.turns)


# what an environment may offer besides


class Cards(Slow):
    """Shows each agent its own card."""

    def view(self, agent: str, observation: str) -> str:
        return f"{observation}, the card of {agent}"


def test_an_environment_may_show_each_agent_a_part_of_the_state(threads):
    [episode], _ = play(threads, Blueprint((PLANNER, SOLVER)), who, env=lambda: Cards(1))
    assert text(episode.turns[0].prompt) == "<s>p<u>t0, the card of planner<a>"
    assert text(episode.turns[1].prompt) == "<s>s<u>t0, the card of solver\nplanner: w0<a>"
    with pytest.raises(BadInput, match="--team.context shared"):
        play(threads, Blueprint((SOLVER,)), who, env=lambda: Cards(1), team_context="shared")


class Calculator(Slow):
    """Adds up for whoever writes ADD."""

    def tool(self, turn) -> str | None:
        numbers = turn.text.removeprefix("ADD ").split()
        return str(sum(map(int, numbers))) if turn.text.startswith("ADD") else None


def test_an_agent_may_call_a_tool_and_go_on(threads):
    """Its turns are one nested sequence; others see its last word only."""

    def speak(request) -> str:
        shown = text(request.prompt)
        if request.owner == 1:
            return "done"
        return "so 5" if "<u>5<a>" in shown else "ADD 2 3"

    blueprint = Blueprint((PLANNER, SOLVER))
    [episode], engine = play(threads, blueprint, speak, env=lambda: Calculator(1))
    said = [("planner", "ADD 2 3"), ("planner", "so 5"), ("solver", "done")]
    assert [(t.name, t.text) for t in episode.turns] == said
    first, second, solver = episode.turns
    assert text(second.prompt) == text(first.prompt) + "ADD 2 3<e><u>5<a>"
    assert second.sees == (0,) and solver.sees == (1,)
    assert text(solver.prompt) == "<s>s<u>t0\nplanner: so 5<a>"
    assert len({request.key for request in engine.requests}) == 3


def test_keys_are_distinct_with_parallel_branches_of_unequal_numbers_of_tool_calls(threads):
    """And they follow from the workflow alone, not from how many slots the engine has."""

    class Uneven(Slow):
        def tool(self, turn) -> str | None:
            return "more" if turn.agent == 0 and turn.text.startswith("w") else None

    def workflow(team, observation):
        state = State(observation)
        drafts = yield [team.act(0, state), team.act(1, state)]
        more = yield [team.act(1, state, drafts), team.act(2, state, drafts)]
        yield Step([*drafts, *more])

    team = small.team_of(Blueprint((PLANNER, SOLVER, CHECKER)), context=600, max_new_tokens=60)
    keys = []
    for slots in (1, 2, 4):
        engine = Scripted(lambda request: "w", slots)
        rollout = Rollout(engine, team, workflow, lambda: Uneven(1), threads, max_tool_calls=3)
        [episode] = rollout.play(small.samples([0]), 0).episodes
        assert len(episode.turns) == 7
        keys.append(sorted(request.key for request in engine.requests))
        assert len(set(keys[-1])) == 7
    assert keys[0] == keys[1] == keys[2]


# what is graded


def drafts_of(wish):
    """A writer acts three times, with a critic in between."""

    def play(team, observation):
        state, turns = State(observation), []
        for agent in (0, 1, 0, 1, 0):
            turns += yield [team.act(agent, state, turns)]
        yield wish(turns)

    return play


@pytest.mark.parametrize(
    ("wish", "graded"),
    [
        (lambda turns: Step(turns), [4]),
        (lambda turns: Step(turns[:3]), [2]),
        (lambda turns: Step(turns, graded=turns[::2]), [0, 2, 4]),
        (lambda turns: Step(turns, graded=[turns[1]]), [1]),
        (lambda turns: Step(turns, graded=[]), []),
        (lambda turns: Step([t._replace(answers=t.index == 1) for t in turns]), [1]),
    ],
)
def test_the_last_answer_is_graded_unless_the_workflow_says_otherwise(threads, wish, graded):
    members = (Profile("writer", answers=True), Profile("critic"))
    team = small.team_of(Blueprint(members), context=600)
    rollout = Rollout(Scripted(who), team, drafts_of(wish), question("w4"), threads)
    [episode] = rollout.play(small.samples([0]), 0).episodes
    assert [t.index for t in episode.turns if t.answers] == graded
    verdicts = [v["agent"] for v in episode.results[0].info["verdicts"]]
    assert verdicts == [episode.turns[i].name for i in graded]
    assert episode.reward == (1 / len(graded) if 4 in graded else 0)


def test_a_dag_grades_no_draft_that_its_writer_goes_on_from(threads):
    nodes = (Node("draft", "solver"), Node("review", "planner"), Node("final", "solver"))
    again = Graph(nodes, (("draft", "review"), ("review", "final")))
    for graph, graded in ((again, 1), (DIAMOND, 3)):
        blueprint = Blueprint((PLANNER, SOLVER, CHECKER), "dag", *graph)
        [episode], _ = play(threads, blueprint, who, env=question("w2"))
        assert len(episode.results[0].info["verdicts"]) == graded


# endless episodes


def test_an_endless_episode_keeps_its_turns_and_what_it_has_earned(threads, caplog):
    class Endless(Slow):
        def step(self, turns):
            return StepResult("go on", 0.25, False)

    team = small.team_of(Blueprint((PLANNER, SOLVER)), context=600)
    rollout = Rollout(Scripted(who), team, WORKFLOWS["sequential"], Endless, threads, max_turns=9)
    [episode] = rollout.play(small.samples([0]), 2).episodes
    assert len(episode.turns) == 9 and [r.reward for r in episode.results] == [0.25] * 4 + [0]
    assert episode.results[-1].info == {"truncated": "turns"} and episode.results[-1].done
    assert "step 3: 1 of 1 episodes were ended at --rollout.max_turns 9" in caplog.text


def test_a_workflow_that_never_yields_a_step_is_an_error(threads):
    def chatter(team, observation):
        while True:
            yield [team.act(0, State(observation))]

    team = small.team_of(Blueprint((SOLVER,)), context=600)
    rollout = Rollout(Scripted(who), team, chatter, lambda: Slow(1), threads, max_turns=5)
    with pytest.raises(BadInput, match="in 5 turns .--rollout.max_turns. it never yielded a Step"):
        rollout.play(small.samples([0, 1]), 0)


# failures


class Flaky(Slow):
    """Task 1 cannot be reset, task 2 fails when it answers."""

    def __init__(self):
        super().__init__(1)

    def reset(self, seed):
        if seed == 1:
            raise OSError("no such task")
        return super().reset(seed)

    def step(self, turns):
        if self._seed == 2:
            raise ZeroDivisionError("a bug")
        return super().step(turns)


def test_a_failing_episode_is_dropped_and_the_others_go_on(threads, caplog):
    engine, team = Scripted(who), small.team(2, context=600)
    rollout = Rollout(engine, team, WORKFLOWS["sequential"], Flaky, threads, max_failed=0.5)
    played = rollout.play(small.samples([0, 1, 2, 2, 4, 5]), 0)
    assert [(e.index, len(e.turns)) for e in played.episodes] == [(0, 2), (4, 2), (5, 2)]
    assert [(e.index, e.member) for e in played.failed] == [(1, 0), (2, 0), (2, 1)]
    assert "no such task" in played.failed[0].why
    assert "ZeroDivisionError: a bug (" in played.failed[1].why
    assert caplog.text.count("dropped an episode") == 3


# what does not fit together


@pytest.mark.parametrize(
    ("blueprint", "settings", "expected"),
    [
        (Blueprint((SOLVER,), "debate"), {}, "expected at least 2 debaters, got 1"),
        (Blueprint((SOLVER,), "debate", judge="x"), {}, "judge: expected one of solver, got 'x'"),
        (Blueprint((SOLVER,), "orchestrated"), {}, "expected a specialist with `answers: true`"),
        (Blueprint((PLANNER, SOLVER), "orchestrated"), {"anonymous": True}, "expected names, by"),
        (Blueprint((Profile("a", adapter="x"), Profile("b", adapter="x", trainable=False))), {},
         "share the adapter 'x': expected one value of trainable, got [True, False]"),
        (Blueprint((Profile("a", trainable=False),)), {}, "expected an agent that learns"),
    ],
)  # fmt: skip
def test_a_team_that_cannot_play_is_refused(blueprint, settings, expected):
    with pytest.raises(BadInput) as caught:
        small.team_of(blueprint, **settings)
    assert expected in str(caught.value)


def test_no_vote_and_no_call_is_read_in_what_an_agent_thinks():
    said = ("<think>2</think>3", "<think>2</think>4", "4 <think>or 2")
    turns = [small.turn(0, [1], [1], text=text) for text in said]
    assert majority(turns)[1] == {"3": 1, "4": 2}


THINGS = """
number = 3
def alone(team): yield
"""
WANTED = "expected a function of (team, observation)"


@pytest.mark.parametrize(("name", "got"), [("number", "3"), ("alone", "one of (team) (")])
def test_what_is_no_workflow_is_one_line_before_a_model_is_loaded(name, got, tmp_path, monkeypatch):
    (tmp_path / "flows.py").write_text(THINGS)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadInput) as caught:
        find_workflow(f"flows:{name}")
    assert str(caught.value).startswith(f"--team.workflow flows:{name}: {WANTED}, got {got}")
    assert ("flows.py:" in str(caught.value)) == got.endswith(" (")
