"""Advantages, losses and credit: the numbers of the first release, and definitions by hand."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from hypothesis import given, settings
from hypothesis import strategies as st

from marft_jax import batch as batch_lib
from marft_jax.algorithms import ALGORITHMS, credit, find_algorithm, losses
from marft_jax.algorithms.advantages import gae, normalize
from marft_jax.config import Algo, BadInput
from marft_jax.types import StepResult

run_gae = jax.jit(gae, static_argnames="gae_lambda")
RELATIVE = dict(rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def numbers(golden):
    """The golden numbers as float32 arrays."""

    def arrays(tree):
        if isinstance(tree, dict):
            return {key: arrays(value) for key, value in tree.items()}
        return np.asarray(tree, np.float32) if isinstance(tree, list) else tree

    return arrays(json.loads(golden.read_text()))


# Golden numbers.


def chains(x_TBX):
    """``[T, B, ...]`` to one chain per parallel environment, in acting order."""
    return np.moveaxis(x_TBX, 1, 0).reshape(x_TBX.shape[1], -1)


def test_advantages_of_actions_are_those_of_the_first_release(numbers):
    g = numbers["action_gae"]
    values = np.concatenate([chains(g["values_TBA"][:-1]), g["values_TBA"][-1, :, :1]], axis=1)
    ends = np.ones_like(g["rewards_TBA"])
    ends[:, :, -1] = g["masks_TBA"][1:, :, -1]
    advantages, returns = run_gae(
        chains(g["rewards_TBA"]),
        values[:, :-1],
        values[:, 1:],
        np.float32(g["gamma"]) * chains(ends),
        g["gae_lambda"],
    )
    np.testing.assert_allclose(advantages, chains(g["advantages_TBA"]), **RELATIVE)
    np.testing.assert_allclose(returns, chains(g["returns_TBA"]), **RELATIVE)


def test_advantages_of_tokens_are_those_of_the_first_release(numbers):
    g = numbers["token_gae"]
    lengths = g["lengths_TBA"].astype(int)
    t_size, b_size, a_size = lengths.shape
    for b in range(b_size):
        spots = [
            (t, b, a, k)
            for t in range(t_size)
            for a in range(a_size)
            for k in range(lengths[t, b, a])
        ]
        at = tuple(np.array(spots).T)
        rewards, continues = np.zeros(len(spots)), np.ones(len(spots))
        for j, (t, _, a, k) in enumerate(spots):
            if k == lengths[t, b, a] - 1:
                rewards[j] = g["rewards_TBA"][t, b, a]
                continues[j] = g["masks_TBA"][t + 1, b, a] if a == a_size - 1 else 1
        values = g["values_TBAK"][at]
        bootstrap = g["values_TBAK"][t_size, b, 0, 0]
        row = (x[None].astype(np.float32) for x in (rewards, values))
        advantages, returns = run_gae(
            *row,
            np.append(values[1:], bootstrap)[None],
            (np.float32(g["gamma"]) * continues)[None].astype(np.float32),
            g["gae_lambda"],
        )
        np.testing.assert_allclose(advantages[0], g["advantages_TBAK"][at], **RELATIVE)
        np.testing.assert_allclose(returns[0], g["returns_TBAK"][at], **RELATIVE)


@pytest.mark.parametrize("level", ["appo", "tppo"])
def test_losses_are_those_of_the_first_release(numbers, level):
    g = numbers[f"{level}_loss"]
    mask = g.get("mask", np.ones_like(g["logprobs"]))

    def mean(x):
        return float((np.asarray(x) * mask).sum() / mask.sum())

    config, new, old = Algo(clip=g["clip"]), g["logprobs"], g["old_logprobs"]
    policy = ALGORITHMS[level].policy_loss(config, new, old, g["advantages"])
    total = mean(policy) - g["entropy_coef"] * mean(g["entropy"])
    np.testing.assert_allclose(total, g["policy_loss"], rtol=1e-5)
    np.testing.assert_allclose(mean(losses.approx_kl(new, old)), g["approx_kl"], rtol=1e-5)
    if "mean_entropy" in g:
        np.testing.assert_allclose(mean(g["entropy"]), g["mean_entropy"], rtol=1e-5)
    for name, delta in (("huber10", 10.0), ("mse", None)):
        error = losses.value_loss(g["values"], g["old_values"], g["returns"], g["clip"], delta)
        np.testing.assert_allclose(mean(error), g[f"value_loss_{name}"], rtol=1e-5)


def test_normalisation_is_that_of_the_first_release(numbers):
    g = numbers["advantage_norm"]
    normalized = jax.jit(normalize)(g["advantages"], g["advantages"] != 0)
    np.testing.assert_allclose(normalized, g["normalized"], **RELATIVE)


# Definitions.


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(-3, 3, width=32), st.floats(-3, 3, width=32), st.booleans()),
        min_size=12,
        max_size=12,
    ),
    st.floats(0.5, 1, width=32),
    st.sampled_from([0.0, 0.9, 1.0]),
)
def test_gae_is_the_discounted_sum_of_errors(links, gamma, gae_lambda):
    """A_j = sum over l of (γλ)^l δ_{j+l} up to the end of the episode, in O(T²)."""
    rewards, values, goes_on = (np.array(x) for x in zip(*links, strict=True))
    next_values = np.append(values[1:], 0.7)
    discounts = gamma * goes_on
    expected = np.zeros(12)
    for j in range(12):
        weight = 1.0
        for i in range(j, 12):
            delta = rewards[i] + discounts[i] * next_values[i] - values[i]
            expected[j] += weight * delta
            weight *= discounts[i] * gae_lambda
    row = [x[None].astype(np.float32) for x in (rewards, values, next_values, discounts)]
    advantages, returns = run_gae(*row, gae_lambda)
    np.testing.assert_allclose(advantages[0], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(returns[0], expected + values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sign", [1, -1])
def test_huber_is_linear_beyond_delta_on_both_sides(sign):
    returns = sign * np.array([0.5, 2.0, 5.0, 100.0], np.float32)
    error = losses.value_loss(np.zeros(4), np.zeros(4), returns, 0.2, 2.0)
    np.testing.assert_allclose(error, [0.125, 2.0, 8.0, 198.0])


def test_the_value_loss_is_the_worse_of_clipped_and_unclipped():
    values, returns = np.array([1.0, -1.0, 0.1]), np.array([2.0, 2.0, 0.1])
    error = losses.value_loss(values, np.zeros(3), returns, 0.2, None)
    np.testing.assert_allclose(error, [1.8**2 / 2, 3.0**2 / 2, 0.0], atol=1e-7)


def test_the_policy_loss_stops_at_the_clip_only_where_that_is_a_gain():
    old, advantages = jnp.zeros(4), jnp.array([1.0, -1.0, 1.0, -1.0])
    new = jnp.log(jnp.array([1.5, 1.5, 0.5, 0.5]))
    loss = losses.clipped_policy_loss(new, old, advantages, 0.2)
    np.testing.assert_allclose(loss, [-1.2, 1.5, -0.5, 0.8], rtol=1e-6)
    slope = jax.grad(lambda x: losses.clipped_policy_loss(x, old, advantages, 0.2).sum())(new)
    np.testing.assert_allclose(slope, [0, 1.5, -0.5, 0], rtol=1e-6)
    assert losses.clip_fraction(new, old, 0.2).tolist() == [1, 1, 1, 1]
    assert losses.clip_fraction(new, old, 0.6).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_too_large_for_float32_leaves_the_gradient_finite(advantage):
    """A long action's log-probs add up: log ratios beyond 88 happen."""
    slope = jax.grad(lambda x: losses.clipped_policy_loss(x, -100.0, advantage, 0.2))(0.0)
    assert np.isfinite(slope)


