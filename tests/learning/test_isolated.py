"""A number of one agent that is not finite stops that agent alone."""

from __future__ import annotations

import contextlib
import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from one_step import LAYERS, LORA, member, on_device, same

from marft_jax.learning.advantages import returns_to_go
from marft_jax.learning.algorithms import ALGORITHMS, normalized_advantages
from marft_jax.learning.chain import make_chain
from marft_jax.learning.learner import Learner
from marft_jax.learning.normalizers import NORMALIZERS
from marft_jax.learning.settings import SETTINGS, resolve
from marft_jax.run.guard import by_agent
from marft_jax.settings.config import Critic
from marft_jax.types import MAIN

NO_LOSS, NO_SLOPE = 77.0, 78.0
"""Advantages for which the loss, or its gradient alone, is not finite."""
VALUES = [np.nan, np.inf, -np.inf]
NAMES = ["appo", "tppo", "grpo", "gspo", "cispo", "reinforce"]
ADVANTAGES = dict[int, float]()
"""Agent to the advantages that it has instead of its own, now."""


@contextlib.contextmanager
def advantages_of(agent, value):
    """All advantages of an agent are this value."""
    ADVANTAGES[agent] = value
    try:
        yield
    finally:
        ADVANTAGES.clear()


def of_ones_own(algorithm):
    """The algorithm with ``ADVANTAGES``, and a loss that two of them spoil: one program for all."""

    def advantages(config, chain, values_EJ, baseline_P):
        found_EJ, returns_EJ = algorithm.advantages(config, chain, values_EJ, baseline_P)
        for agent, value in ADVANTAGES.items():
            found_EJ = np.where(chain.agent_EJ == agent, value, found_EJ)
        return found_EJ, returns_EJ

    def loss(config, logprobs, old_logprobs, advantages):
        own = algorithm.policy_loss(config, logprobs, old_logprobs, advantages)
        own = jnp.where(advantages == NO_LOSS, jnp.nan, own)
        is_marked = advantages == NO_SLOPE
        return jnp.where(is_marked, jnp.sqrt(jnp.where(is_marked, 0 * logprobs, 1)), own)

    return algorithm._replace(advantages=advantages, policy_loss=loss)


def algo_of(name, **more):
    group = {} if SETTINGS[name].has_critic else {"group_size": 4}
    how = {"normalize": "none", "lr": 1e-3, "microbatch_tokens": 512, "epochs": 1, "minibatches": 1}
    return SETTINGS[name](episodes=8, **{**how, **group, **more})


@functools.cache
def learner_of(name, mode="shared", bases=(MAIN,), **more):
    algorithm = of_ones_own(ALGORITHMS[name])
    critic = Critic(mode=mode, hidden=(8,))
    config = small.config(algo=algo_of(name, **more), lora=LORA, critic=critic)
    team, base = small.team(2), small.base(LAYERS)
    if len(bases) > 1:
        names = {b: (name,) for b, name in zip(bases, team.names, strict=True)}
        how = {"adapter_names": names, "trainable": dict.fromkeys(bases, (True,))}
        team = team._replace(bases=bases, owners=(0, 0), **how)
    settings = resolve(config, dict.fromkeys(bases, ("tiny", base.config)))
    models = dict.fromkeys(bases, base)
    return Learner(settings, models, team, algorithm, small.one_device())


EPISODES = small.random_episodes(8, steps=2, group=4)


def update(learner, spoil=lambda batch: batch, state=None, episodes=EPISODES):
    """(state before, state after, metrics) of a step of two agents, on the host."""
    state = state or learner.init().with_adapters({MAIN: small.adapters(2, layers=LAYERS)})
    before = jax.device_get(state)
    batch = spoil(learner.pack(episodes, small.paid(episodes)))
    after, _, metrics = learner.learn(on_device(before), batch, 0)
    return before, jax.device_get(after), jax.device_get(metrics)


@functools.cache
def sound_update(name):
    """State after a step in which all numbers are finite."""
    return update(learner_of(name))[1]


def check(agent, sound, before, after, metrics):
    """The agent is as before, the other one as after a sound update, and the guard knows."""
    other = 1 - agent
    assert same(member(after, agent), member(before, agent))
    assert same(member(after, other), member(sound, other))
    assert not same(member(after, other), member(before, other))
    assert metrics["nonfinite"]["gradient"].tolist() == [float(agent == 0), float(agent == 1)]
    assert np.isfinite(metrics["grad_norm"][other]) and np.isnan(metrics["grad_norm"][agent])
    found = by_agent(metrics["nonfinite"], small.team(2))
    assert not any(found[small.NAMES[other]].values()) and found[small.NAMES[agent]]["gradient"]


