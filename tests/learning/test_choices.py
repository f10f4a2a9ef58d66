"""Choices that people know from elsewhere: each on numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import bounds
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from one_step import ALGO, LAYERS, fresh, learn, on_device, policy_of, same
from one_step import settings as config_of

from marft_jax import cli
from marft_jax.errors import BadInput
from marft_jax.learning import batch as batch_lib
from marft_jax.learning.algorithms import ALGORITHMS, find_algorithm
from marft_jax.learning.estimates import estimate
from marft_jax.learning.moving import ROLES, label_means, roles
from marft_jax.learning.normalizers import find_normalizer
from marft_jax.learning.settings import Appo, Cispo, Grpo, Reinforce, Tppo
from marft_jax.learning.state import EMA
from marft_jax.policy import losses


def acted(*turns, reward=1.0, index=0):
    """An episode of turns given as (agent, tokens, whether it was cut)."""
    made = small.episode(index, [small.turn(a, [1], [2] * n) for a, n, _ in turns], [reward])
    cut = [t._replace(truncated=c) for t, (_, _, c) in zip(made.turns, turns, strict=True)]
    return made._replace(turns=cut)


def loss_of(algo, *episodes):
    """Weights of the links in acting order, as lists."""
    batch = batch_lib.build(episodes, small.paid(episodes), (0, 1), algo, "token")
    means = EMA(np.zeros(2), np.zeros(2)), EMA(np.zeros(()), np.zeros(()))
    values_EJ = np.zeros(batch.chain.mask_EJ.shape) if algo.has_critic else None
    found = estimate(algo, find_algorithm(algo.name), 2, batch, *means, values_EJ=values_EJ)
    return found.inputs, batch.chain


def mean_loss(loss, losses_J):
    return (loss["weights"][0] * losses_J).sum() / loss["counts"][0].sum()


# Averages of the loss.


def test_the_loss_is_a_mean_over_tokens_over_actions_or_over_a_number_of_tokens():
    """Two actions, of one token and of three, with losses 8 and 1, 2, 3."""
    turns, losses_J = acted((0, 1, False), (1, 3, False)), np.array([8.0, 1, 2, 3])
    assert mean_loss(loss_of(Grpo(), turns)[0], losses_J) == pytest.approx(14 / 4)
    assert mean_loss(loss_of(Grpo(loss_mean="sequence"), turns)[0], losses_J) == pytest.approx(5)
    assert mean_loss(loss_of(Grpo(loss_mean=10), turns)[0], losses_J) == pytest.approx(14 / 20)


def test_actions_that_were_cut_are_left_out_of_the_loss_and_its_mean():
    turns, losses_J = acted((0, 1, False), (1, 3, True)), np.array([8.0, 1, 2, 3])
    for more in (dict(), dict(loss_mean="sequence")):
        loss, _ = loss_of(Tppo(mask_truncated=True, **more), turns)
        assert mean_loss(loss, losses_J) == 8
    loss, _ = loss_of(Grpo(mask_truncated=True, loss_mean=10), turns)
    assert mean_loss(loss, losses_J) == pytest.approx(0.8)


@pytest.mark.slow
def test_a_whole_step_on_cut_actions_moves_nobody_and_others_as_if_alone():
    config = config_of(dataclasses.replace(ALGO, mask_truncated=True, entropy_coef=0.0))
    episodes = small.random_episodes(6)
    cut = [
        e._replace(turns=[t._replace(truncated=t.agent == 0) for t in e.turns]) for e in episodes
    ]
    before = jax.device_get(fresh(config))
    after, _ = learn(config, cut, state=on_device(before))
    plain, _ = learn(config, episodes, state=on_device(before))
    first, second = (
        [jax.tree.map(lambda x, n=n: x[n], s.adapters) for s in (before, after, plain)]
        for n in (0, 1)
    )
    assert same(first[1], first[0]) and not same(first[2], first[0])
    square = jax.tree.map(lambda x: x[1], policy_of(plain).adapters_opt[1].nu)
    roundings = bounds.update(layers=LAYERS)
    bounds.close_steps(second[1], second[2], square, ALGO.lr, roundings, steps=ALGO.epochs)
    assert not same(second[1], second[0])


def test_the_entropy_bonus_acts_on_agents_below_the_target():
    """Agent 0 samples with entropy 0.5, agent 1 with 2, as −log π of what was sampled says."""
    whole = acted((0, 2, False), (1, 2, False))
    pairs = zip(whole.turns, (-0.5, -2.0), strict=True)
    whole = whole._replace(turns=[t._replace(logprobs=np.full(2, x)) for t, x in pairs])
    loss, chain = loss_of(Tppo(entropy_coef=0.1, entropy_target=1.0), whole)
    expected = np.where(chain.agent_EJ == 0, 0.1, 0.0)
    bounds.close(loss["entropy"], expected)
    np.testing.assert_array_equal(loss["weights"], 1)


def test_the_mean_of_the_loss_is_a_word_or_a_number():
    for word, expected in ("sequence", "sequence"), ("1024", 1024):
        given = ["--algo.name", "grpo", "--algo.loss_mean", word]
        assert cli.parse(given).algo.loss_mean == expected
    for word in ("mean", "0"):
        with pytest.raises(BadInput, match="--algo.loss_mean: expected"):
            cli.parse(["--algo.name", "grpo", "--algo.loss_mean", word])


# Stale samples.


def test_icepop_drops_weights_on_both_sides():
    log = jnp.log(jnp.array([0.4, 0.5, 1.0, 5.0, 6.0]))
    for how, last in ("decoupled", 0.0), ("truncated", 5.0):
        ends = 5.0 + bounds.of(size=5.0), 0.5 - bounds.of(size=0.5)
        weight = losses.correction_weight(log, jnp.zeros(5), how, *ends)
        bounds.close(weight, np.array([0, 0.5, 1, 5, last]))


@pytest.mark.slow
def test_a_step_corrects_by_action_where_it_is_told():
    """One token alone is within the cap, the whole action is not: it teaches nothing."""
    algo = Tppo(epochs=1, minibatches=1, lr=1e-3, correction="decoupled", correction_cap=1.5)
    algo = dataclasses.replace(algo, entropy_coef=0.0)
    episodes = small.with_policy(small.random_episodes(6, longest=6), small.adapters(layers=1))
    stale = [
        e._replace(turns=[t._replace(logprobs=(t.logprobs - np.log(1.3)).astype("f4"),
                                     action=t.action) for t in e.turns])
        for e in episodes
    ]  # fmt: skip
    of_sequence = dataclasses.replace(algo, correction_of="sequence")
    _, by_token = learn(config_of(algo), stale, name="tppo")
    _, by_action = learn(config_of(of_sequence), stale, name="tppo")
    roundings = bounds.update(layers=LAYERS)
    bounds.close(by_token["correction_weight"], 1.3, roundings)
    turns = [t for e in stale for t in e.turns]
    for agent, got in enumerate(by_action["correction_weight"]):
        lengths = np.array([len(t.action) for t in turns if t.agent == agent])
        weights = np.where(1.3**lengths > 1.5, 0, 1.3**lengths)  # only single tokens stay
        bounds.close(got, (weights * lengths).sum() / lengths.sum(), roundings)


# Losses.


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    """−min(ratio, 1 + 4)·A on the score function, where PPO's clip would have none."""
    policy_loss = ALGORITHMS["cispo"].policy_loss
    new, advantages = jnp.log(jnp.array([2.0, 9.0, 0.01])), jnp.array([1.0, 1.0, -1.0])
    slope = jax.grad(lambda x: policy_loss(Cispo(), x, jnp.zeros(3), advantages).sum())(new)
    bounds.close(slope, np.array([-2, -5, 0.01]))


