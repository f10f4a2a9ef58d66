"""Identical samples teach nothing, and unlike turns are not compared."""

from __future__ import annotations

import dataclasses

import bounds
import jax
import numpy as np
import pytest
import reference_update
import small
from hypothesis import given, settings
from hypothesis import strategies as st
from one_step import ONCE, fresh, learner, member, on_device, policy_of, same
from one_step import settings as config_of

from marft_jax.learning import batch as batch_lib
from marft_jax.learning.algorithms import find_algorithm, normalized_advantages
from marft_jax.learning.chain import make_chain
from marft_jax.learning.credit import groups_with_signal, make_credit
from marft_jax.learning.estimates import estimate
from marft_jax.learning.group_stats import Cells
from marft_jax.learning.moving import label_means
from marft_jax.learning.normalizers import normalize
from marft_jax.learning.settings import SETTINGS
from marft_jax.learning.state import EMA
from marft_jax.settings.config import Algo
from marft_jax.types import MAIN

NORMALIZE = ("batch", "agent", "group", "group_turn", "none")
GROUPED = ("grpo", "gspo", "reinforce")


def by_place(turn, reward, episode):
    """A step reward that pays agents and steps differently."""
    return 0.1 * turn.agent + 0.7 * reward - 0.3 * turn.step


# Random tasks: who acts in which step, and what each step pays.

CENTS = st.integers(-100, 100).map(lambda n: n / 100)
STEP = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=3), CENTS, CENTS)
TASK = st.lists(STEP, min_size=1, max_size=3)
CREDIT = st.fixed_dictionaries(
    dict(
        credit=st.sampled_from(["last", "equal", "step_discount", "per_step"]),
        credit_discount=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
        reward_bias=st.sampled_from([0.0, -0.5, 0.1]),
        reward_scale=st.sampled_from([1.0, 10.0, 1e-3]),
    )
)
MANY = settings(deadline=None, max_examples=60)


def sample(task: int, steps, rng, turns: int = 9):
    """An episode in which each action is of random length, cut after some turns."""
    acted = [
        small.turn(a, [1, 2], rng.integers(0, 256, rng.integers(1, 6)), step=step)
        for step, (agents, _, _) in enumerate(steps)
        for a in agents
    ][:turns]
    reached = acted[-1].step + 1
    made = small.episode(task, acted, [reward for _, reward, _ in steps[:reached]])
    own = [
        r._replace(agent_rewards={next(t.name for t in acted if t.step == step): extra})
        for step, (r, (_, _, extra)) in enumerate(zip(made.results, steps, strict=False))
    ]
    return made._replace(results=own)


def algo_of(name: str, how: str, credit: dict) -> Algo:
    critic = {"gamma": 1.0, "gae_lambda": 1.0} if SETTINGS[name].has_critic else {}
    own = {"normalize": how, "episodes": 12, "group_size": 4, **credit, **critic}
    return SETTINGS[name](step_reward=f"{__name__}:by_place", **own)


def learned_from(algo: Algo, episodes, rng=None):
    """(advantages, decisions, values) of links in acting order; without ``rng`` values are 0."""
    level = find_algorithm(algo.name).level
    rewards = list(map(make_credit(algo, small.team(3)).pay, episodes))
    chain = make_chain(episodes, rewards, level)
    values_EJ = np.zeros_like(chain.rewards_EJ)
    if rng is not None:
        values_EJ = rng.normal(0, rng.choice([0.1, 1.0]), values_EJ.shape) * chain.mask_EJ
    baseline_X, algorithm, real = np.zeros(3), find_algorithm(algo.name), chain.mask_EJ > 0
    got, _ = normalized_advantages(algo, algorithm, chain, values_EJ, baseline_X)
    paid = [reference_update.credited(e, algo, by_place) for e in episodes]
    return got[real], reference_update.decisions(episodes, paid, level), values_EJ[real]