@pytest.mark.slow
@pytest.mark.parametrize("agent", [0, 1])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", NAMES)
def test_advantages_of_an_algorithm_of_ones_own(name, value, agent):
    sound = sound_update(name)
    with advantages_of(agent, value):
        spoiled = update(learner_of(name))
    check(agent, sound, *spoiled)
    assert spoiled[2]["nonfinite"]["advantages"][agent] > 0
    if SETTINGS[name].has_critic:
        assert same(spoiled[1].critic, sound.critic)


@pytest.mark.slow
@pytest.mark.parametrize("mark", [NO_LOSS, NO_SLOPE])
@pytest.mark.parametrize("name", NAMES)
def test_a_loss_of_ones_own(name, mark):
    with advantages_of(0, mark):
        check(0, sound_update(name), *update(learner_of(name)))


def decisions_of(batch, agent):
    """Places of an agent's action tokens in the rows of a batch."""
    rows = small.rows_of(batch)
    agents = np.take_along_axis(rows.turns.agent_BK, rows.actions.turn_BA, axis=-1)
    return (rows.actions.mask_BA > 0) & (agents == agent)


def first_only(where):
    return where & (np.cumsum(where).reshape(where.shape) == 1)


@pytest.mark.slow
@pytest.mark.parametrize("agent", [0, 1])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", ["appo", "grpo", "gspo"])
def test_one_behaviour_logprob(name, value, agent):
    def spoil(batch):
        rows = small.rows_of(batch)
        old_BA = np.array(rows.actions.behaviour_BA)
        old_BA[first_only(decisions_of(batch, agent))] = value
        actions = rows.actions._replace(behaviour_BA=old_BA)
        return small.with_rows(batch, rows._replace(actions=actions))

    learner = learner_of(name)
    before, after, metrics = update(learner, spoil)
    if np.isnan(value):
        check(agent, sound_update(name), before, after, metrics)
        found = metrics["nonfinite"]
        assert found["behaviour logprobs"].tolist() == [agent == 0, agent == 1]
        assert not found["logprobs"].any()
    assert same(member(after, 1 - agent), member(sound_update(name), 1 - agent))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))


@pytest.mark.slow
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
@pytest.mark.parametrize("reference", ["base", "start"])
def test_reference_logprobs(kl_in, reference, monkeypatch):
    """In the reward a turn is charged with the KL of the turns behind it as well, so the agent
    that acts first is the one whose numbers are spoiled."""
    how = {"kl_coef": 0.1, "kl_in": kl_in, "kl_reference": reference, "entropy_coef": 0.01}
    learner, agent = learner_of("grpo", **how), 0
    read, single = learner._read, small.random_episodes(8, steps=1, group=4)

    def spoiled(state, base, part):
        known = read(state, base, part)
        first = next(i for i, datum in enumerate(part.data.data) if datum.owner == agent)
        reference = [x.copy() for x in known.reference]
        reference[first][0] = np.nan
        return known._replace(reference=reference)

    _, sound, _ = update(learner, episodes=single)
    with monkeypatch.context() as patch:
        patch.setattr(learner, "_read", spoiled)
        check(agent, sound, *update(learner, episodes=single))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["shared", "heads", "lora"])
