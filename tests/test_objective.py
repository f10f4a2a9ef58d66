"""Critics, the KL to the base, corrections of stale samples, algorithms without a critic."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import small
from learning import (
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


# Critics.


@pytest.mark.parametrize("name", ["appo", "tppo"])
@pytest.mark.parametrize("mode", ["heads", "lora"])
def test_every_kind_of_critic_learns_the_returns(episodes, name, mode):
    config = settings(ONCE, mode=mode, warmup_steps=100)
    state = fresh(config, name)
    before = jax.device_get(state)
    for step in range(12):
        state, metrics = learn(config, episodes, name=name, step=step, state=state)
        first = metrics if step == 0 else first  # noqa: F821
        state = on_device(state)
    after = jax.device_get(state)
    key = "critic/explained_variance"
    assert metrics[key] > max(0.3, first[key])
    assert metrics["critic/loss"] < first["critic/loss"] and first["critic/grad_norm"] > 0
    assert same(before.adapters, after.adapters)
    moved = not same(before.critic.adapters, after.critic.adapters)
    assert moved == (mode == "lora")


def test_a_head_learns_from_its_own_agents_turns_alone(episodes):
    config = settings(dataclasses.replace(ONCE, gamma=0.0), mode="heads")
    other = [
        e._replace(results=[r._replace(reward=r.reward + 1) for r in e.results]) for e in episodes
    ]  # what is paid goes to the solver, who acts last
    start, one, two = (
        jax.device_get(state.critic)
        for state in (fresh(config), learn(config, episodes)[0], learn(config, other)[0])
    )

    def head(critic, n):
        return [kernel[n] for kernel in critic.head]

    close(head(one, 0), head(two, 0), 1e-6)
    assert not same(head(one, 1), head(two, 1))
    assert not same(head(start, 0), head(start, 1))
    alone = [e._replace(turns=[t for t in e.turns if t.agent == 0]) for e in episodes]
    state, _ = learn(config, alone, state=on_device(learn(config, episodes)[0]))
    before, _ = learn(config, episodes)
    assert same(head(before.critic, 1), head(state.critic, 1))
    assert not same(head(before.critic, 0), head(state.critic, 0))


def test_a_critics_adapter_learns_from_its_own_agents_turns_alone(episodes):
    config = settings(mode="lora")
    first, _ = learn(config, episodes)
    alone = [e._replace(turns=[t for t in e.turns if t.agent == 0]) for e in episodes]
    second, _ = learn(config, alone, state=on_device(first))

    def own(state, n):
        parts = state.critic.adapters, state.critic_opt.adapters
        return jax.tree.map(lambda x: np.asarray(x[n]), parts)

    assert same(own(first, 1), own(second, 1))
    assert not same(own(first, 0), own(second, 0))


def test_a_fresh_critic_with_adapters_sees_what_the_shared_one_sees(episodes):
    """Its adapters change nothing yet, so values, and the policy's step, are the same."""
    (shared, one), (lora, two) = (
        learn(settings(QUIET, mode=mode, lr=0.0), episodes) for mode in ("shared", "lora")
    )
    close(shared.adapters, lora.adapters, 1e-6)
    np.testing.assert_allclose(one["critic/loss"], two["critic/loss"], rtol=1e-4)


# Without a critic.


@pytest.mark.parametrize("name", ["grpo", "gspo", "reinforce"])
def test_better_samples_of_a_group_become_more_likely(name):
    rewarded = small.random_episodes(
        16, on_policy=small.adapters(layers=LAYERS), group=8, temperature=0.7
    )
    config = changed(ONCE, lr=5e-4)
    policy, scores = fresh(config, name), []
    for _ in range(6):
        turns = [t for e in small.with_policy(rewarded, policy.adapters) for t in e.turns]
        scores.append([float(t.logprobs.sum()) for t in turns])
        state, metrics = learn(config, rewarded, state=policy, name=name)
        policy = on_device(state)
    gain = np.array(scores[-1]) - np.array(scores[0])
    rewards = np.array([e.reward for e in rewarded]).reshape(2, 8)
    better = np.repeat((rewards - rewards.mean(1, keepdims=True)).ravel(), 2)
    assert np.corrcoef(gain, better)[0, 1] > 0.3
    assert not [key for key in metrics if key.startswith("critic/")]
    assert state.critic == ([], {})


def test_groups_without_signal_give_no_gradient():
    alike = [
        e._replace(results=[r._replace(reward=0.5) for r in e.results])
        for e in small.random_episodes(8, group=4)
    ]
    before = jax.device_get(fresh(settings(QUIET), "grpo"))
    after, _ = learn(settings(QUIET), alike, name="grpo")
    close(before.adapters, after.adapters, 1e-7)


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
    plain, _ = learn(settings(ONCE), episodes, name="reinforce")
    assert not np.any(plain.baseline.weight_X)
    assert not same(plain.adapters, first.adapters)


