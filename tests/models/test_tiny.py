"""The built-in model: reproducible, lazy before training, able after it."""

from __future__ import annotations

import dataclasses
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from marft_jax.envs.base import held_out
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer
from marft_jax.models.weights import tiny


@pytest.fixture(scope="module")
def build_tiny(repository):
    """The script that makes the model."""
    sys.path.insert(0, str(repository / "scripts"))
    import build_tiny

    yield build_tiny
    sys.path.pop(0)


def test_the_shipped_weights_are_those_of_the_recipe(build_tiny):
    assert tiny.digest() == build_tiny.digest()


@pytest.mark.slow
def test_two_builds_are_bit_equal_and_another_seed_is_not(build_tiny):
    build, short = build_tiny.build, dataclasses.replace(build_tiny.RECIPE, steps=2)
    first, second = build(short)[0], build(short)[0]
    other = build(dataclasses.replace(short, seed=1))[0]
    assert all(np.array_equal(first[path], second[path]) for path in first)
    assert not np.array_equal(first["embed/embedding"], other["embed/embedding"])


def test_the_warm_start_never_sees_a_held_out_task(build_tiny):
    from tiny_dialogues import Author

    author, tokenizer = Author(build_tiny.RECIPE), ByteTokenizer()
    texts = [tokenizer.decode(author.draw(i / 2000).ids) for i in range(2000)]
    tasks = {task for text in texts for task in re.findall(r"\d(?:\+\d)+=\?", text)}
    assert len(tasks) > 500
    assert not [task for task in tasks if held_out(task, build_tiny.RECIPE.holdout)]


@pytest.mark.slow
def test_before_training_the_team_knows_how_but_seldom_bothers(build_tiny, monkeypatch):
    tasks = build_tiny.eval_tasks
    monkeypatch.setattr(build_tiny, "eval_tasks", lambda *which: tasks(*which)[::12])
    params = {p: jnp.asarray(x, jnp.float32) for p, x in tiny.tensors()}
    quality = build_tiny.quality(params, repeats=1)
    assert 0.2 <= quality["team, sampled"] <= 0.5
    assert quality["team, greedy"] <= 0.5
    assert quality["planner's plans right"] > 0.85
    assert quality["careful solver right"] > 0.85