@MANY
@given(
    st.lists(TASK, min_size=1, max_size=3),
    CREDIT,
    st.sampled_from(GROUPED),
    st.sampled_from(NORMALIZE),
    st.integers(0, 999),
)
def test_samples_that_earn_the_same_have_no_advantage_at_all(tasks, credit, name, how, seed):
    """Whatever they wrote, and however long it was."""
    rng = np.random.default_rng(seed)
    episodes = [sample(i, steps, rng) for i, steps in enumerate(tasks) for _ in range(4)]
    got, *_ = learned_from(algo_of(name, how, credit), episodes)
    assert got.tolist() == [0.0] * len(got)


@MANY
@given(
    TASK,
    CREDIT,
    st.sampled_from(["appo", "tppo"]),
    st.sampled_from(NORMALIZE[:-1]),
    st.integers(0, 999),
)
def test_a_critic_that_errs_makes_no_advantage_where_all_earn_the_same(
    steps, credit, name, how, seed
):
    """As when all succeed: its errors, of deviation 1, would be a full step to anywhere. Over any
    number of steps, paid differently, with agents that act more than once."""
    rng = np.random.default_rng(seed)
    episodes = [sample(i, steps, rng) for i in range(3) for _ in range(2)]
    got, _, values = learned_from(algo_of(name, how, credit), episodes, rng)
    assert values.any() and got.tolist() == [0.0] * len(got)


@MANY
@given(
    st.lists(TASK, min_size=1, max_size=3),
    CREDIT,
    st.sampled_from([*GROUPED, "appo", "tppo"]),
    st.sampled_from(NORMALIZE),
    st.integers(0, 999),
)
@pytest.mark.slow
def test_advantages_are_those_of_the_definitions(tasks, credit, name, how, seed):
    """Also of samples that end early, beside tasks whose samples earn the same: exactly 0 there."""
    rng = np.random.default_rng(seed)
    episodes = []
    for i, steps in enumerate(tasks):
        alike = rng.random() < 0.5
        for _ in range(4):
            own = [(agents, reward if alike else rng.normal(), x) for agents, reward, x in steps]
            episodes.append(sample(i, own, rng, 9 if alike else int(rng.integers(1, 10))))
    algo = algo_of(name, how, credit)
    has_critic = name in ("appo", "tppo")
    got, ds, values = learned_from(algo, episodes, rng if has_critic else None)
    expected, _ = reference_update.learned_from(ds, algo, values if has_critic else None)
    # deviations may be a hundredth of what was earned, and rounding grows by the same factor
    bounds.close(got, expected, 100 * bounds.sums(len(got)), size=1.0)
    assert not got[expected == 0].any()


# What was wrong, by hand.


@pytest.mark.parametrize("how", NORMALIZE)
def test_turns_that_only_failures_reach_have_no_advantage_among_themselves(how):
    """Three samples repair in vain, one solves the task at once."""
    rng = np.random.default_rng(3)
    solved = sample(0, [([0, 1], 1.0, 0.0)], rng)
    failed = [sample(0, [([0, 1], 0.0, 0.0)] * 3, rng) for _ in range(3)]
    algo = algo_of("grpo", how, dict(reward_bias=-0.5, reward_scale=10.0))
    got, ds, _ = learned_from(algo, [solved, *failed])
    later = np.array([d.place[2] > 1 for d in ds])
    assert later.any() and not got[later].any()
    better = np.array([d.episode == 0 for d in ds])
    assert (got[better] > 0).all() and (got[~better & ~later] < 0).all()