# The KL to the base.


@pytest.mark.parametrize("name", ["appo", "tppo"])
def test_ref_kl_is_the_mean_over_each_agents_tokens_against_the_bare_base(name):
    on = small.random_episodes(6, on_policy=small.adapters(layers=LAYERS))
    turns = [t for e in on for t in e.turns]
    scored = small.full_forward(
        small.adapters(layers=LAYERS),
        [t.prompt for t in turns],
        [t.action for t in turns],
        [-1] * len(turns),
        [t.temperature for t in turns],
        width=32,
    )
    x = [
        t.logprobs - lp[np.arange(len(t.action)), t.action]
        for t, lp in zip(turns, scored, strict=True)
    ]
    for estimator in ("k1", "k3"):
        _, metrics = learn(changed(ONCE, kl_coef=0.1, kl_estimator=estimator), on, name=name)
        for agent in range(2):
            own = np.concatenate([x[i] for i, t in enumerate(turns) if t.agent == agent])
            kl = own if estimator == "k1" else np.expm1(-own) + own
            np.testing.assert_allclose(metrics["ref_kl"][agent], kl.mean(), rtol=1e-3)


def test_a_kl_in_the_reward_is_that_much_less_reward():
    """At the action level summed per turn: the same as episodes that were paid less."""
    on = small.random_episodes(6, on_policy=small.adapters(layers=LAYERS))
    plain = settings(dataclasses.replace(QUIET, normalize="none", gae_lambda=0.0, gamma=0.0))
    with_kl = dataclasses.replace(plain.algo, kl_coef=0.3, kl_in="reward")
    got, metrics = learn(dataclasses.replace(plain, algo=with_kl), on)
    turns = [t for e in on for t in e.turns]
    scored = small.full_forward(
        small.adapters(layers=LAYERS),
        [t.prompt for t in turns],
        [t.action for t in turns],
        [-1] * len(turns),
        [t.temperature for t in turns],
        width=32,
    )
    kl = iter(
        float((t.logprobs - lp[np.arange(len(t.action)), t.action]).sum())
        for t, lp in zip(turns, scored, strict=True)
    )
    less = [
        e._replace(
            results=[
                e.results[0]._replace(agent_rewards={t.name: -0.3 * next(kl) for t in e.turns})
            ]
        )
        for e in on
    ]
    expected, _ = learn(plain, less)
    close(got.adapters, expected.adapters, 2e-5)
    close(got.critic, expected.critic, 1e-3)
    assert (metrics["ref_kl"] != 0).all()


@pytest.mark.parametrize("name", ["appo", "grpo"])
def test_a_kl_in_the_loss_pulls_towards_the_base(name):
    """Nothing is paid, so only the KL moves the adapters; the critic does not see it."""
    unpaid = [
        e._replace(results=[r._replace(reward=0.0) for r in e.results])
        for e in small.random_episodes(8, on_policy=small.adapters(layers=LAYERS), group=4)
    ]
    config = changed(QUIET, kl_coef=1.0, kl_in="loss", kl_estimator="k2", normalize="none", lr=3e-3)
    policy, kl = fresh(config, name), []
    for _ in range(8):
        sampled = small.with_policy(unpaid, policy.adapters)
        state, metrics = learn(config, sampled, state=policy, name=name)
        policy = on_device(state)
        kl.append(metrics["ref_kl"].mean())
    assert kl[-1] < 0.7 * kl[0]


def test_without_a_coefficient_no_kl_is_computed(episodes):
    _, metrics = learn(settings(), episodes)
    assert "ref_kl" not in metrics and "correction_weight" not in metrics


# Stale samples.


@pytest.mark.parametrize("how", ["decoupled", "truncated"])
def test_on_policy_a_correction_changes_nothing(how):
    fresh_samples = behaviour(small.random_episodes(6), (0.0, 0.0))
    one, _ = learn(changed(ONCE), fresh_samples)
    two, metrics = learn(changed(ONCE, correction=how), fresh_samples)
    close(one.adapters, two.adapters, 1e-5)
    np.testing.assert_allclose(metrics["correction_weight"], 1.0, rtol=1e-3)


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


def test_dual_clip_changes_the_step_of_samples_far_off():
    stale = behaviour(small.random_episodes(6), (-2.0, -2.0))
    one, _ = learn(settings(QUIET), stale, name="tppo")
    two, _ = learn(changed(QUIET, dual_clip=3.0), stale, name="tppo")
    assert not same(one.adapters, two.adapters) and same(one.critic, two.critic)


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
