"""Every random stream of a run, by name; a pure function of ``run.seed``, so nothing is saved.

A stream's name and the numbers of a draw in it are hashed together with the seed
(``numpy.random.SeedSequence``): no two draws share a key, however large their numbers. Compiled
code numbers further draws from a key (tokens of an action, matrices of an adapter) with
``jax.random.fold_in``.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_TASKS = 1 << 30  # from here on, environments hold out (``envs.base.EVAL_SEEDS``)
_STEPS = 1 << 20  # more than a run has


class Stream(enum.IntEnum):
    """What is random in a run. A number belongs to its name for ever."""

    ADAPTERS = 0
    CRITIC = 1
    ROWS = 2  # places of packed rows in the microbatches, for each attempt at a step
    MINIBATCHES = 3  # order of the microbatches in an update, for each step
    TRAINING = 4  # actions, see ``ActionKey``
    EVALUATION = 5
    DEMONSTRATIONS = 6  # their order, for each pass over all of them
    HELD_OUT = 7  # which demonstrations are only measured
    BRANCHES = 8  # which turns have branches
    BRANCH_ACTIONS = 9  # actions of branches, before the numbers of their ``ActionKey``
    POOL = 10  # which past versions are kept and played, after each attempt at a step


class ActionKey(NamedTuple):
    """Names the random numbers of an action."""

    stream: Stream  # ``TRAINING`` or ``EVALUATION``
    step: int  # the attempt at a training step; 0 where an evaluation does not depend on it
    task: int  # of the episode, as ``member``: see ``types.Sample``
    member: int
    act: int  # number of the act in its episode, in the order in which the workflow yields them
    call: int = 0  # tool calls before it in its turn
    turn: int = 0  # of a branch: the turn that is sampled anew
    branch: int = 0  # of a branch: its number at that turn, from 1


def key_2(seed: int, *numbers: int) -> np.ndarray:
    """Computes the key data of a draw, ``uint32 [2]``, for ``jax.random.wrap_key_data``.

    Args:
        seed: of the run.
        numbers: the stream, and the numbers of the draw in it.
    """
    return np.random.SeedSequence(seed, spawn_key=numbers).generate_state(2)


def numbers_of(key: Sequence[int]) -> Sequence[int]:
    """Lists the numbers of an action's draw, for ``key_2``: branches have a stream of their own, so
    they change no other sample."""
    return (Stream.BRANCH_ACTIONS, *key) if any(key[6:]) else key[:6]


def generator(seed: int, *numbers: int) -> np.random.Generator:
    """Makes NumPy's generator for a draw; arguments as of ``key_2``."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=numbers))


def attempt(step: int, rollbacks: int) -> int:
    """Numbers an attempt at a step: after a rollback, tasks and noise are other ones."""
    return step + rollbacks * _STEPS


def occasion(stream: Stream, attempt: int) -> str:
    """Names, for a message, what an attempt at a step, or an evaluation, is a part of."""
    return "evaluation" if stream == Stream.EVALUATION else f"step {attempt % _STEPS + 1}"


def task(seed: int, number: int) -> int:
    """Finds the task at a place of the endless order of tasks; each seed starts elsewhere."""
    return (seed * 1_000_003 + number) % _TASKS


def demonstrated_task(seed: int, number: int, size: int | None = None) -> int:
    """Finds a task to demonstrate, apart from those that training with this seed begins with.

    Args:
        number: of the demonstration.
        size: how many distinct tasks there are. Training goes through all of them in turn, so
            these are counted back from the task that it begins with, within the same pass.
    """
    if size is None:
        return task(seed, _TASKS // 2 + number)
    first = task(seed, 0)
    return first - first % size + (first - 1 - number) % size