@pytest.mark.parametrize("how", NORMALIZE)
def test_turns_are_compared_with_those_of_the_same_place(how):
    """With a discount planner, solver and checker are paid unlike, and horizon 2 pays twice."""
    rng = np.random.default_rng(1)
    algo = algo_of("gspo", how, dict(credit="step_discount", credit_discount=0.5))
    right, twice = [([0, 1, 2], 1.0, 0.0)], [([0, 1], 0.5, 0.0)] * 2
    for steps in (right, twice):
        assert not learned_from(algo, [sample(0, steps, rng) for _ in range(4)])[0].any()
    wrong = [([0, 1, 2], 0.0, 0.0)]
    got, *_ = learned_from(algo, [sample(0, s, rng) for s in (right, wrong, right, wrong)])
    assert (np.sign(got) == [1] * 3 + [-1] * 3 + [1] * 3 + [-1] * 3).all()
    if how == "group_turn":
        bounds.close(np.abs(got), 1, bounds.sums(len(got)))


def test_a_turn_whose_place_no_other_reached_is_compared_with_its_task():
    rng = np.random.default_rng(1)
    one, two = sample(0, [([0], 1.0, 0.0)], rng), sample(0, [([0, 1], 0.0, 0.0)], rng)
    algo = algo_of("gspo", "none", {})
    bounds.close(learned_from(algo, [one, two])[0], np.array([0.5, -0.5, -0.5]))
    assert not learned_from(algo, [sample(0, [([0, 1], 1.0, 2.0)], rng)])[0].any()


def test_returns_equal_to_their_moving_average_have_no_advantage():
    """Its total and its weight are rounded in every step."""
    algo = dataclasses.replace(algo_of("reinforce", "none", {}), baseline="moving")
    algorithm, rng = find_algorithm("reinforce"), np.random.default_rng(0)
    episodes = [sample(e, [([0, 1], 0.7, 0.0)], rng) for e in range(4)]
    chain = make_chain(episodes, small.paid(episodes), "action")
    moving = EMA(np.zeros(2), np.zeros(2))
    for step in range(6):
        got, returns = normalized_advantages(algo, algorithm, chain, None, moving.mean)
        assert np.any(got) == (step == 0)
        moving = moving.update(*label_means(returns, chain, chain.agent_EJ, 2), 0.9)


@pytest.mark.parametrize("noise", [0.0, 3e-6])
@pytest.mark.parametrize("value", [-5.0, 0.3, 1e-6, 7e8])
def test_a_set_without_spread_is_exactly_zero(value, noise):
    rng = np.random.default_rng(0)
    x = np.float32(value) * (1 + noise * rng.uniform(-1, 1, 999)).astype(np.float32)
    weights = 1 / rng.integers(1, 50, 999).astype(np.float32)
    assert not np.asarray(normalize(x, Cells(weights, np.zeros(x.shape, int)))).any()
    x[0] *= 1.1
    assert np.asarray(normalize(x, Cells(weights, np.zeros(x.shape, int))))[0] != 0


def test_what_is_not_finite_stays_so():
    """A guard looks for it."""
    x = np.array([np.nan, 1, 2, np.inf, 3, 4], np.float32)
    cells = np.array([0, 0, 0, 1, 1, 2])
    out = np.asarray(normalize(x, Cells(np.ones(6, np.float32), cells)))
    assert np.isnan(out[[0, 1, 2, 3]]).all() and out[5] == 0


@pytest.mark.parametrize(
    ("samples", "differ"),
    [
        ([[0.1, 0.5], [0.5, 0.1]], True),  # the same total
        ([[0.1, 0.5], [0.1, 0.5]], False),
        ([[0.5], [0.5, 0.0]], True),  # the second's last turn was worth less than the task
        ([[0.5], [0.0, 0.5]], False),  # each turn led to the same
        ([[0.5], [0.5000003]], False),  # other numbers, also in float32, but for rounding
        ([[0.5], [0.50003]], True),
        ([[0.3, -0.3], [0.30000004, -0.3]], False),  # what cancels out leaves a rounding
        ([[0.1, 0.5]], False),  # nothing to compare with
    ],
)
def test_signal_is_what_turns_of_the_same_place_differ_in(samples, differ):
    episodes = [
        small.episode(3, [small.turn(a, [1], [2]) for a in range(len(rewards))], [1.0])
        for rewards in samples
    ]
    rewards = [np.array(rewards, np.float32) for rewards in samples]
    assert np.float32(0.5) != np.float32(0.5000003)
    assert groups_with_signal(episodes, rewards) == ({3} if differ else set())


