"""Chooses the tasks that a training step plays, and the episodes that it learns from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from marft_jax import random_keys
from marft_jax.rollout.branches import learnable, play_samples
from marft_jax.rollout.tool_health import Called, calls_of, find_lost
from marft_jax.settings.config import Algo, Config
from marft_jax.types import Credit, Episode, Player, Sample

HasSignal = Callable[[Sequence[Episode], Sequence[np.ndarray]], set[int]]
"""Takes episodes with the rewards of their turns; returns the groups that can teach something."""


class Collected(NamedTuple):
    """Episodes of a training step.

    Attributes:
        episodes: episodes to learn from.
        rewards: reward of each of their turns.
        played: all episodes that ended without a failure.
        played_rewards: reward of each of their turns.
        dropped_groups: number of groups that were played and are not learned from.
        failed: number of failed episodes, which count nowhere else.
        waited_s: seconds in which nothing was sampled, as environments had to answer first.
        updates: number of updates that made the adapters that sampled them.
        level: level of the curriculum.
        stats: statistics of the sampler, by the names of their metrics.
        seconds: durations of the parts of the step, by the names of their metrics.
        calls: all calls of tools, those of lost episodes too.
    """

    episodes: Sequence[Episode]
    rewards: Sequence[np.ndarray]
    played: Sequence[Episode]
    played_rewards: Sequence[np.ndarray]
    dropped_groups: int
    failed: int
    waited_s: float
    updates: int = 0
    level: int = 0
    stats: Mapping[str, float] = {}
    seconds: Mapping[str, float] = {}
    calls: Sequence[Called] = ()


def collect(
    rollout: Player, credit: Credit, with_signal: HasSignal, config: Config, step: int
) -> Collected:
    """Plays the tasks of a step, and selects the episodes to learn from.

    With ``algo.dynamic_sampling``, groups without signal are dropped and other tasks are played in
    their place, at most ``algo.max_refills`` times. Where no group has a signal, the first groups
    are kept; their advantages are zero.

    Source: DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.2).

    Args:
        step: number of the attempt at the step.
    """
    everything = list[tuple[Episode, np.ndarray]]()
    usable = everything
    algo = config.algo.part(Algo)
    waited_s, failed, wanted = 0.0, 0, algo.episodes // algo.group_size
    kept, groups = set[int](), list[int]()
    played, rewards = list[Episode](), list[np.ndarray]()
    for refill in range(_draws(algo)):
        missing = wanted - len(kept)
        samples = samples_of(config, step, refill)[: missing * algo.group_size]
        for part in play_samples(rollout, credit, samples, config, step):
            everything += [(episode, _earned(credit, episode)) for episode in part.episodes]
            failed, waited_s = failed + len(part.failed), waited_s + part.waited_s
        lost = find_lost([episode for episode, _ in everything])
        usable = [pair for pair in everything if pair[0][:3] not in lost]
        played, rewards = map(list, zip(*usable, strict=True))
        groups = list(dict.fromkeys(episode.group for episode in played))
        kept = set(groups)
        if algo.dynamic_sampling:
            kept = with_signal(played, list(map(credit.of_task, played)))
        if len(kept) == wanted:
            break
    kept = kept or set(groups[:wanted])
    both = [pair for pair in usable if pair[0].group in kept]
    episodes, earned = learnable(both, by_step=credit.by_step)
    failed, dropped = failed + len(everything) - len(usable), len(groups) - len(kept)
    calls, numbers = calls_of(episode for episode, _ in everything), (dropped, failed, waited_s)
    return Collected(episodes, earned, played, rewards, *numbers, calls=calls)


def _earned(credit: Credit, episode: Episode) -> np.ndarray:
    return np.asarray(episode.paid, np.float32) if episode.paid else credit.pay(episode)


def samples_of(config: Config, step: int, refill: int = 0) -> list[Sample]:
    """Lists the samples of a training step, those of a group in a row.

    They are a function of seed, step and refill alone, so nothing needs to be saved.
    """
    algo = config.algo.part(Algo)
    groups = algo.episodes // algo.group_size
    first = (step * _draws(algo) + refill) * groups
    return [
        Sample(random_keys.task(config.run.seed, first + i), refill * groups + i, member)
        for i in range(groups)
        for member in range(algo.group_size)
    ]


def _draws(algo: Algo) -> int:
    """How often tasks are drawn for a step, at most."""
    return 1 + (algo.max_refills if algo.dynamic_sampling else 0)
