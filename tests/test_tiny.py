"""The built-in model: reproducible, lazy before training, able after it."""

from __future__ import annotations

import dataclasses
import re
import runpy

import jax.numpy as jnp
import numpy as np
import pytest

from marft_jax.envs.base import held_out
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer
from marft_jax.models.weights import tiny

SHORT = dataclasses.replace(tiny.RECIPE, steps=2)


def test_the_shipped_weights_are_those_of_the_recipe():
    assert tiny._recipe_of(tiny.SHIPPED) == tiny.DIGEST


def test_two_builds_are_bit_equal_and_another_seed_is_not():
    first, second = tiny.build(SHORT)[0], tiny.build(SHORT)[0]
    other = tiny.build(dataclasses.replace(SHORT, seed=1))[0]
    assert all(np.array_equal(first[path], second[path]) for path in first)
    assert not np.array_equal(first["embed/embedding"], other["embed/embedding"])


def test_another_recipe_is_built_once_and_then_cached(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tiny, "DIGEST", "another")
    monkeypatch.setattr(tiny, "build", lambda: ({"a": np.ones(2, np.float32)}, None))
    assert [path for path, _ in tiny.tensors()] == ["a"]
    assert "building" in capsys.readouterr().err
    monkeypatch.setattr(tiny, "build", lambda: pytest.fail("built twice"))
    assert [path for path, _ in tiny.tensors()] == ["a"]


def test_the_warm_start_never_sees_a_held_out_task():
    author, tokenizer = tiny.Author(tiny.RECIPE), ByteTokenizer()
    texts = [tokenizer.decode(author.draw(i / 2000).ids) for i in range(2000)]
    tasks = {task for text in texts for task in re.findall(r"\d(?:\+\d)+=\?", text)}
    assert len(tasks) > 500
    assert not [task for task in tasks if held_out(task, tiny.RECIPE.holdout)]


def test_before_training_the_team_knows_how_but_seldom_bothers(repository):
    script = runpy.run_path(str(repository / "scripts" / "build_tiny.py"))
    quality = script["quality"](
        {p: jnp.asarray(x, jnp.float32) for p, x in tiny.tensors()}, repeats=1
    )
    assert 0.2 <= quality["team, sampled"] <= 0.5
    assert quality["team, greedy"] <= 0.5
    assert quality["planner's plans right"] > 0.85
    assert quality["careful solver right"] > 0.85
