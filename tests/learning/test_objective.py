"""Critics, the KL to the base, corrections of stale samples, algorithms without a critic."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import small
from one_step import (
    ALGO,
    LAYERS,
    ONCE,
    close,
    fresh,
    learn,
    learner,
    member,
    on_device,
    same,
    settings,
)

QUIET = dataclasses.replace(ONCE, entropy_coef=0.0)


@pytest.fixture(scope="module")
def episodes():
    """Off-policy: their behaviour log-probs are random."""
    return small.random_episodes(8, steps=2)


def changed(algo, **values):
    return settings(dataclasses.replace(algo, **values))


def behaviour(episodes, shift):
    """The episodes as sampled by a policy whose log-probs are off by ``shift[agent]``."""
    on = small.with_policy(episodes, small.adapters(layers=LAYERS))
    return [
        e._replace(turns=[t._replace(logprobs=t.logprobs + shift[t.agent]) for t in e.turns])
        for e in on
    ]


# Critics. These settings never move the policy, and pay each turn by itself.

WARM = dataclasses.replace(ONCE, gamma=0.0)
HEADS = settings(WARM, mode="heads", warmup_steps=100)
LORA = settings(WARM, mode="lora", warmup_steps=100)
EXPLAINED = "critic/explained_variance"


@pytest.mark.parametrize(
    ("config", "name"), [(HEADS, "appo"), (LORA, "tppo")], ids=["heads", "lora"]
)
def test_every_kind_of_critic_learns_the_returns(episodes, config, name):
    state, seen = fresh(config, name), []
    before = jax.device_get(state)
    for step in range(30):
        state, metrics = learn(config, episodes, name=name, step=step, state=state)
        seen.append(metrics)
        state = on_device(state)
    after = jax.device_get(state)
    assert seen[-1][EXPLAINED] > max(0.3, seen[0][EXPLAINED])
    assert seen[-1]["critic/loss"] < seen[0]["critic/loss"] and seen[0]["critic/grad_norm"] > 0
    assert same(before.adapters, after.adapters)
    assert not same(before.critic.head, after.critic.head)
    assert same(before.critic.adapters, after.critic.adapters) == (config is HEADS)


def test_a_head_learns_from_its_own_agents_turns_alone(episodes):
    better = [
        e._replace(results=[r._replace(reward=r.reward + 1) for r in e.results]) for e in episodes
    ]  # what is paid goes to the solver, who acts last
    start = jax.device_get(fresh(HEADS).critic)
    one, two = learn(HEADS, episodes)[0], learn(HEADS, better)[0]

    def head(critic, n):
        return [kernel[n] for kernel in critic.head]

    close(head(one.critic, 0), head(two.critic, 0), 1e-6)
    assert not same(head(one.critic, 1), head(two.critic, 1))
    assert not same(head(start, 0), head(start, 1))
    state, _ = learn(HEADS, alone(episodes), state=on_device(one))
    assert same(head(one.critic, 1), head(state.critic, 1))
    assert not same(head(one.critic, 0), head(state.critic, 0))


def test_a_critics_adapter_learns_from_its_own_agents_turns_alone(episodes):
    first, _ = learn(LORA, episodes, name="tppo")
    second, _ = learn(LORA, alone(episodes), name="tppo", state=on_device(first))

    def own(state, n):
        parts = state.critic.adapters, state.critic_opt.adapters
        return jax.tree.map(lambda x: np.asarray(x[n]), parts)

    assert same(own(first, 1), own(second, 1))
    assert not same(own(first, 0), own(second, 0))


def test_a_fresh_critic_with_adapters_sees_what_the_shared_one_sees(episodes):
    """Its adapters change nothing yet."""
    shared = settings(WARM, warmup_steps=100)
    _, one = learn(shared, episodes, name="tppo")
    _, two = learn(LORA, episodes, name="tppo")
    np.testing.assert_allclose(one["critic/loss"], two["critic/loss"], rtol=1e-4)
    np.testing.assert_allclose(one[EXPLAINED], two[EXPLAINED], rtol=1e-3, atol=1e-4)


def alone(episodes):
    """What the first agent did."""
    return [e._replace(turns=[t for t in e.turns if t.agent == 0]) for e in episodes]


# Without a critic.


GROUPED = changed(QUIET, lr=5e-4)


@pytest.mark.parametrize("name", ["grpo", "gspo", "reinforce"])
def test_better_samples_of_a_group_become_more_likely(name):
    rewarded = small.random_episodes(
        16, on_policy=small.adapters(layers=LAYERS), group=8, temperature=0.7
    )
    policy, scores = fresh(GROUPED, name), []
    for _ in range(6):
        turns = [t for e in small.with_policy(rewarded, policy.adapters) for t in e.turns]
        scores.append([float(t.logprobs.sum()) for t in turns])
        state, metrics = learn(GROUPED, rewarded, state=policy, name=name)
        policy = on_device(state)
    gain = np.array(scores[-1]) - np.array(scores[0])
    rewards = np.array([e.reward for e in rewarded]).reshape(2, 8)
    better = np.repeat((rewards - rewards.mean(1, keepdims=True)).ravel(), 2)
    assert np.corrcoef(gain, better)[0, 1] > 0.3
    assert not [key for key in metrics if key.startswith("critic/")]
    assert state.critic == ([], {})


@pytest.mark.parametrize("name", ["grpo", "gspo", "reinforce"])
def test_groups_without_signal_give_no_gradient(name):
    rewarded = small.random_episodes(16, on_policy=small.adapters(layers=LAYERS), group=8)
    alike = [e._replace(results=[r._replace(reward=0.5) for r in e.results]) for e in rewarded]
    before = jax.device_get(fresh(GROUPED, name))
    after, _ = learn(GROUPED, alike, name=name)
    assert same((before.adapters, before.adapters_opt), (after.adapters, after.adapters_opt))


def test_the_moving_baseline_is_part_of_the_state(episodes):
    config = changed(ONCE, baseline="moving", baseline_decay=0.75)
    first, _ = learn(config, episodes, name="reinforce")
    np.testing.assert_allclose(first.baseline.weight_X, 0.25, rtol=1e-6)
    returns = [[sum(r.reward for r in e.results), e.results[1].reward] for e in episodes]
    mean = np.mean(returns)  # both agents act in both steps
    np.testing.assert_allclose(first.baseline.total_X, 0.25 * mean, rtol=1e-4)
    second, _ = learn(config, episodes, name="reinforce", state=on_device(first))
    again, _ = learn(config, episodes, name="reinforce", state=fresh(config, "reinforce"))
    assert not same(second.baseline, again.baseline)
    plain, _ = learn(GROUPED, episodes, name="reinforce")
    assert not np.any(plain.baseline.weight_X)
    assert not same(plain.adapters, first.adapters)


# The KL to the base.


PLAIN = changed(QUIET, normalize="none", gae_lambda=0.0, gamma=0.0)
IN_REWARD = changed(PLAIN.algo, kl_coef=0.3)
IN_LOSS = changed(QUIET, kl_coef=1.0, kl_in="loss", kl_estimator="k3", normalize="none", lr=3e-3)


def log_ratios(episodes):
    """log π/π_base of the action tokens of each turn."""
    turns = [t for e in episodes for t in e.turns]
    scored = small.full_forward(
        small.adapters(layers=LAYERS),
        [t.prompt for t in turns],
        [t.action for t in turns],
        [-1] * len(turns),
        [t.temperature for t in turns],
        width=32,
    )
    return [
        t.logprobs - scored_AV[np.arange(len(t.action)), t.action]
        for t, scored_AV in zip(turns, scored, strict=True)
    ]


def test_a_kl_in_the_reward_is_that_much_less_reward():
    """At the action level summed per turn: the same as episodes that were paid less."""
    on = small.random_episodes(6, on_policy=small.adapters(layers=LAYERS), temperature=0.7)
    got, metrics = learn(IN_REWARD, on)
    x = log_ratios(on)
    for agent in range(2):
        np.testing.assert_allclose(
            metrics["ref_kl"][agent], np.concatenate(x[agent::2]).mean(), rtol=1e-3
        )
    kl = iter(float(turn.sum()) for turn in x)
    own = [{t.name: -0.3 * next(kl) for t in e.turns} for e in on]
    less = [
        e._replace(results=[e.results[0]._replace(agent_rewards=rewards)])
        for e, rewards in zip(on, own, strict=True)
    ]
    expected, _ = learn(PLAIN, less)
    close(got.adapters, expected.adapters, 2e-5)
    close(got.critic, expected.critic, 1e-3)
    assert not same(got.adapters, learn(PLAIN, on)[0].adapters)


def test_a_kl_in_the_loss_pulls_towards_the_base():
    """Next to nothing is paid, so the KL moves the adapters."""
    unpaid = [
        e._replace(results=[r._replace(reward=1e-4 * r.reward) for r in e.results])
        for e in small.random_episodes(8, on_policy=small.adapters(layers=LAYERS), group=8)
    ]
    policy, kl = fresh(IN_LOSS, "grpo"), []
    for _ in range(8):
        sampled = small.with_policy(unpaid, policy.adapters)
        state, metrics = learn(IN_LOSS, sampled, state=policy, name="grpo")
        policy = on_device(state)
        kl.append(metrics["ref_kl"])
    x = log_ratios(unpaid)
    k3 = [np.concatenate([np.expm1(-t) + t for t in x[agent::2]]).mean() for agent in range(2)]
    np.testing.assert_allclose(kl[0], k3, rtol=1e-3)
    assert kl[-1].mean() < 0.7 * kl[0].mean()


@pytest.mark.parametrize("name", ["appo", "grpo"])
def test_a_kl_to_the_start_is_to_the_adapters_that_the_run_began_with(name):
    """0 while they are unchanged, however far from the base; and they stay as they were."""
    config = changed(IN_LOSS.algo, kl_reference="start")
    on = small.random_episodes(8, on_policy=small.adapters(layers=LAYERS), group=8)
    begun = fresh(config, name)
    begun = begun._replace(reference=begun.version().adapters)
    start = jax.device_get(begun.reference)
    state, metrics = learn(config, on, state=begun, name=name)
    np.testing.assert_allclose(metrics["ref_kl"], 0, atol=1e-5)
    assert same(state.reference, start) and not same(state.adapters, start)
    other = small.with_policy(on, small.adapters(layers=LAYERS, seed=1))
    _, metrics = learn(config, other, state=on_device(state), name=name)
    assert (metrics["ref_kl"] > 0.01).all()


def test_without_a_coefficient_no_kl_is_computed(episodes):
    _, metrics = learn(settings(), episodes)
    assert "ref_kl" not in metrics and "correction_weight" not in metrics


# Stale samples.


def test_stale_samples_are_weighed_dropped_or_cut():
    """Per token, the planner's are 1.5 times as likely as when sampled, the solver's 4 times."""
    stale = behaviour(small.random_episodes(6), (-np.log(1.5), -np.log(4.0)))
    start = jax.device_get(fresh(settings(QUIET), "tppo"))
    expected = {"decoupled": [1.5, 0.0], "truncated": [1.5, 2.0]}
    for how, weights in expected.items():
        config = changed(QUIET, correction=how, correction_cap=2.0)
        state, metrics = learn(config, stale, name="tppo")
        np.testing.assert_allclose(metrics["correction_weight"], weights, rtol=1e-3)
        assert (np.abs(metrics["approx_kl"]) < 1e-6).all()  # to the start of the update
        assert not same(member(start, 0), member(state, 0))
        moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), start.adapters, state.adapters)
        solver = jax.tree.map(
            lambda a, b: np.abs(a[1] - b[1]).max(), start.adapters, state.adapters
        )
        assert max(jax.tree.leaves(moved)) > 0
        assert (max(jax.tree.leaves(solver)) < 1e-7) == (how == "decoupled")


@pytest.mark.slow
def test_all_at_once_takes_the_same_step_on_a_mesh(episodes):
    """KL, correction, critic adapters: to 1e-5 in the adapters, whose step is up to 1e-3."""
    algo = dataclasses.replace(
        ALGO, epochs=1, kl_coef=0.1, kl_in="loss", kl_estimator="k3", correction="truncated"
    )
    config, where = settings(algo, mode="lora"), small.mesh_of(2)
    one, many = learn(config, episodes), learn(config, episodes, where=where)
    close(one[0].adapters, many[0].adapters, 1e-5)
    close(one[1], many[1], 1e-3)
    assert learner(config) is not learner(config, where=where)
