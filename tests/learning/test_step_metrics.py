"""Metrics are the means that the table says they are; there are none of what an algorithm lacks."""

from __future__ import annotations

import dataclasses

import bounds
import numpy as np
import pytest
import small
from one_step import LAYERS, ONCE, build, fresh, learn, learner, same, settings

from marft_jax.cli import parse, unused_settings
from marft_jax.learning.credit import groups_with_signal, make_credit
from marft_jax.learning.settings import Grpo
from marft_jax.rollout.collect import Collected, collect
from marft_jax.run.metrics import _of_agent
from marft_jax.types import AnsweredCall, Played


@pytest.mark.slow
@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("name", ["appo", "tppo", "grpo", "gspo", "cispo", "reinforce"])
def test_means_are_over_tokens_or_decisions_as_said(name, minibatches):
    """Against a whole forward pass: nothing moves where the learning rate is 0 in effect."""
    config = settings(dataclasses.replace(ONCE, lr=1e-12, group_size=4, minibatches=minibatches))
    episodes = small.random_episodes(8, steps=2, group=4, longest=9)
    batch = build(config, episodes, name)
    _, _, metrics = learner(config, name).learn(fresh(config, name), batch, 0)
    turns = [t for e in episodes for t in e.turns]
    logprobs_TV = small.full_forward(
        small.adapters(layers=LAYERS), [t.prompt for t in turns], [t.action for t in turns],
        [t.agent for t in turns], [1.0] * len(turns), rows=64, width=32,
    )  # fmt: skip
    roundings = bounds.forward(layers=LAYERS)
    for agent in range(2):
        own = [(t, x) for t, x in zip(turns, logprobs_TV, strict=True) if t.agent == agent]
        entropies = [-(np.exp(x) * x).sum(-1) for _, x in own]
        changes = [x[np.arange(len(t.action)), t.action] - t.logprobs for t, x in own]
        by_action = name in ("appo", "gspo", "reinforce")
        each = [x.mean() for x in entropies] if by_action else np.concatenate(entropies)
        bounds.close(metrics["entropy"][agent], np.mean(each), roundings, bounds.LOGITS)
        if minibatches == 1:
            gap = np.abs(np.concatenate(changes)).mean()
            bounds.close(metrics["logprob_gap"][agent], gap, roundings, bounds.LOGITS)
        mean = np.mean if name == "gspo" else np.sum
        change = np.array([mean(x) for x in changes]) if by_action else np.concatenate(changes)
        kl = (np.expm1(change) - change).mean()
        bounds.close(metrics["approx_kl"][agent], kl, bounds.update(layers=LAYERS))
        if name in ("appo", "tppo") and minibatches == 1:
            outside = (np.abs(np.expm1(change)) > config.algo.clip).mean()
            bounds.close(metrics["clip_fraction"][agent], outside)
    assert ("clip_fraction" in metrics) == (name != "reinforce")


def test_kept_is_a_mean_over_tokens():
    turns = [
        small.turn(0, [1], [2] * n)._replace(filtered_mass=mass) for n, mass in ((1, 0.1), (9, 0.9))
    ]
    episode = small.episode(0, turns, [1.0])
    rewards = [np.zeros(2)]
    found = _of_agent(Collected([episode], rewards, [episode], rewards, 0, 0, 0.0), 0, Grpo())
    assert found["kept"] == pytest.approx(0.82)


NOTHING_FROM_THE_REWARD = [
    ("normalize", "batch"), ("credit", "equal"), ("reward_bias", "0.5"), ("reward_scale", "2"),
    ("reward_clip", "1"), ("overlong_buffer", "4"), ("kl_coef", "0.1"), ("credit", "per_step"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), NOTHING_FROM_THE_REWARD)
def test_settings_of_the_reward_are_named_where_nothing_is_learned_from_it(name, value):
    flags = ["--algo.name", "distill", f"--algo.{name}", value]
    assert f"--algo.{name} {value}" in unused_settings.warning(parse(flags)).replace(".0 ", " ")
    more = ["--algo.step_reward", "verifier"] if value == "per_step" else []
    taken = parse([*flags, *more, "--algo.reward_coef", "1", "--algo.group_size", "2"])
    assert not unused_settings.warning(taken)


def test_a_kl_in_the_loss_needs_no_reward():
    config = parse(["--algo.name", "distill", "--algo.kl_coef", "0.1", "--algo.kl_in", "loss"])
    assert not unused_settings.warning(config)


@pytest.mark.slow
def test_a_reference_that_nothing_reads_does_not_move():
    config, episodes = settings(ONCE), small.random_episodes(6)
    moves = dataclasses.replace(config, algo=dataclasses.replace(ONCE, kl_reference_every=1))
    assert "--algo.kl_reference_every 1 (it needs" in unused_settings.warning(moves)
    state, still = (learn(each, episodes, state=fresh(config))[0] for each in (moves, config))
    assert same(state, still)


class Alike:
    """Plays groups whose task rewards are equal, but for those that ``differ``."""

    def __init__(self, change, differ=()):
        self.change, self.differ = change, differ

    def play(self, samples, step):
        episodes = []
        for sample in samples:
            turn = small.turn(0, [1], [2] * 2, text="\\boxed{}")
            reward = float(sample.index in self.differ and sample.member == 0)
            episode = small.episode(sample.index, [turn], [reward])
            episode = episode._replace(group=sample.group, member=sample.member)
            episodes.append(self.change(episode) if sample.member == 0 else episode)
        return Played(episodes, [])


def with_turn(**change):
    return lambda e: e._replace(turns=tuple(t._replace(**change) for t in e.turns))


def calling(*costs):
    calls = tuple(AnsweredCall("find", "{}", "", "ok", 0.5, cost) for cost in costs)
    return with_turn(calls=calls)


ADDED = {
    "a longer text": (with_turn(action=np.arange(7)), {"overlong_buffer": 4}),
    "a text at its limit": (with_turn(action=np.arange(8)), {"overlong_buffer": 8}),
    "a large penalty": (
        with_turn(action=np.arange(8)), {"overlong_buffer": 2, "overlong_penalty": 30.0}),
    "a call": (calling(0.25), {}),
    "three calls": (calling(0.1, 0.1, 0.3), {}),
    "a call that pays": (calling(-0.5), {}),
    "both": (
        lambda e: calling(0.1)(with_turn(action=np.arange(8))(e)), {"overlong_buffer": 4}),
    "a form": (
        with_turn(text="\\boxed{7}"), {"credit": "per_step", "step_reward": "solver"}),
    "a plan": (
        with_turn(text="1. Add.\n2. Carry."), {"credit": "per_step", "step_reward": "planner"}),
}  # fmt: skip


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("added", ADDED)
def test_dynamic_sampling_goes_by_the_task_alone(added, scale):
    change, settings = ADDED[added]
    algo = Grpo(episodes=8, group_size=4, dynamic_sampling=True, reward_scale=scale,
                reward_bias=0.1, **settings)  # fmt: skip
    config = small.config(algo=algo)
    credit = make_credit(algo, small.team(1))
    dropped = collect(Alike(change, differ=(1, 4)), credit, groups_with_signal, config, 0)
    assert {e.index for e in dropped.episodes} == {1, 4}
    assert dropped.dropped_groups > 0
    [first, *_] = dropped.played
    assert credit.pay(first)[0] != credit.pay(dropped.played[1])[0], "what is learned has it"
