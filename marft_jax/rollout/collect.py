"""Chooses the tasks that a training step plays, and the episodes that it learns from."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from marft_jax.config import Config
from marft_jax.types import Credit, Episode, Player

_TASKS_PER_SEED = 1_000_003  # each seed starts elsewhere in the endless order of tasks


class Collected(NamedTuple):
    """The episodes of a training step.

    Attributes:
        episodes, rewards: those to learn from, with the reward of each turn.
        played, played_rewards: all of them.
        dropped_groups: groups that were played and are not learned from.
        failed: episodes that could not be played to their end, and count nowhere else.
        waited_s: seconds spent waiting for environments.
    """

    episodes: Sequence[Episode]
    rewards: Sequence[np.ndarray]
    played: Sequence[Episode]
    played_rewards: Sequence[np.ndarray]
    dropped_groups: int
    failed: int
    waited_s: float


def collect(rollout: Player, credit: Credit, config: Config, step: int) -> Collected:
    """Plays the tasks of a step.

    With ``algo.dynamic_sampling``, groups without signal are dropped and further tasks played in
    their place, ``algo.max_refills`` times at most (DAPO, Yu et al. 2025, section 3.2). Where no
    group has any, all of the first ones are kept: their advantages are zero.
    """
    played: list[Episode] = []
    rewards: list[np.ndarray] = []
    waited_s, missing, failed, signal = 0.0, groups_of(config), 0, set()
    for refill in range(1 + (config.algo.max_refills if config.algo.dynamic_sampling else 0)):
        tasks = tasks_of(config, step, refill)[: missing * group_size(config)]
        tried = rollout.play(tasks, step, first=refill * config.algo.episodes)
        played += [episode for episode in tried if episode.turns]
        failed += sum(not episode.turns for episode in tried)
        waited_s += rollout.waited_s
        rewards += [credit(episode) for episode in played[len(rewards) :]]
        if not config.algo.dynamic_sampling:
            return Collected(played, rewards, played, rewards, 0, failed, waited_s)
        signal = with_signal(played, rewards)
        missing = groups_of(config) - len(signal)
        if not missing:
            break
    every = list(dict.fromkeys(episode.index for episode in played))
    kept = signal or set(every[: groups_of(config)])
    episodes, own = zip(
        *((e, r) for e, r in zip(played, rewards, strict=True) if e.index in kept), strict=True
    )
    dropped = len(every) - len(kept)
    return Collected(episodes, own, played, rewards, dropped, failed, waited_s)


def tasks_of(config: Config, step: int, refill: int = 0) -> list[int]:
    """The tasks of a training step, one number per episode, those of a group in a row.

    A function of seed, step and refill alone, so nothing needs to be saved.
    """
    draws = 1 + (config.algo.max_refills if config.algo.dynamic_sampling else 0)
    groups = groups_of(config)
    first = config.run.seed * _TASKS_PER_SEED + (step * draws + refill) * groups
    return [task for task in range(first, first + groups) for _ in range(group_size(config))]


def group_size(config: Config) -> int:
    """Episodes that share a task."""
    return config.algo.group_size or 1


def groups_of(config: Config) -> int:
    """Tasks per training step."""
    return config.algo.episodes // group_size(config)


def with_signal(episodes: Sequence[Episode], rewards: Sequence[np.ndarray]) -> set[int]:
    """The tasks in which turns of one place (an agent's n-th turn) differ in their return-to-go.

    Where one episode only reached a place, all turns of the task are compared. That is what
    ``advantages.minus_like`` does: the tasks left out would teach nothing.
    """
    earned: dict[int, dict[tuple[int, int], list[float]]] = {}
    samples = collections.Counter(episode.index for episode in episodes)
    for episode, rewards_K in zip(episodes, rewards, strict=True):
        own = earned.setdefault(episode.index, {})
        returns_K = np.cumsum(rewards_K[::-1].astype(np.float64))[::-1]
        for place, value in zip(episode.places, returns_K.tolist(), strict=True):
            own.setdefault(place, []).append(value)
    return {
        task
        for task, own in earned.items()
        if samples[task] > 1 and any(map(_differ, _compared(list(own.values()))))
    }


def _compared(earned: list[list[float]]) -> list[list[float]]:
    """The sets that are compared, of what was earned at each place of a task."""
    alike = [values for values in earned if len(values) > 1]
    return alike if len(alike) == len(earned) else [*alike, sum(earned, [])]


def _differ(values: Sequence[float]) -> bool:
    """By more than rounding."""
    return max(values) - min(values) > 1e-5 * max(map(abs, values))
