"""Advantages that know D: turns that did not see each other stand side by side."""

from __future__ import annotations

import bounds
import numpy as np
import pytest
import small
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_update import gae

from marft_jax.learning.algorithms import find_algorithm
from marft_jax.learning.chain import layers_of, make_chain
from marft_jax.learning.layers import gae_by_layer
from marft_jax.learning.settings import SETTINGS, Appo


def episode(index, layers, lengths, rewards, steps=None):
    """Turns layer by layer, each of which sees all earlier layers of its step."""
    turns, seen = [], []
    for i, size in enumerate(layers):
        step = steps[i] if steps else 0
        if turns and turns[-1].step != step:
            seen = []
        sees, first = tuple(seen), len(turns)
        for k in range(size):
            action = [3] * lengths[len(turns)]
            turns.append(small.turn(k % 3, [1, 2], action, step=step, sees=sees))
        seen += range(first, len(turns))
    made = small.episode(index, turns, rewards)
    return made._replace(turns=tuple(turns))  # with the D that they have


def chain_of(episodes, level, rewards=None):
    rewards = small.paid(episodes) if rewards is None else rewards
    return make_chain(episodes, rewards, level)


def test_a_turn_begins_a_layer_where_it_saw_one_of_the_layer_before_or_in_a_new_step():
    def layers(*sees, steps=None):
        steps = steps or [0] * len(sees)
        turns = [small.turn(0, [1], [2], sees=s, step=t) for s, t in zip(sees, steps, strict=True)]
        return layers_of(turns, range(len(turns)))

    assert layers((), (0,), (0, 1)) == [0, 1, 2]
    assert layers((), (), (0, 1), (0, 1)) == [0, 0, 1, 1]
    assert layers((), (), (0,), (1,), (2, 3)) == [0, 0, 1, 1, 2]
    assert layers((), (), (), (), steps=[0, 0, 1, 1]) == [0, 0, 1, 1]


@pytest.mark.parametrize("level", ["action", "token"])
def test_a_sequential_team_is_bit_for_bit_the_chain(level):
    rng = np.random.default_rng(0)
    episodes = small.random_episodes(6, agents=3, steps=3)
    chain = chain_of(episodes, level, [rng.normal(size=9).astype(np.float32) for _ in episodes])
    values_EJ = rng.normal(size=chain.mask_EJ.shape) * chain.mask_EJ
    next_EJ, continues_EJ = (np.pad(x[:, 1:], ((0, 0), (0, 1))) for x in (values_EJ, chain.mask_EJ))
    plain = gae(chain.rewards_EJ, values_EJ, next_EJ, 0.97 * continues_EJ, 0.9)
    for got, expected in zip(gae_by_layer(chain, values_EJ, 0.97, 0.9), plain, strict=True):
        np.testing.assert_array_equal(got, expected)


LAYERS = st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=4)
"""The turns of each layer, and whether it begins a step."""


@settings(deadline=None, max_examples=50)
@given(
    st.lists(LAYERS, min_size=1, max_size=3),
    st.sampled_from(["appo", "tppo"]),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 999),
)
def test_advantages_of_layers_are_those_of_the_definition(teams, name, gamma, lam, seed):
    """A_j = Σ over i of w_ji δ_i in O(T²), where w goes from a turn's end to its next layer."""
    rng, episodes = np.random.default_rng(seed), []
    for e, team in enumerate(teams):
        layers, steps = [size for size, _ in team], np.cumsum([begins for _, begins in team])
        episodes.append(episode(e, layers, rng.integers(1, 4, sum(layers)), [0.0], steps.tolist()))
    rewards = [rng.normal(size=len(e.turns)).astype(np.float32) for e in episodes]
    level = find_algorithm(name).level
    chain = chain_of(episodes, level, rewards)
    values_EJ = rng.normal(size=chain.mask_EJ.shape) * chain.mask_EJ
    algo = SETTINGS[name](gamma=gamma, gae_lambda=lam)
    advantages, returns = find_algorithm(name).advantages(algo, chain, values_EJ, None)
    for e, team in enumerate(teams):
        of_turn = [n for n, (size, _) in enumerate(team) for _ in range(size)]
        links = [  # (turn, is its first, is its last)
            (k, i == 0, i == n - 1)
            for k, turn in enumerate(episodes[e].turns)
            for n in [1 if level == "action" else len(turn.action)]
            for i in range(n)
        ]
        after = np.zeros((len(links), len(links)))  # what follows a link, by its share
        paid = np.zeros(len(links))
        for j, (k, _, is_last) in enumerate(links):
            if not is_last:
                after[j, j + 1] = 1
                continue
            paid[j] = sum(r for r, n in zip(rewards[e], of_turn, strict=True) if n == of_turn[k])
            firsts = [i for i, x in enumerate(links) if x[1] and of_turn[x[0]] == of_turn[k] + 1]
            after[j, firsts] = 1 / max(1, len(firsts))
        values = values_EJ[e, : len(links)]
        delta = paid + gamma * after @ values - values
        expected, weight = np.zeros(len(links)), np.eye(len(links))
        for _ in links:
            expected += weight @ delta
            weight = gamma * lam * weight @ after
        roundings, most = bounds.sums(len(links)), np.abs(delta).max()
        bounds.close(advantages[e, : len(links)], expected, roundings, most)
        bounds.close(returns[e, : len(links)], expected + values, roundings, most)
        assert not advantages[e, len(links) :].any()


def test_the_critic_may_learn_returns_of_another_lambda():
    rng = np.random.default_rng(0)
    chain = chain_of(small.random_episodes(4, agents=3), "action")
    values_EJ = rng.normal(size=chain.mask_EJ.shape) * chain.mask_EJ
    run = find_algorithm("appo").advantages
    advantages, returns = run(Appo(gae_lambda=0.5, returns_lambda=1.0), chain, values_EJ, None)
    np.testing.assert_array_equal(advantages, run(Appo(gae_lambda=0.5), chain, values_EJ, None)[0])
    np.testing.assert_array_equal(returns, run(Appo(gae_lambda=1.0), chain, values_EJ, None)[1])
    discounted = chain.rewards_EJ.sum(1) * 0.99**2  # of the last turn, to the first of three
    bounds.close(returns[:, 0], discounted)
