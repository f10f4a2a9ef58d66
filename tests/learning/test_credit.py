"""Which turn gets which reward, and that a reward arrives as the float it was."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import small
from scripted import Scripted, Slow

from marft_jax.errors import BadInput
from marft_jax.learning import batch as batch_lib
from marft_jax.learning.credit import agent_reward, make_credit
from marft_jax.learning.settings import Appo
from marft_jax.rollout.rollout import Rollout
from marft_jax.team.workflows import WORKFLOWS
from marft_jax.types import StepResult


def turns_of(*agents_and_steps, text="a b"):
    return [small.turn(a, [1, 2], [3, 4, 5], step=s, text=text) for a, s in agents_and_steps]


TWO_STEPS = ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1))


def paid(episode, **algo):
    [rewards] = small.paid([episode], **algo)
    assert rewards.dtype == np.float32
    return pytest.approx(rewards.tolist())


# Who is paid.


@pytest.mark.parametrize("how", ["last", "equal"])
def test_a_steps_reward_goes_to_its_last_turn(how):
    episode = small.episode(0, turns_of(*TWO_STEPS), [0.25, -0.5])
    assert paid(episode, credit=how) == [0, 0, 0.25, 0, -0.5]


def test_equal_credit_logs_each_agent_with_all_of_it():
    episode = small.episode(0, turns_of((0, 0), (1, 0)), [0.75])
    [rewards] = small.paid([episode])
    assert [agent_reward(episode, rewards, a, "last") for a in range(3)] == [0, 0.75, None]
    assert [agent_reward(episode, rewards, a, "equal") for a in range(3)] == [0.75, 0.75, None]


def test_step_discount_pays_earlier_turns_of_a_step_less():
    """R·d^(N−1−k) with the N turns of each step counted for themselves."""
    episode = small.episode(0, turns_of(*TWO_STEPS), [2.0, -1.0])
    halves = [0.5, 1.0, 2.0, -0.5, -1.0]
    assert paid(episode, credit="step_discount", credit_discount=0.5) == halves
    assert paid(episode, credit="step_discount", credit_discount=1.0) == [2, 2, 2, -1, -1]
    assert paid(episode, credit="step_discount", credit_discount=0.0) == [0, 0, 2, 0, -1]


@pytest.mark.parametrize("how", ["last", "step_discount", "equal", "per_step"])
def test_rewards_for_single_agents_are_added_to_their_last_turn_of_the_step(how):
    episode = small.episode(0, turns_of((0, 0), (0, 0), (1, 0), (0, 1)), [1.0, 2.0])
    [one, two] = episode.results
    own = one._replace(agent_rewards={"planner": 0.125, "solver": -3})
    settings = dict(credit=how, credit_discount=0.5, step_reward="verifier")
    [without] = small.paid([episode], **settings)
    [rewards] = small.paid([episode._replace(results=[own, two])], **settings)
    assert (rewards - without).tolist() == [0, 0.125, -3, 0]


def test_a_step_without_turns_pays_nobody():
    episode = small.episode(0, turns_of((0, 0)), [0.5])
    ended = StepResult("", 0.0, True, {"truncated": "context"})
    assert paid(episode._replace(results=[*episode.results, ended])) == [0.5]
    later = small.episode(0, turns_of((0, 0), (1, 2)), [0.5, 1.0, 0.25])
    assert paid(later) == [0.5, 0.25]


# Step rewards.

NO_LIST = (
    *("---\n***", "**Plan**\n**Do**", "-5\n-6", "1.5 a\n2.7 b", "1.\n2.", "- \n- \n", "1. 2\n2. 3"),
    *("-\nadd\n-\nmore", "*a*\n*b*", "- -\n- --", "10:30 am\n11:30 am"),
)
NO_BOX = (
    *(r"\boxed{", r"\boxed{4", r"\boxed{\frac{1}{2}", r"\boxed{4\}", r"}\boxed{", r"\boxed"),
    *(r"\boxed{ }", r"{4} \boxed", r"\boxed{" * 2000),
)


@pytest.mark.parametrize(
    ("name", "text", "reward", "expected"),
    [
        ("planner", "no list", 1.0, 0.5),
        ("planner", "1. add\nthen", 0.0, 0.25),
        ("planner", "1. add\n2) check", 1.0, 1.0),
        ("planner", "- a\n* b\n- c", 0.5, 0.75),
        ("planner", "  1) **Add** them\n\n\t• 先加\n", 0.0, 0.5),
        *(("planner", text, 0.0, 0.0) for text in NO_LIST),
        ("code_planner", "1. a\n2. b", 0.0, 1 / 3),
        ("code_planner", "1. a\n2. b\n3. c\n4. d", 1.0, 1.0),
        ("solver", "it is 4", 1.0, 0.0),
        ("solver", r"so \boxed{4}", 0.75, 0.75),
        ("solver", r"so \boxed{4}", 0.0, 0.1),
        ("solver", r"so \boxed{4}", -1.0, 0.1),
        ("solver", r"so \boxed {\frac{1}{2}\}}, or \boxed{", 1.0, 1.0),
        *(("solver", text, 1.0, 0.0) for text in NO_BOX),
        ("coder", "```python\n\n```\nprint(1)\n```", 1.0, 0.0),
        ("coder", "print(1)", 1.0, 0.0),
        ("coder", "```python\nprint(1)\n```", 1.0, 1.0),
        ("coder", "```python\nprint(1)\n```", 0.0, 0.1),
        ("verifier", "anything", -0.25, -0.25),
        ("debugger", "anything", 0.5, 0.5),
    ],
)
def test_the_ready_made_step_rewards(name, text, reward, expected):
    episode = small.episode(0, turns_of((0, 0), text=text), [reward])
    assert paid(episode, credit="per_step", step_reward=name) == [expected]


def length(turn, reward, episode):
    """A step reward of a user."""
    return len(turn.text) + reward + len(episode.turns)


def test_an_agents_own_step_reward_comes_before_the_teams():
    team = small.team(3)
    own = (team.profiles[0], dataclasses.replace(team.profiles[1], reward="verifier"))
    algo = Appo(credit="per_step", step_reward=f"{__name__}:length")
    credit = make_credit(algo, team._replace(profiles=(*own, team.profiles[2])))
    episode = small.episode(0, turns_of((0, 0), (1, 0), (0, 1), text="abc"), [0.5, 1])
    assert credit.pay(episode).tolist() == [6.5, 0.5, 7]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "agent 'planner' has no step reward"),
        ("referee", "expected planner, solver, .* got 'referee'"),
        ("nowhere:judge", "nowhere:judge: cannot import nowhere"),
        ("json:__name__", "is no function"),
    ],
)
def test_a_step_reward_that_is_not_there_is_one_clear_line(name, message):
    with pytest.raises(BadInput, match=message):
        make_credit(Appo(credit="per_step", step_reward=name), small.team(2))


SCORES = ("text", None, np.nan, [1.0, 2.0], 1e39)


def scored(turn, reward, episode):
    return SCORES[int(turn.text)]


@pytest.mark.parametrize("number", range(len(SCORES)))
def test_a_step_reward_that_is_no_number_is_refused(number):
    episode = small.episode(0, turns_of((0, 0), text=str(number)), [0.5])
    with pytest.raises(BadInput, match="of agent 'planner': expected a (finite )?number, got "):
        small.paid([episode], credit="per_step", step_reward=f"{__name__}:scored")


def breaks(turn, reward, episode):
    raise KeyError("verdict")


def test_a_step_reward_that_fails_names_the_agent_and_the_place():
    episode = small.episode(0, turns_of((0, 0)), [0.5])
    with pytest.raises(BadInput, match=r"agent 'planner': KeyError: 'verdict'.*test_credit.py"):
        small.paid([episode], credit="per_step", step_reward=f"{__name__}:breaks")


# Shaping.


def test_rewards_are_biased_then_scaled_then_clipped():
    episode = small.episode(0, turns_of(*TWO_STEPS), [1.0, 0.25])
    shaping = dict(reward_bias=-0.5, reward_scale=10.0)
    assert paid(episode, **shaping) == [0, 0, 5, 0, -2.5]
    assert paid(episode, **shaping, reward_clip=3.0) == [0, 0, 3, 0, -2.5]
    assert paid(episode, **shaping, credit="step_discount", reward_clip=2.0) == [2, 2, 2, -2, -2]
    each = paid(episode, **shaping, credit="per_step", step_reward="verifier")
    assert each == [5, 5, 5, -2.5, -2.5]


def test_rewards_for_single_agents_are_scaled_and_clipped_without_the_bias():
    episode = small.episode(0, turns_of((0, 0), (1, 0)), [0.0])
    own = episode.results[0]._replace(agent_rewards={"planner": 0.25})
    episode = episode._replace(results=[own])
    assert paid(episode, reward_bias=-0.5, reward_scale=10) == [2.5, -5]
    assert paid(episode, reward_bias=-0.5, reward_scale=10, reward_clip=2) == [2, -2]


def test_long_actions_lose_reward_before_their_limit():
    """Limit 8, buffer 4: from 4 tokens on; one that was sampled with a limit of 3 tokens."""
    turns = [small.turn(0, [1, 2], range(1, n + 1)) for n in (3, 4, 6, 8)]
    turns.append(small.turn(0, range(61), [1, 2, 3], limit=3))
    turns.append(small.turn(0, [1], range(99), limit=None))
    episode = small.episode(0, turns, [1.0])
    expected = np.array([0, 0, -1, -2, -2, 1])
    penalty = dict(overlong_buffer=4, overlong_penalty=2.0)
    assert paid(episode, **penalty) == expected.tolist()
    assert paid(episode, overlong_buffer=0, overlong_penalty=2.0) == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(("context", "size"), [("own", 100), ("shared", 240)])
def test_an_action_cut_at_its_limit_loses_the_whole_penalty_whatever_set_the_limit(context, size):
    """The agent's, the room in the context, or what a shared one keeps for those who come after."""
    team = small.team(2, context=size, max_new_tokens=50, team_context=context)
    engine = Scripted(lambda request: "x" * 200)
    with ThreadPoolExecutor(1) as threads:
        rollout = Rollout(engine, team, WORKFLOWS["sequential"], lambda: Slow(3), threads)
        [episode] = rollout.play(small.samples([0]), 0).episodes
    lengths = [len(turn.action) for turn in episode.turns]
    assert all(turn.truncated for turn in episode.turns)
    assert 50 in lengths and min(lengths) < 50
    without, penalised = (make_credit(Appo(overlong_buffer=n), team).pay(episode) for n in (0, 16))
    assert (penalised - without).tolist() == [-1.0] * len(lengths)


@pytest.mark.parametrize("level", ["action", "token"])
@pytest.mark.parametrize("reward", [0.3333333, -1.75, 1e-6, 7, True])
def test_a_reward_arrives_in_the_chain_as_the_float_it_was(level, reward):
    episodes = [
        small.episode(e, turns_of((0, 0), (1, 0), (0, 1), (1, 1)), [reward, 0]) for e in range(3)
    ]
    algo = Appo(episodes=3, ratio="sum")
    chain = batch_lib.build(episodes, small.paid(episodes), (0, 1), algo, level).chain
    assert chain.rewards_EJ.dtype == np.float32
    arrived = chain.rewards_EJ[chain.rewards_EJ != 0]
    assert arrived.tolist() == [np.float32(reward)] * 3
    assert (chain.rewards_EJ[:, 1 if level == "action" else 5] == np.float32(reward)).all()
