"""Chooses the tasks that a training step plays, and the episodes that it learns from."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from marft_jax import random_keys
from marft_jax.config import Config
from marft_jax.types import Credit, Episode, Player, Sample


class Collected(NamedTuple):
    """The episodes of a training step.

    Attributes:
        episodes, rewards: those to learn from, with the reward of each turn.
        played, played_rewards: all that could be played to their end.
        dropped_groups: groups that were played and are not learned from.
        failed: episodes that count nowhere else.
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
    waited_s, missing, failed, signal = 0.0, groups_of(config), 0, set[int]()
    for refill in range(_draws(config)):
        samples = samples_of(config, step, refill)[: missing * group_size(config)]
        part = rollout.play(samples, step)
        played += part.episodes
        rewards += [credit(episode) for episode in part.episodes]
        failed += len(part.failed)
        waited_s += part.waited_s
        if not config.algo.dynamic_sampling:
            return Collected(played, rewards, played, rewards, 0, failed, waited_s)
        signal = with_signal(played, rewards)
        missing = groups_of(config) - len(signal)
        if not missing:
            break
    groups = list(dict.fromkeys(episode.group for episode in played))
    kept = signal or set(groups[: groups_of(config)])
    own = [i for i, episode in enumerate(played) if episode.group in kept]
    episodes, own_rewards = [played[i] for i in own], [rewards[i] for i in own]
    dropped = len(groups) - len(kept)
    return Collected(episodes, own_rewards, played, rewards, dropped, failed, waited_s)


def samples_of(config: Config, step: int, refill: int = 0) -> list[Sample]:
    """Lists the samples of a training step, those of a group in a row.

    A function of seed, step and refill alone, so nothing needs to be saved.
    """
    groups = groups_of(config)
    first = (step * _draws(config) + refill) * groups
    return [
        Sample(random_keys.task(config.run.seed, first + i), refill * groups + i, member)
        for i in range(groups)
        for member in range(group_size(config))
    ]


def group_size(config: Config) -> int:
    """Episodes that share a task."""
    return config.algo.group_size or 1


def groups_of(config: Config) -> int:
    """Tasks per training step."""
    return config.algo.episodes // group_size(config)


def _draws(config: Config) -> int:
    """The most often that tasks are drawn for a step."""
    return 1 + (config.algo.max_refills if config.algo.dynamic_sampling else 0)


def with_signal(episodes: Sequence[Episode], rewards: Sequence[np.ndarray]) -> set[int]:
    """The groups in which turns of one place (an agent's n-th turn) differ in their return-to-go.

    Where one episode only reached a place, all turns of the group are compared. That is what
    ``advantages.minus_like`` does: the groups left out would teach nothing.
    """
    earned: dict[int, dict[tuple[int, int], list[float]]] = {}
    sizes = collections.Counter(episode.group for episode in episodes)
    for episode, rewards_K in zip(episodes, rewards, strict=True):
        own = earned.setdefault(episode.group, {})
        returns_K = np.cumsum(rewards_K[::-1].astype(np.float64))[::-1]
        for place, value in zip(episode.places, returns_K.tolist(), strict=True):
            own.setdefault(place, []).append(value)
    return {
        group
        for group, own in earned.items()
        if sizes[group] > 1 and any(map(_differ, _compared(list(own.values()))))
    }


def _compared(earned: list[list[float]]) -> list[list[float]]:
    """The sets that are compared, of what was earned at each place of a group."""
    several = [values for values in earned if len(values) > 1]
    return several if len(several) == len(earned) else [*several, sum(earned, [])]


def _differ(values: Sequence[float]) -> bool:
    """True for a difference beyond rounding."""
    return max(values) - min(values) > 1e-5 * max(map(abs, values))
