"""Chooses the tasks that a training step plays, and the episodes that it learns from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from marft_jax import random_keys
from marft_jax.config import Config
from marft_jax.types import Branch, Credit, Episode, Played, Player, Sample

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
    waited_s, failed, wanted = 0.0, 0, config.algo.episodes // _group_size(config)
    kept, groups = set[int](), list[int]()
    for refill in range(_draws(config)):
        missing = wanted - len(kept)
        samples = samples_of(config, step, refill)[: missing * _group_size(config)]
        for part in _with_branches(rollout, samples, config, step):
            played += part.episodes
            rewards += map(credit, part.episodes)
            failed, waited_s = failed + len(part.failed), waited_s + part.waited_s
        groups = list(dict.fromkeys(episode.group for episode in played))
        kept = with_signal(played, rewards) if config.algo.dynamic_sampling else set(groups)
        if len(kept) == wanted:
            break
    kept = kept or set(groups[:wanted])
    learned = [i for i, episode in enumerate(played) if episode.group in kept]
    episodes, earned = _learnable([(played[i], rewards[i]) for i in learned])
    return Collected(episodes, earned, played, rewards, len(groups) - len(kept), failed, waited_s)


def _with_branches(
    rollout: Player, samples: Sequence[Sample], config: Config, step: int
) -> Iterator[Played]:
    """Plays samples, and then ``algo.branches`` further samples of some of their turns."""
    trunks = rollout.play(samples, step)
    yield trunks
    branches = [
        Sample(e.index, e.group, e.member, Branch(e, turn, number))
        for e in trunks.episodes
        for turn in branched_turns(e, config, step)
        for number in range(1, config.algo.branches + 1)
    ]
    if branches:
        yield rollout.play(branches, step)


def branched_turns(episode: Episode, config: Config, step: int) -> list[int]:
    """Chooses the turns of an episode that have branches; a function of seed, step and episode."""
    at, turns = config.algo.branch_at, range(len(episode.turns))
    if not config.algo.branches:
        return []
    if at == "random":
        draw = (step, episode.index, episode.member)
        rng = random_keys.generator(config.run.seed, random_keys.Stream.BRANCHES, *draw)
        return [int(rng.integers(len(turns)))]
    agents = None if at == "every" else at.split(",")
    return [k for k in turns if agents is None or episode.turns[k].name in agents]


def _learnable(
    played: Sequence[tuple[Episode, np.ndarray]],
) -> tuple[list[Episode], list[np.ndarray]]:
    """Trunks as they are; of a branch the turn that is another sample of its trunk's, with all that
    the branch earned: the turns before it are the trunk's, and those after it have no siblings."""
    episodes, rewards = list[Episode](), list[np.ndarray]()
    for episode, earned in played:
        if episode.branch is not None:
            own = episode.turns[episode.branch[0]]
            is_paid = [turn.player == own.player for turn in episode.turns]
            episode = episode._replace(turns=(own._replace(sees=(), index=0),))
            earned = earned[is_paid].sum(keepdims=True)
        episodes.append(episode)
        rewards.append(earned)
    return episodes, rewards


def samples_of(config: Config, step: int, refill: int = 0) -> list[Sample]:
    """Lists the samples of a training step, those of a group in a row.

    A function of seed, step and refill alone, so nothing needs to be saved.
    """
    groups = config.algo.episodes // _group_size(config)
    first = (step * _draws(config) + refill) * groups
    return [
        Sample(random_keys.task(config.run.seed, first + i), refill * groups + i, member)
        for i in range(groups)
        for member in range(_group_size(config))
    ]


def _group_size(config: Config) -> int:
    return config.algo.group_size


def _draws(config: Config) -> int:
    """The most often that tasks are drawn for a step."""
    return 1 + (config.algo.max_refills if config.algo.dynamic_sampling else 0)
