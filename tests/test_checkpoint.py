"""Saving and restoring."""

from __future__ import annotations

import dataclasses

import chex
import jax
import pytest
import small

from marft_jax import config as config_lib
from marft_jax import mesh
from marft_jax.algorithms import find_algorithm
from marft_jax.checkpoint import Checkpoints, identity_of
from marft_jax.learner import Learner

CONFIG = config_lib.Config(lora=config_lib.Lora(rank=2), critic=config_lib.Critic(hidden=(8,)))


def learner(config=CONFIG):
    return Learner(config, small.base(), small.team(), find_algorithm("appo"), small.one_device())


def identity(config=CONFIG, **base):
    return identity_of(config, small.base()._replace(**base), small.team())


def noisy(state):
    key = jax.random.key(1)
    return jax.tree.map(lambda x: (x + jax.random.uniform(key, x.shape)).astype(x.dtype), state)


def test_what_is_restored_is_what_was_saved_bit_for_bit(tmp_path):
    state = noisy(learner().init())._replace(step=jax.numpy.int32(7))
    with Checkpoints(tmp_path, identity(), keep=2) as checkpoints:
        checkpoints.save(7, state)
    with Checkpoints(tmp_path, identity(), keep=2) as checkpoints:
        restored = checkpoints.restore(learner().init())
    chex.assert_trees_all_equal(restored, state)
    chex.assert_trees_all_equal_dtypes(restored, state)


def test_the_newest_are_kept(tmp_path):
    state = learner().init()
    with Checkpoints(tmp_path, identity(), keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]


def test_without_a_checkpoint_the_run_begins(tmp_path):
    fresh = learner().init()
    with Checkpoints(tmp_path, identity(), keep=2) as checkpoints:
        assert checkpoints.latest is None and checkpoints.restore(fresh) is fresh


@pytest.mark.parametrize("change", ["base model", "lora.rank", "run.seed"])
def test_a_run_of_something_else_is_refused_by_name(tmp_path, change):
    with Checkpoints(tmp_path, identity(), keep=2) as checkpoints:
        checkpoints.save(1, learner().init())
    others = {
        "base model": identity(digest="other"),
        "lora.rank": identity(dataclasses.replace(CONFIG, lora=config_lib.Lora(rank=4))),
        "run.seed": identity(dataclasses.replace(CONFIG, run=config_lib.Run(seed=5))),
    }
    with Checkpoints(tmp_path, others[change], keep=2) as checkpoints:
        with pytest.raises(config_lib.BadInput, match=change):
            checkpoints.restore(learner().init())


def test_a_state_may_be_donated_as_soon_as_it_is_being_saved(tmp_path):
    """The next training step writes into the same memory while the save still runs."""
    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: x * 0 - 1, state), donate_argnums=0)
    state = noisy(learner().init())
    expected = jax.device_get(jax.tree.map(lambda x: x.copy(), state))
    with Checkpoints(tmp_path, identity(), keep=2) as checkpoints:
        checkpoints.save(1, state)
        jax.block_until_ready(overwrite(state))
    with Checkpoints(tmp_path, identity(), keep=2) as checkpoints:
        chex.assert_trees_all_equal(checkpoints.restore(learner().init()), expected)


def test_a_state_is_restored_onto_another_mesh(tmp_path):
    state = noisy(learner().init())
    with Checkpoints(tmp_path, identity(), keep=2) as checkpoints:
        checkpoints.save(1, state)
    everywhere = jax.device_put(learner().init(), mesh.replicated(small.mesh_of(2, 2, 2)))
    with Checkpoints(tmp_path, identity(), keep=2) as checkpoints:
        restored = checkpoints.restore(everywhere)
    chex.assert_trees_all_equal(jax.device_get(restored), jax.device_get(state))
    assert all(len(x.sharding.device_set) == 8 for x in jax.tree.leaves(restored))


def test_all_that_differs_is_named_in_one_line(tmp_path):
    other = dataclasses.replace(CONFIG, critic=config_lib.Critic(hidden=(8, 8)))
    with Checkpoints(tmp_path, identity(), keep=2) as checkpoints:
        checkpoints.save(1, learner().init())
    with Checkpoints(tmp_path, identity(other, digest="b"), keep=2) as checkpoints:
        with pytest.raises(config_lib.BadInput) as caught:
            checkpoints.restore(learner().init())
    message = str(caught.value)
    assert (
        "base model was 0123, is b" in message and "--critic.hidden was [8], is [8, 8]" in message
    )
    assert "\n" not in message and "another --run.dir" in message
