"""Any mesh trains and samples as one device does, for each kind of algorithm."""

from __future__ import annotations

import functools

import bounds
import jax
import numpy as np
import one_step
import pytest
import small
from jax.sharding import Mesh

from marft_jax.learning import batch as batch_lib
from marft_jax.learning.algorithms import find_algorithm
from marft_jax.learning.learner import Learner
from marft_jax.learning.settings import SETTINGS, resolve
from marft_jax.parallel import mesh
from marft_jax.sampling.protocol import Completion, Request
from marft_jax.settings import config as config_lib
from marft_jax.types import MAIN, Sampling

SHAPES = {(8, 1, 1): "appo", (1, 8, 1): "tppo", (1, 1, 8): "grpo", (2, 2, 2): "appo"}
"""Each mesh, and the algorithm that is tried on it."""


@functools.cache
def episodes():
    return small.random_episodes(16, on_policy=small.adapters(layers=1), group=2)


def config_of(name: str) -> config_lib.Config:
    return small.config(
        lora=config_lib.Lora(rank=small.RANK, alpha=small.ALPHA, targets=small.QV),
        critic=config_lib.Critic(hidden=(16,)),
        algo=SETTINGS[name](
            episodes=16, group_size=2 if name == "grpo" else 1, lr=1e-3,
            epochs=1, minibatches=2, microbatch_tokens=256,
        ),
    )  # fmt: skip


def learned(name: str, where: Mesh, stacked: bool = False):
    """(state, metrics) of two optimiser steps of two microbatches each, the second partly empty."""
    config = config_of(name)
    algorithm, team = find_algorithm(name), small.team()
    rewards = small.paid(episodes())
    batch = batch_lib.build(
        episodes(), rewards, team.owners, config.algo, algorithm.level,
        shards=8,  # the same rows on every mesh
    )  # fmt: skip
    bases = {MAIN: small.base_on(where, 1, stacked)}
    learner = Learner(
        resolve(config, {MAIN: (config.model.base, small.CONFIG)}), bases, team, algorithm, where
    )
    state = learner.init().with_adapters(
        {MAIN: jax.device_put(small.adapters(layers=1), mesh.replicated(where))}
    )
    state, _, metrics = learner.learn(state, batch, 0)
    return jax.device_get(state), jax.device_get(metrics)


@functools.cache
def alone(name: str):
    return learned(name, small.one_device())


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "name"), SHAPES.items(), ids=str)
def test_losses_gradients_and_updates_are_those_of_one_device(shape, name):
    """Metrics, gradients in Adam's moments, adapters and the critic, as far as rounding goes."""
    one_step.alike(learned(name, small.mesh_of(*shape)), alone(name), config_of(name), steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_stacked_layers_learn_what_unrolled_ones_do(shape):
    found = learned("tppo", small.mesh_of(*shape), stacked=True)
    one_step.alike(found, alone("tppo"), config_of("tppo"), steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sampled_text_is_that_of_one_device(shape):
    """The same ids and behaviour log-probs."""
    done, expected = said(small.mesh_of(*shape)), said(small.one_device())
    for ours, theirs in zip(done, expected, strict=True):
        assert ours.ids.tolist() == theirs.ids.tolist()
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=bounds.logprobs())


@functools.cache
def said(where: Mesh) -> list[Completion]:
    rng = np.random.default_rng(3)
    requests = [
        Request(rng.integers(0, 256, 20).astype(np.int32), i % 3, Sampling(8), (0, i, 0))
        for i in range(12)
    ]
    return small.answers(small.engine(where, slots=8, layers=1), requests)