def test_the_signal_of_a_group_is_none_of_a_group_with_fewer_turns():
    """Its padding is compared with nothing."""
    one, two = small.turn(0, [1], [2]), small.turn(1, [1], [2])
    episodes = [
        small.episode(3, [one, two], [1.0]), small.episode(3, [one, two], [0.0]),
        small.episode(4, [one], [1.0]), small.episode(4, [one], [1.0]),
    ]  # fmt: skip
    assert groups_with_signal(episodes, small.paid(episodes)) == {3}


# The whole step.


@pytest.mark.parametrize("name", ["appo", "tppo", "grpo", "gspo", "cispo", "reinforce"])
@pytest.mark.slow
def test_identical_samples_leave_adapters_and_optimisers_bit_for_bit(name):
    """With momentum from a step before, an entropy bonus, a KL and stale samples, and turns that
    are paid differently by their place. A critic learns."""
    more = dict(credit="per_step", step_reward=f"{__name__}:by_place", kl_coef=0.1, kl_in="loss")
    algo = dataclasses.replace(
        ONCE, group_size=4, entropy_coef=0.01, correction="truncated", **more
    )
    config, episodes = config_of(algo), small.random_episodes(8, steps=2, group=4)
    ours = learner(config, name)
    state, _, _ = ours.learn(fresh(config, name), ours.pack(episodes, small.paid(episodes)), 0)
    before = jax.device_get(state)
    assert np.any(jax.tree.leaves(policy_of(before).adapters_opt)[1])
    earned = [r._replace(reward=x) for r, x in zip(episodes[0].results, (0.0, 0.5), strict=True)]
    episodes = [e._replace(results=earned) for e in episodes]
    rewards = list(map(make_credit(algo, small.team(2)).pay, episodes))
    after, estimates, _ = ours.learn(on_device(before), ours.pack(episodes, rewards), 1)
    assert not estimates.advantages_EJ.any()
    assert same(before.policies, after.policies)
    if SETTINGS[name].has_critic:
        assert np.std(estimates.values_EJ) > 0 and not same(before.critic, after.critic)


def test_an_adapter_without_any_advantage_does_not_step_while_others_do():
    """The checker's samples earn the same, the others' do not."""
    config = config_of(dataclasses.replace(ONCE, group_size=4, normalize="batch"))
    ours = learner(config, "grpo", agents=3)
    episodes = small.random_episodes(8, agents=3, group=4)
    rewards = [np.array([r[2], -r[2], 0.3], np.float32) for r in small.paid(episodes)]
    before = jax.device_get(fresh(config, "grpo", agents=3))
    after, _, _ = ours.learn(on_device(before), ours.pack(episodes, rewards), 0)
    after = jax.device_get(after)
    moved = [not same(member(before, n), member(after, n)) for n in range(3)]
    assert moved == [False, True, False]


# What is added up to a reward, and what rounding leaves of it.


def estimated(algo: Algo, episodes, kl, *, rounding: float = 1e-5):
    """Estimates with a reference whose log-probs are the behaviour's minus ``kl``, by token."""
    level = find_algorithm(algo.name).level
    rewards = list(map(make_credit(algo, small.team(3)).pay, episodes))
    batch = batch_lib.build(episodes, rewards, (0, 1, 2), algo, level)
    values_EJ = None
    if algo.has_critic:
        values_EJ = np.random.default_rng(5).normal(0, 0.1, batch.chain.mask_EJ.shape)
        values_EJ *= batch.chain.mask_EJ
    zero = EMA(np.zeros(()), np.zeros(()))
    means = EMA(np.zeros(3), np.zeros(3))
    data, rows, _ = batch.parts[MAIN]
    reference_UBA = rows.rows.actions.behaviour_BA - np.asarray(kl(rows.rows), np.float32)
    of_turns = data.by_turn(rows.by_datum(reference_UBA, "token"), "token")
    reference = batch.chain.in_order(of_turns)
    how = algo, find_algorithm(algo.name), 3, batch, means, zero
    return estimate(*how, values_EJ=values_EJ, reference=reference, rounding=rounding)


