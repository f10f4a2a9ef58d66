"""Who sees what, who acts when, and that neither the clock nor the machine has a say in it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import small
from scripted import END, Scripted, Slow, text

from marft_jax.envs.base import Grade, QuestionEnv, Task
from marft_jax.errors import BadInput
from marft_jax.random_keys import ActionKey, Stream
from marft_jax.rollout.rollout import Rollout
from marft_jax.team import WORKFLOWS, State, Step, find_workflow
from marft_jax.team.prompts import ContextFull
from marft_jax.types import MAIN


@pytest.fixture(scope="module")
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def say_who(request) -> str:
    return f"{request.owner}{request.key.task % 10}{request.key.act}"


def play(threads, team, env=Slow, *, speak=say_who, workflow=None, tasks=range(3), slots=4):
    engine, workflow = Scripted(speak, slots), workflow or WORKFLOWS["sequential"]
    played = Rollout(engine, team, workflow, env, threads).play(small.samples(tasks), step=5)
    return played.episodes, engine


# What agents see.


def test_an_agent_sees_its_prompt_the_task_and_the_turns_before_it(threads):
    episodes, _ = play(threads, small.team(2), tasks=[7])
    prompts = [text(t.prompt) for t in episodes[0].turns]
    assert prompts[:2] == ["<s>p<u>t7<a>", "<s>s<u>t7\nplanner: 070<a>"]
    assert prompts[2] == "<s>p<u>t7 '71'<a>"  # the environment's observation, nothing else


def test_d_is_the_strict_lower_triangle_and_later_steps_see_earlier_ones(threads):
    """They read them in the observation, which the environment made of them."""
    [episode], _ = play(threads, small.team(3), tasks=[1])
    np.testing.assert_array_equal(episode.dependency, np.tril(np.ones((6, 6), bool), -1))
    assert [(t.step, t.agent, t.name) for t in episode.turns] == [
        (step, agent, small.NAMES[agent]) for step in range(2) for agent in range(3)
    ]
    assert [t.answers for t in episode.turns[:3]] == [False, False, True]


def test_a_wrong_answer_comes_back_with_what_was_said(threads):
    """Horizon 3: the team sees its own words and the verdict, and stops when it is right."""

    def grade(said: str, right: str) -> Grade:
        return Grade(float(said == right), "right" if said == right else "wrong")

    def env():
        return QuestionEnv(lambda seed: Task("q", "yes"), grade, horizon=3)

    def speak(request) -> str:
        return "yes" if request.key.act == 3 else "no"

    team = small.team(2, context=200)
    [episode], _ = play(threads, team, env, speak=speak, tasks=[0])
    assert [r.reward for r in episode.results] == [0, 1] and episode.reward == 1
    verdict = "\njudge: The answer is incorrect."
    assert text(episode.turns[2].prompt) == f"<s>p<u>q\nplanner: no\nsolver: no{verdict}<a>"
    [failed], _ = play(threads, team, env, speak=lambda request: "no", tasks=[0])
    assert [r.done for r in failed.results] == [False, False, True]


@pytest.mark.parametrize(
    ("wrote", "shown"),
    [
        ("<think>no</think>\nyes", "yes"),
        ("no, or</think> yes", "yes"),  # the prompt opened it
        ("yes <think>no", "yes "),  # it reached its token limit
        ("a <think>no</think>b", "a b"),
        ("I think> so", "I think> so"),
    ],
)
def test_what_an_agent_thinks_is_not_shown_to_others(threads, wrote, shown):
    """Neither in the lines of a step nor in the observation of the next; the turn keeps it."""

    def env():
        return QuestionEnv(lambda seed: Task("q", ""), lambda *_: Grade(0.0, "wrong"), horizon=2)

    team = small.team(2, context=200, max_new_tokens=40)
    [episode], _ = play(threads, team, env, speak=lambda request: wrote, tasks=[0])
    assert episode.turns[0].text == wrote
    assert text(episode.turns[1].prompt) == f"<s>s<u>q\nplanner: {shown}<a>"
    assert f"<u>q\nplanner: {shown}\nsolver: {shown}\njudge" in text(episode.turns[2].prompt)


# What a turn keeps.


def test_a_turn_keeps_ids_logprobs_and_temperature_as_they_were(threads):
    team = small.team(2, temperature=0.7)
    greedy = team.sampling[1]._replace(temperature=0.0)
    team = team._replace(sampling=(team.sampling[0], greedy))
    [episode], engine = play(threads, team, tasks=[4], speak=lambda request: " a b ")
    first, second = episode.turns[:2]
    assert first.action.tolist() == [*b" a b ", END] and first.text == "a b"
    assert first.logprobs.dtype == np.float32 and len(first.logprobs) == len(first.action)
    assert (first.temperature, second.temperature) == (0.7, 1.0)
    assert not first.truncated
    [cut], _ = play(threads, team, tasks=[4], speak=lambda request: "much too long")
    assert cut.turns[0].truncated and len(cut.turns[0].action) == 8


def test_profiles_and_adapters_reach_the_engine(threads):
    _, engine = play(threads, small.team(2), tasks=[0])
    assert [r.owner for r in engine.requests] == [0, 1, 0, 1]
    _, engine = play(threads, small.team(2, shared=True), tasks=[0])
    assert [r.owner for r in engine.requests] == [0, 0, 0, 0]
    assert small.team(3).adapters == {MAIN: 3} and small.team(3, shared=True).adapters == {MAIN: 1}


def test_every_act_has_a_sampling_key_of_its_own(threads):
    _, engine = play(threads, small.team(2), tasks=range(10, 14))
    keys = [r.key for r in engine.requests]
    assert sorted(keys) == [
        ActionKey(Stream.TRAINING, 5, task, 0, act) for task in range(10, 14) for act in range(4)
    ]


# Room.


def test_a_task_that_fills_the_context_is_bad_input(threads):
    class Long(Slow):
        def reset(self, seed):
            return "x" * 200

    with pytest.raises(BadInput, match="'planner' has 204 tokens.*--model.context 64") as caught:
        play(threads, small.team(2), Long)
    assert "\n" not in str(caught.value)


def test_a_later_prompt_that_fills_the_context_ends_the_episode(threads):
    team = small.team(2, context=24, max_new_tokens=12)
    [full, fine], _ = play(
        threads, team, tasks=[0, 1], speak=lambda r: "longwords" if r.key.task == 0 else "x"
    )
    assert [t.name for t in full.turns] == ["planner"]
    assert full.results[-1].info == {"truncated": "context"}
    assert full.results[-1].done and full.reward == 0
    assert len(fine.turns) == 4


def test_new_tokens_are_capped_to_the_room_that_is_left():
    team = small.team(1, context=20, max_new_tokens=12)
    assert team.act(0, State("xy")).sampling.max_new_tokens == 12  # 6 tokens of prompt
    assert team.act(0, State("x" * 12)).sampling.max_new_tokens == 4
    assert team.act(0, State("x" * 15)).sampling.max_new_tokens == 1
    with pytest.raises(ContextFull):
        team.act(0, State("x" * 16))


# Order.


def summary(episodes):
    return [
        (e.index, e.task, e.reward, [(t.name, t.prompt.tolist(), t.text) for t in e.turns])
        for e in episodes
    ]


def test_neither_slots_nor_threads_nor_slow_grading_change_an_episode(threads, monkeypatch):
    usual, _ = play(threads, small.team(3), tasks=range(9))
    with ThreadPoolExecutor(1) as one:
        for slots, pool, delay in ((1, threads, 0.0), (3, one, 0.002), (9, threads, 0.004)):
            monkeypatch.setattr(Slow, "delay", delay)
            other, _ = play(pool, small.team(3), tasks=range(9), slots=slots)
            assert summary(other) == summary(usual)
    assert [e.index for e in usual] == list(range(9))


def test_others_decode_while_an_episode_is_graded(threads):
    decoded = threading.Event()

    class Blocking(Slow):
        def step(self, turns):
            assert self._seed or decoded.wait(timeout=60), "nothing was decoded meanwhile"
            return super().step(turns)

    def speak(request):
        if request.key.task == 3:  # the last episode, which is in no slot when the first is graded
            decoded.set()
        return "x"

    episodes, _ = play(threads, small.team(1), Blocking, tasks=range(4), slots=2, speak=speak)
    assert len(episodes) == 4


# One's own workflow.


def side_by_side(team, observation):
    """Two act without seeing each other, the third sees only the second."""
    state = State(observation)
    turns = yield [team.act(0, state), team.act(1, state)]
    turns += yield [team.act(2, state, turns[1:])]
    yield Step(turns)


def test_a_users_workflow_is_found_by_name_and_may_act_in_parallel(threads):
    workflow = find_workflow("test_team:side_by_side")
    episodes, engine = play(threads, small.team(3), lambda: Slow(1), workflow=workflow)
    for number, episode in enumerate(episodes):
        assert [t.name for t in episode.turns] == list(small.NAMES)
        assert [t.text for t in episode.turns] == [f"{a}{number}{a}" for a in range(3)]
        assert episode.dependency.tolist() == [[False] * 3, [False] * 3, [False, True, False]]
    assert len({r.key for r in engine.requests}) == 9


def test_a_workflow_that_is_not_there_is_bad_input():
    with pytest.raises(BadInput, match="--team.workflow.* package.module:function, got 'ring'"):
        find_workflow("ring")


@pytest.mark.slow
def test_episodes_of_one_task_differ_and_repeat(threads):
    """Group members, episodes of other steps: each has noise of its own."""
    engine, team = small.engine(longest=4, n=2), small.team(2, max_new_tokens=4)

    def texts(tasks, step, stream=Stream.TRAINING):
        workflow = WORKFLOWS["sequential"]
        rollout = Rollout(engine, team, workflow, lambda: Slow(1), threads, stream=stream)
        played = rollout.play(small.samples(tasks), step)
        return [tuple(turn.text for turn in episode.turns) for episode in played.episodes]

    first = texts([7, 7, 7], 0)
    assert texts([7, 7, 7], 0) == first
    others = [*texts([7, 7, 7], 1), *texts([7], 0, Stream.EVALUATION)]
    assert len({*first, *others}) == 7
