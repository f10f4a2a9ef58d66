"""Workflows, what agents see, and the runner that plays many episodes at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import small

from marft_jax.config import BadInput
from marft_jax.team.context import ContextFull
from marft_jax.team.runner import Rollout
from marft_jax.team.workflows import find_workflow, sequential
from marft_jax.types import StepResult


class Echo:
    """Three steps; the observation grows with what was said."""

    delay, growth, horizon, steps = 0.0, 1, 3, 0

    def reset(self, seed):
        self.steps = 0
        return f"{seed}?"

    def step(self, turns):
        time.sleep(self.delay * (turns[0].action[0] % 3))
        self.steps += 1
        return StepResult("x" * self.growth, 0.25, self.steps == self.horizon)


def play(env=Echo, tasks=range(5), *, agents=2, slots=4, step=0, context=64, **sampling):
    with ThreadPoolExecutor(4) as threads:
        engine = small.engine(slots=slots, context=context)
        team = small.team(agents, context=context, **sampling)
        return Rollout(engine, team, sequential, env, threads).play(tasks, step)


def said(episodes):
    return [[turn.action.tolist() for turn in episode.turns] for episode in episodes]


@pytest.fixture(scope="module")
def episodes():
    return play(agents=3)


def test_every_agent_acts_once_per_step_in_order(episodes):
    for episode in episodes:
        assert [turn.agent for turn in episode.turns] == [0, 1, 2] * 3
        assert [turn.step for turn in episode.turns] == [0] * 3 + [1] * 3 + [2] * 3
        assert episode.reward == 0.75


def test_within_a_step_d_is_the_strict_lower_triangle(episodes):
    triangle = np.tril(np.ones((3, 3), bool), -1)
    expected = np.kron(np.eye(3, dtype=bool), triangle)
    for episode in episodes:
        assert np.array_equal(episode.dependency, expected)


def test_an_agent_is_shown_what_d_says_and_nothing_else(episodes):
    decode = small.ByteTokenizer().decode
    for episode in episodes:
        for turn in episode.turns:
            shown = decode(turn.prompt.tolist())
            for other, seen in enumerate(episode.turns):
                if other in turn.sees:
                    assert f"\n{seen.name}: {seen.text}" in shown
            assert shown.count("\n") >= len(turn.sees)
            assert (f"\n{turn.name}: " in shown) is False


def test_slots_and_slow_environments_change_nothing():
    class Slow(Echo):
        delay = 0.05

    plain = said(play(temperature=1.0))
    assert said(play(Slow, slots=2)) == plain
    assert said(play(slots=8)) == plain


def test_noise_differs_between_steps_and_between_group_members():
    episodes = said(play(tasks=[7, 7, 7]))
    assert episodes[0] != episodes[1] != episodes[2]
    assert said(play(tasks=[7, 7, 7], step=1)) != episodes
    assert said(play(tasks=[7, 7, 7])) == episodes


def test_a_task_that_does_not_fit_is_bad_input():
    class Long(Echo):
        def reset(self, seed):
            return "x" * 100

    with pytest.raises(ContextFull, match="100|model.context") as error:
        play(Long)
    assert isinstance(error.value, BadInput) and "\n" not in str(error.value)


def test_a_later_prompt_that_does_not_fit_ends_its_episode_as_truncated():
    class Growing(Echo):
        growth = 100

    for episode in play(Growing):
        assert len(episode.turns) == 2
        assert episode.results[-1].info == {"truncated": "context"}


def test_new_tokens_are_capped_to_the_room_that_is_left():
    class Nearly(Echo):
        horizon = 1

        def reset(self, seed):
            return "x" * 56

    act = small.team(1, context=64).act(0, "x" * 56, [])
    assert len(act.prompt) + act.sampling.max_new_tokens == 64
    assert all(
        len(e.turns[0].action) <= act.sampling.max_new_tokens for e in play(Nearly, agents=1)
    )


def test_an_environments_error_reaches_the_caller():
    class Broken(Echo):
        def step(self, turns):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        play(Broken)


def reverse(team, observation):
    """A workflow of a user's own."""
    yield [team.act(1, observation, [])]


def test_a_workflow_may_come_from_anywhere():
    assert find_workflow(f"{__name__}:reverse") is reverse
    with pytest.raises(BadInput, match="cannot load"):
        find_workflow("nowhere:reverse")
    with ThreadPoolExecutor(1) as threads:
        rollout = Rollout(small.engine(), small.team(2), reverse, Echo, threads)
        [episode] = rollout.play([0], 0)
    assert [turn.agent for turn in episode.turns] == [1] and episode.reward == 0.0