def test_good_samples_are_imitated_beside_the_loss():
    """The slope of −0.1·log π where the advantage is positive, on top of −ratio·A."""
    policy_loss, new = ALGORITHMS["grpo"].policy_loss, jnp.log(jnp.array([1.1, 1.1, 9.0]))
    algo, advantages = Grpo(imitation_coef=0.1), jnp.array([1.0, -1.0, 2.0])
    slope = jax.grad(lambda x: policy_loss(algo, x, jnp.zeros(3), advantages).sum())(new)
    bounds.close(slope, np.array([-1.2, 1.1, -0.1]))


# Baselines and normalisation.


def test_each_agent_is_normalised_within_its_group():
    """Agent 0 earns 3 and 1 in the first group, 5 and 5 in the second; agent 1 acts in one only."""
    paid = [[3.0, 0.0], [1.0, 4.0], [5.0], [5.0]]
    episodes = [
        acted(*[(a, 2, False) for a in range(len(x))], index=e // 2) for e, x in enumerate(paid)
    ]
    rewards = [np.array(x, np.float32) for x in paid]
    chain = batch_lib.build(episodes, rewards, (0, 1), Appo(), "action").chain
    got = find_normalizer("group_agent")(chain.rewards_EJ, chain, False)
    expected = [[1, -1], [-1, 1], [0, 0], [0, 0]]
    bounds.close(got * chain.mask_EJ, np.array(expected))


def test_each_role_has_a_moving_mean_of_its_own():
    """An agent's first turn of an episode earns 3 from there on, its second 1."""
    algo = Reinforce(baseline="role")
    episodes = [acted((0, 2, False), (0, 2, False)) for _ in range(2)]
    rewards = [np.array([2.0, 1.0], np.float32)] * 2
    chain = batch_lib.build(episodes, rewards, (0, 1), algo, "action").chain
    run, means = ALGORITHMS["reinforce"].advantages, EMA(np.zeros(16), np.zeros(16))
    advantages, returns = run(algo, chain, None, means.mean)
    bounds.close(advantages, np.array([[3, 1]] * 2))
    means = means.update(*label_means(returns, chain, roles(chain, "role"), 2 * ROLES), 0.95)
    bounds.close(means.mean[:3], np.array([3, 1, 0]))
    again = chain._replace(rewards_EJ=2 * chain.rewards_EJ)
    bounds.close(run(algo, again, None, means.mean)[0], np.array([[3, 1]] * 2))
    bounds.close(run(algo, chain, None, means.mean)[0], np.zeros((2, 2)), size=3.0)


@pytest.mark.slow
def test_a_whole_step_moves_the_mean_of_each_role():
    algo = Reinforce(epochs=1, minibatches=1, baseline="role", baseline_decay=0.5)
    episodes = small.random_episodes(6, steps=2)
    state, _ = learn(config_of(algo), episodes, name="reinforce")
    total = sum(e.reward for e in episodes) / len(episodes)
    means = np.asarray(state.baseline.total_X / np.maximum(state.baseline.weight_X, 1e-9))
    assert means.shape == (2 * ROLES,)
    bounds.close(means[0], total, size=1.0)
