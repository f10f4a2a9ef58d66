"""Streams of random numbers never meet, and repeat."""

from __future__ import annotations

import itertools

import jax
import numpy as np

from marft_jax import random_keys
from marft_jax.envs.base import EVAL_SEEDS
from marft_jax.random_keys import ActionKey, Stream, attempt, generator, key_2


def test_every_draw_has_a_key_of_its_own():
    large = (0, 1, 2, 2**16, 2**32, 2**40)
    drawn = [
        (seed, *random_keys.numbers_of(ActionKey(stream, *numbers)))
        for seed in (0, 1)
        for stream in (Stream.TRAINING, Stream.EVALUATION)
        for numbers in (
            *itertools.product(large, large, (0, 1), (0, 1), (0, 1)),
            *itertools.product((0, 1), (0, 1), (0,), (0, 1), (0, 1), (0, 1), (1, 2)),
        )
    ]
    drawn += [(seed, stream, *more) for seed in (0, 1) for stream in Stream for more in ((), (0,))]
    assert len({key_2(*numbers).tobytes() for numbers in drawn}) == len(drawn)


def test_a_key_repeats_and_jax_takes_it():
    key = key_2(3, Stream.ADAPTERS)
    assert key.tolist() == key_2(3, Stream.ADAPTERS).tolist() == [819382448, 3364253229]
    assert jax.random.key_data(jax.random.wrap_key_data(key)).tolist() == key.tolist()
    one, other = (generator(3, Stream.ROWS, step).permutation(50) for step in (0, 1))
    assert one.tolist() != other.tolist()
    np.testing.assert_array_equal(one, generator(3, Stream.ROWS, 0).permutation(50))


def test_tasks_stay_below_those_that_are_held_out():
    numbers = [
        random_keys.task(seed, n)
        for seed in (0, 1073, 1074, 2**31 - 1)
        for n in (0, attempt(9, 99))
    ]
    assert all(0 <= number < EVAL_SEEDS for number in numbers)
    assert len(set(numbers)) == len(numbers) and random_keys.task(0, 5) == 5


def test_a_message_names_the_step_and_neither_the_attempt_at_it_nor_the_step_of_an_evaluation():
    again = attempt(2, rollbacks=3)
    assert random_keys.occasion(Stream.TRAINING, again) == "step 3"
    assert random_keys.occasion(Stream.EVALUATION, 2) == "evaluation"