@pytest.mark.parametrize("what", ["targets_EJ", "weights"])
def test_returns_and_entropy_weights(mode, what, monkeypatch):
    learner = learner_of("appo", mode=mode, entropy_coef=0.01)
    before, sound, _ = update(learner)
    whole = learner._estimate

    def estimates(state, batch, *scored):
        found, *rest = whole(state, batch, *scored)
        is_own_EJ = (batch.chain.agent_EJ == 0) & (batch.chain.mask_EJ > 0)
        if what == "weights":
            spoiled_EJ = np.where(is_own_EJ, np.nan, found.inputs["entropy"])
            return found._replace(inputs=found.inputs | {"entropy": spoiled_EJ}), *rest
        targets_EJ = np.where(is_own_EJ, np.nan, found.targets_EJ)
        return found._replace(targets_EJ=targets_EJ), *rest

    with monkeypatch.context() as patch:
        patch.setattr(learner, "_estimate", estimates)
        _, after, metrics = update(learner)
    if what == "weights":
        check(0, sound, before, after, metrics)
        assert same(after.critic, sound.critic)
        return
    assert same(after.adapters, sound.adapters)
    assert metrics["nonfinite"]["values"].tolist() == [16, 0]
    heads, adapters = (getattr(after.critic[MAIN], part) for part in ("head", "adapters"))
    one = lambda tree, n: jax.tree.map(lambda x: x[n], tree)  # noqa: E731
    if mode == "heads":
        assert same(one(heads, 1), one(sound.critic[MAIN].head, 1))
        assert same(one(heads, 0), one(before.critic[MAIN].head, 0))
    else:
        assert same(heads, before.critic[MAIN].head)
    if mode == "lora":
        assert same(one(adapters, 1), one(sound.critic[MAIN].adapters, 1))
        assert same(one(adapters, 0), one(before.critic[MAIN].adapters, 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bases", "normalize"),
    [(("other", MAIN), "none"), ((MAIN, "other"), "none"), ((MAIN, "other"), "batch")],
)
def test_agents_on_another_base(bases, normalize):
    def of(learner):
        adapters = small.adapters(2, layers=LAYERS)
        own = {b: jax.tree.map(lambda x, n=n: x[n : n + 1], adapters) for n, b in enumerate(bases)}
        return update(learner, state=learner.init().with_adapters(own))

    learner = learner_of("grpo", bases=bases, normalize=normalize)
    _, sound, _ = of(learner)
    with advantages_of(0, np.nan):
        before, after, metrics = of(learner)
    assert same(after.policies[bases[0]], before.policies[bases[0]])
    assert not same(after.policies[bases[1]], before.policies[bases[1]])
    if normalize == "none":
        assert same(after.policies[bases[1]], sound.policies[bases[1]])
    assert metrics["nonfinite"]["gradient"].tolist() == [1, 0]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("agent", [0, 1])
@pytest.mark.parametrize("normalize", [*NORMALIZERS, "median"])
@pytest.mark.parametrize("name", ["appo", "grpo", "reinforce"])
def test_others_are_normalised_as_if_the_agent_had_not_acted(
    name, normalize, agent, value, monkeypatch
):
    """Those of a chain whose other turns have no weight."""

    def median(advantages_EJ, chain):
        own = chain.weight_EJ > 0
        return advantages_EJ - np.median(advantages_EJ[own])

    episodes = small.random_episodes(8, agents=3, steps=2, group=4)
    if normalize == "median":
        own_median = types.SimpleNamespace(median=median)
        monkeypatch.setitem(sys.modules, "own_median", own_median)
        normalize = "own_median:median"
    algo = algo_of(name, normalize=normalize)
    algorithm = of_ones_own(ALGORITHMS[name])
    chain = make_chain(episodes, small.paid(episodes), algorithm.level)
    values_EJ = np.random.default_rng(0).normal(size=chain.mask_EJ.shape) * chain.mask_EJ
    how = algo, chain, values_EJ, np.zeros(3)
    with advantages_of(agent, value):
        found_EJ, _ = normalized_advantages(algo, algorithm, *how[1:])
    own_EJ, real_EJ = chain.agent_EJ == agent, chain.mask_EJ > 0
    assert np.isnan(found_EJ[own_EJ & real_EJ]).all()
    assert np.isfinite(found_EJ[~own_EJ & real_EJ]).all()
    with advantages_of(agent, -value):
        another, _ = normalized_advantages(algo, algorithm, *how[1:])
    np.testing.assert_array_equal(found_EJ, another)
    if normalize == "none":
        sound, _ = normalized_advantages(algo, algorithm, *how[1:])
        np.testing.assert_array_equal(found_EJ[~own_EJ & real_EJ], sound[~own_EJ & real_EJ])


def test_what_agents_earned_alike_stays_without_advantage_beside_one_that_has_none():
    """The sizes that rounding is measured against are those of the other agents."""
    episodes = [small.episode(0, e.turns[:2], [0.3]) for e in EPISODES]
    algo = algo_of("grpo", normalize="group")
    chain = make_chain(episodes, small.paid(episodes), "token")
    rewards_EJ = np.where((chain.agent_EJ == 0) & (chain.mask_EJ > 0), np.nan, chain.rewards_EJ)
    spoiled = chain._replace(rewards_EJ=rewards_EJ)
    found_EJ, _ = normalized_advantages(algo, ALGORITHMS["grpo"], spoiled, rewards_EJ, np.zeros(2))
    last_EJ = (chain.agent_EJ == 1) & (chain.mask_EJ > 0)
    assert (returns_to_go(spoiled)[last_EJ] > 0).all() and not found_EJ[last_EJ].any()