ROUNDED = {
    "nothing but rounding": (0.0, 2e-6, False),
    "an equal drift and rounding": (0.3, 2e-6, False),
    "a drift that differs": (0.0, 0.05, True),
}


@pytest.mark.parametrize("case", ROUNDED)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", ["appo", "tppo", "grpo", "gspo", "cispo", "reinforce"])
@pytest.mark.parametrize("reward", [0.0, 0.7])
def test_a_kl_in_the_reward_that_is_rounding_teaches_nothing(name, estimator, case, reward):
    """The sampler and the update compute the same log-probs, but for a rounding. Tokens of a turn
    that have drifted have unlike returns, as less KL follows a later one."""
    drift, noise, teaches = ROUNDED[case]
    teaches |= drift > 0 and find_algorithm(name).level == "token"
    rng = np.random.default_rng(0)
    turns = [small.turn(a, [1, 2], [5, 6, 7]) for a in (0, 1)]
    episodes = [small.episode(0, turns, [reward]) for _ in range(8)]
    more = {} if SETTINGS[name].has_critic else {"group_size": 8}
    algo = SETTINGS[name](
        episodes=8, kl_coef=0.1, kl_in="reward", kl_estimator=estimator, normalize="batch", **more
    )
    found = estimated(
        algo, episodes, lambda r: drift + noise * rng.uniform(-1, 1, r.actions.mask_BA.shape)
    )
    assert found.advantages_EJ.any() == teaches
    if not reward and not drift and not teaches:  # no return is in the values' scale
        assert found.values_scale.mean == 0


def test_in_bfloat16_log_probs_have_a_coarser_rounding():
    turns = [small.turn(a, [1, 2], [5, 6, 7]) for a in (0, 1)]
    episodes = [small.episode(0, turns, [0.0]) for _ in range(8)]
    algo = SETTINGS["grpo"](episodes=8, group_size=8, kl_coef=0.1, kl_in="reward")
    rng = np.random.default_rng(0)
    noise = lambda r: 0.01 * rng.uniform(-1, 1, r.actions.mask_BA.shape)  # noqa: E731
    assert estimated(algo, episodes, noise).advantages_EJ.any()
    assert not estimated(algo, episodes, noise, rounding=2**-6).advantages_EJ.any()


@pytest.mark.parametrize("name", ["grpo", "appo"])
@pytest.mark.parametrize("bias", [-0.3, 0.0])
def test_rewards_that_their_bias_or_each_other_cancel_earn_the_same(name, bias):
    """0.1 + 0.2 - 0.3 in one sample, 0.3 - 0.3 in the other: in a step, and in its agents' own."""
    rng = np.random.default_rng(0)
    ways = [0.1 + 0.2, 0.3, float(np.float32(0.3))]
    if bias:
        episodes = [sample(0, [([0, 1], way, 0.0)], rng) for way in ways * 2]
    else:
        episodes = [sample(0, [([0], way, -0.3)], rng) for way in ways * 2]
    more = {} if SETTINGS[name].has_critic else {"group_size": 6}
    algo = SETTINGS[name](episodes=6, normalize="batch", reward_bias=bias, **more)
    level = find_algorithm(name).level
    rewards = list(map(make_credit(algo, small.team(3)).pay, episodes))
    chain = make_chain(episodes, rewards, level)
    zeros = np.zeros_like(chain.rewards_EJ)
    got, _ = normalized_advantages(algo, find_algorithm(name), chain, zeros, np.zeros(3))
    assert not got.any()
    if bias:
        assert groups_with_signal(episodes, rewards) == set()