def test_normalisation_per_group_uses_each_groups_own_numbers():
    advantages = np.array([[1.0, 3.0, 100.0], [300.0, 7.0, 200.0]], np.float32)
    groups = np.array([[0, 0, 1], [1, 0, 1]])
    mask = np.array([[1, 1, 1], [1, 0, 1]], np.float32)
    out = np.asarray(normalize(advantages, mask, groups, 3))
    np.testing.assert_allclose(out[0], [-1, 1, -(1.5**0.5)], rtol=1e-5)
    np.testing.assert_allclose([out[1, 0], out[1, 2]], [1.5**0.5, 0], rtol=1e-5, atol=1e-6)


def test_equal_advantages_are_normalised_to_zero_not_to_nan():
    assert np.asarray(normalize(jnp.full((4,), 2.0), jnp.ones(4))).tolist() == [0, 0, 0, 0]


def test_an_unknown_algorithm_is_refused_with_the_known_ones():
    with pytest.raises(BadInput, match="appo, tppo, got 'ppo'"):
        find_algorithm("ppo")


# Credit.


def turns_of(*agents_and_steps):
    return [small.turn(a, [1, 2], [3, 4, 5], step=s) for a, s in agents_and_steps]


def test_a_steps_reward_goes_to_its_last_turn():
    episode = small.episode(0, turns_of((0, 0), (1, 0), (0, 1), (1, 1)), [0.25, -0.5])
    assert credit.last(episode).tolist() == [0, 0.25, 0, -0.5]


def test_rewards_for_single_agents_are_added_to_their_last_turn_of_the_step():
    episode = small.episode(0, turns_of((0, 0), (0, 0), (1, 0), (0, 1)), [1.0, 2.0])
    [one, two] = episode.results
    one = one._replace(agent_rewards={"planner": 0.125, "solver": -3})
    rewards = credit.last(episode._replace(results=[one, two]))
    assert rewards.tolist() == [0, 0.125, -2, 2]
    wrong = one._replace(agent_rewards={"nobody": 1.0})
    with pytest.raises(ValueError, match="acted in step 0, got 'nobody'"):
        credit.last(episode._replace(results=[wrong, two]))


def test_a_step_without_turns_pays_nobody():
    episode = small.episode(0, turns_of((0, 0)), [0.5])
    ended = StepResult("", 0.0, True, {"truncated": "context"})
    assert credit.last(episode._replace(results=[*episode.results, ended])).tolist() == [0.5]


@pytest.mark.parametrize("level", ["action", "token"])
@pytest.mark.parametrize("reward", [0.3333333, -1.75, 1e-6, 7, True])
def test_a_reward_arrives_in_the_chain_as_the_float_it_was(level, reward):
    episodes = [
        small.episode(e, turns_of((0, 0), (1, 0), (0, 1), (1, 1)), [reward, 0]) for e in range(3)
    ]
    rewards = [credit.last(episode) for episode in episodes]
    chain = batch_lib.build(episodes, rewards, (0, 1), Algo(), level).chain
    assert chain.rewards_EJ.dtype == np.float32
    paid = chain.rewards_EJ[chain.rewards_EJ != 0]
    assert paid.tolist() == [np.float32(reward)] * 3
    assert (chain.rewards_EJ[:, 1 if level == "action" else 5] == np.float32(reward)).all()
