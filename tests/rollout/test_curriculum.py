"""Easier tasks first, and no others once the team can do them."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from marft_jax.envs import base
from marft_jax.errors import BadInput
from marft_jax.rollout.curriculum import Curriculum
from marft_jax.settings.config import EnvSettings


def with_env(**env) -> EnvSettings:
    return base.settings_type(env.get("name", "arithmetic"))(**env)


def question(source: base.EnvSource) -> str:
    return source.create().reset(3)


def test_the_level_rises_with_the_mean_reward_and_stops_at_the_task_itself():
    config = with_env(difficulty=4, curriculum=0.6)
    curriculum = Curriculum(base.make(config, "train"), config)
    progress, levels, terms = jnp.zeros(2), [], []
    for reward in (0.5, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0):
        levels.append(curriculum.level(progress))
        terms.append(question(curriculum.source(levels[-1])).count("+") + 1)
        progress = curriculum.after(progress, levels[-1], reward)
    assert levels == [0, 0, 1, 1, 1, 2, 2, 2][: len(levels)]
    assert terms == [level + 2 for level in levels]


def test_a_step_of_another_level_moves_nothing():
    """With a lag, those that were played before the level rose come after it."""
    config = with_env(difficulty=4, curriculum=0.5)
    curriculum = Curriculum(base.make(config, "train"), config)
    risen = curriculum.after(jnp.zeros(2), 0, 1.0)
    assert risen.tolist() == [1, 0]
    assert curriculum.after(risen, 0, 1.0).tolist() == [1, 0]
    assert curriculum.after(risen, 1, 0.5).tolist() == [1, 0.25]


def test_without_the_setting_every_step_plays_the_task_itself():
    config = with_env(difficulty=4)
    curriculum = Curriculum(base.make(config, "train"), config)
    progress = curriculum.after(jnp.zeros(2), 0, 1.0)
    assert progress.tolist() == [0, 0] and curriculum.level(progress) == 0
    assert question(curriculum.source(0)).count("+") == 3


def test_a_task_without_easier_ones_has_no_curriculum():
    config = with_env(difficulty=2, curriculum=0.5)
    with pytest.raises(BadInput, match="arithmetic has no easier tasks"):
        Curriculum(base.make(config, "train"), config)


class Levelled:
    """Says its level."""

    levels = 3

    def __init__(self, level: int = 2):
        self._level = level

    def reset(self, seed: int) -> str:
        return f"level {self._level}"

    def step(self, turns):
        raise NotImplementedError


def test_a_users_class_may_have_levels():
    config = with_env(name="test_curriculum:Levelled", curriculum=0.9)
    curriculum = Curriculum(base.make(config, "train"), config)
    assert [question(curriculum.source(i)) for i in range(3)] == ["level 0", "level 1", "level 2"]
    assert question(base.make(config, "eval")) == "level 2"
