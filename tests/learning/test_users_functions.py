"""What a user's functions return to an update is checked where it enters: one line names it."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import on_data
import pytest
import small
from one_step import LAYERS, ONCE, settings, settled

from marft_jax import policy as verbs
from marft_jax.errors import BadInput
from marft_jax.learning import state_parts
from marft_jax.learning.algorithms import find_algorithm
from marft_jax.learning.learner import Learner
from marft_jax.learning.state_parts import StatePart
from marft_jax.policy import Datum
from marft_jax.types import MAIN

LOSSES = {
    "a scalar": (lambda x: x.mean(), r"float32 \[\]"),
    "the first alone": (lambda x: x[:1], r"float32 \[1, \d+\]"),
    "a loss for each row": (lambda x: x.sum(-1), r"float32 \[\d+\]"),
    "whole numbers": (lambda x: (x > 0).astype(int), "int32"),
    "a text": (lambda x: "loss", "'loss'"),
    "a pair": (lambda x: (x, {}), "got"),
    "what raises": (lambda x: x["loss"], "test_users_functions.py"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_policy_loss_has_a_number_for_each_decision(case):
    wrong, got = LOSSES[case]
    config = settings(dataclasses.replace(ONCE, epochs=1))
    algorithm = find_algorithm("appo")._replace(policy_loss=lambda algo, x, old, a: wrong(x))
    base, where = {MAIN: small.base(LAYERS)}, small.one_device()
    learner = Learner(settled(config, "appo"), base, small.team(), algorithm, where)
    episodes = small.random_episodes(4)
    with pytest.raises(BadInput, match=f"--algo.name appo: policy_loss.*{got}"):
        learner.learn(learner.init(), learner.pack(episodes, small.paid(episodes)), 0)


@pytest.mark.parametrize("case", ["a scalar", "whole numbers", "a text"])
@pytest.mark.slow
def test_a_loss_of_the_verbs_has_a_number_for_each_unit(case):
    wrong, got = LOSSES[case]
    policy = verbs.open_policy("tiny", room=1, rank=2)
    policy = verbs.add(policy, 0, verbs.fresh(policy, rank=2, alpha=4.0, targets=("q",)))
    data = [Datum.of(0, [1, 2, 3], [0, 1], [2, 3])]
    with pytest.raises(BadInput, match=f"loss: expected.*{got}"):
        on_data.forward_backward(policy, data, lambda x, inputs: wrong(x))


PARTS = {
    "a value alone": lambda state: jnp.zeros(2),
    "no state": lambda state: (jnp.zeros(2), None),
    "a text": lambda state: ("two", state),
    "an object": lambda state: (object(), state),
    "another shape": lambda state: (jnp.zeros(3), state),
    "another structure": lambda state: ({"a": jnp.zeros(2)}, state),
    "what raises": lambda state: 1 / 0,
}


@pytest.mark.parametrize("case", PARTS)
def test_a_state_part_returns_its_value_and_the_state(case):
    config = settings(ONCE)
    algorithm = find_algorithm("appo")
    base, where = {MAIN: small.base(LAYERS)}, small.one_device()
    state = Learner(settled(config, "appo"), base, small.team(), algorithm, where).init()
    part = StatePart(lambda s: (np.zeros(2), s), lambda value, s, played, seed: PARTS[case](s))
    begun = state_parts.begin({"mine": part}, state)
    with pytest.raises(BadInput, match="state part mine: after_step: "):
        state_parts.after_step({"mine": part}, begun, [], (0, 0))
