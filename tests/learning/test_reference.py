"""A whole training step equals an independent one, written from the definitions in NumPy."""

from __future__ import annotations

import bounds
import jax
import numpy as np
import pytest
import reference_update
import small
from one_step import LAYERS, fresh, learner, policy_of, settings, settled

from marft_jax.learning.credit import make_credit
from marft_jax.learning.settings import SETTINGS
from marft_jax.types import MAIN

ALGO = dict(epochs=3, minibatches=1, lr=1e-3, microbatch_tokens=128)
SHAPED = dict(reward_bias=-0.5, reward_scale=4.0, reward_clip=1.5)
GROUPS = dict(group_size=4, credit_discount=0.5, **SHAPED)
CASES = {
    "appo": dict(credit="step_discount", credit_discount=0.5, kl_coef=0.1, **SHAPED),
    "tppo": dict(normalize="agent", kl_coef=0.05, gae_lambda=0.9, clip_high=0.3),
    "grpo": dict(credit="step_discount", kl_coef=0.1, kl_in="loss", kl_estimator="k3", **GROUPS),
    "gspo": dict(
        credit="step_discount", normalize="group_turn", clip=0.02, dual_clip=1.05, **GROUPS
    ),
    "reinforce": dict(ratio="word", entropy_coef=0.0, **GROUPS),
}


@pytest.fixture(scope="module")
def episodes():
    """Two tasks, four samples each, of one to three steps, sampled by a policy not far away."""
    rng, made = np.random.default_rng(4), []
    whole = iter(small.random_episodes(8, steps=3, seed=2, temperature=0.7, group=4))
    for e, steps in zip(whole, [1, 3, 2, 2, 3, 2, 1, 1], strict=True):
        turns = [t for t in e.turns if t.step < steps]
        results = [r._replace(agent_rewards={"planner": 0.2 * e.index}) for r in e.results[:steps]]
        made.append(e._replace(turns=turns, results=results))
    made = small.with_policy(made, small.adapters(layers=LAYERS))

    def stale(t):
        return t._replace(logprobs=(t.logprobs + rng.normal(size=len(t.action)) / 10).astype("f4"))

    return [e._replace(turns=[stale(t) for t in e.turns]) for e in made]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_a_training_step_is_that_of_the_definitions(episodes, name):
    """Adapters, value head and the moments of Adam, as far as rounding goes."""
    config = settings(SETTINGS[name](**ALGO, **CASES[name]))
    ours, state = learner(config, name), fresh(config, name)
    algo = settled(config, name).algo
    rewards = list(map(make_credit(algo, small.team(2)).pay, episodes))
    batch = ours.pack(episodes, rewards)
    assert len(small.rows_of(batch).tokens.ids_BT) > 1  # cut
    assert small.rows_of(batch).turns.mask_BK.sum(-1).max() > 1  # packed
    start = jax.device_get(state)
    head = [kernel[0] for kernel in start.critic[MAIN].head]
    begun = start.adapters[MAIN]
    expected = reference_update.update(name, settled(config, name), episodes, begun, head)
    state, _, metrics = ours.learn(state, batch, 0)
    state = jax.device_get(state)
    if name == "reinforce":  # clips nothing
        assert "clip_fraction" not in metrics
    else:
        assert (metrics["clip_fraction"] > 0.01).all()

    roundings = bounds.update(layers=LAYERS, tokens=128)

    def check(got, adam, rate):
        """Parameters and the state of Adam, against those of the definitions."""
        params, (_, moments) = got
        assert (moments.count == adam.count).all() and adam.count == ALGO["epochs"]
        leaves = (jax.tree.leaves(x) for x in (params, moments.mu, moments.nu))
        params, mean, square = (
            [x.reshape(y.shape) for x, y in zip(own, adam.params, strict=True)] for own in leaves
        )
        bounds.close(mean, adam.mean, roundings)
        bounds.close(square, adam.square, 2 * roundings)
        bounds.close_steps(params, adam.params, adam.square, rate, roundings, adam.count)

    for n, own in enumerate(expected.adapters):
        got = jax.tree.map(lambda x, n=n: x[n], policy_of(state)[:2])
        moved = [x - y[n] for x, y in zip(own.params, jax.tree.leaves(begun), strict=True)]
        assert max(np.abs(x).max() for x in moved) > 1e-3
        check(got, own, config.algo.lr)
    if head:
        check(
            (state.critic[MAIN].head, state.critic_opt[MAIN].head), expected.head, config.critic.lr
        )
