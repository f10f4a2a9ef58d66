"""Chooses the tasks that a training step plays, and the episodes that it learns from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from marft_jax import random_keys
from marft_jax.config import Config
from marft_jax.rollout.branches import learnable, play_samples
from marft_jax.types import Credit, Episode, Player, Sample

HasSignal = Callable[[Sequence[Episode], Sequence[np.ndarray]], set[int]]
"""Episodes and the rewards of their turns to the groups that something is learned from."""


class Collected(NamedTuple):
    """Episodes of a training step."""

    episodes: Sequence[Episode]  # those to learn from
    rewards: Sequence[np.ndarray]  # of each of their turns
    played: Sequence[Episode]  # all that could be played to their end
    played_rewards: Sequence[np.ndarray]
    dropped_groups: int  # that were played and are not learned from
    failed: int  # episodes that count nowhere else
    waited_s: float  # for environments
    version: int = 0  # updates before which the adapters are that sampled them
    level: int = 0  # of the curriculum
    prefix_cached: int = 0  # prompt tokens that came from the prefix cache
    seconds: Mapping[str, float] = {}  # that its parts took, by the names of their metrics


def collect(
    rollout: Player, credit: Credit, with_signal: HasSignal, config: Config, step: int
) -> Collected:
    """Plays the tasks of a step.

    With ``algo.dynamic_sampling``, groups without signal are dropped and further tasks played in
    their place, ``algo.max_refills`` times at most (DAPO, Yu et al. 2025, section 3.2). Where no
    group has any, all of the first ones are kept: their advantages are zero.
    """
    played: list[Episode] = []
    rewards: list[np.ndarray] = []
    size = config.algo.group_size
    waited_s, failed, wanted = 0.0, 0, config.algo.episodes // size
    kept, groups = set[int](), list[int]()
    for refill in range(_draws(config)):
        missing = wanted - len(kept)
        samples = samples_of(config, step, refill)[: missing * size]
        for part in play_samples(rollout, credit, samples, config, step):
            played += part.episodes
            rewards += [_earned(credit, episode) for episode in part.episodes]
            failed, waited_s = failed + len(part.failed), waited_s + part.waited_s
        groups = list(dict.fromkeys(episode.group for episode in played))
        kept = with_signal(played, rewards) if config.algo.dynamic_sampling else set(groups)
        if len(kept) == wanted:
            break
    kept = kept or set(groups[:wanted])
    both = [pair for pair in zip(played, rewards, strict=True) if pair[0].group in kept]
    episodes, earned = learnable(both, by_step=credit.by_step)
    return Collected(episodes, earned, played, rewards, len(groups) - len(kept), failed, waited_s)


def _earned(credit: Credit, episode: Episode) -> np.ndarray:
    return np.asarray(episode.paid, np.float32) if episode.paid else credit(episode)


def samples_of(config: Config, step: int, refill: int = 0) -> list[Sample]:
    """Lists the samples of a training step, those of a group in a row.

    A function of seed, step and refill alone, so nothing needs to be saved.
    """
    size = config.algo.group_size
    groups = config.algo.episodes // size
    first = (step * _draws(config) + refill) * groups
    return [
        Sample(random_keys.task(config.run.seed, first + i), refill * groups + i, member)
        for i in range(groups)
        for member in range(size)
    ]


def _draws(config: Config) -> int:
    """The most often that tasks are drawn for a step."""
    return 1 + (config.algo.max_refills if config.algo.dynamic_sampling else 0)
