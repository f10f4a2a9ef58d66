"""The most that a training step has to do: turns, tokens and rows, before any is played.

Every turn is taken to be as long as it may be: its prompt fills what its action leaves of the
context. What a run really meets is shorter, so that memory, time and traffic are upper bounds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from marft_jax.config import Config
from marft_jax.learning import batch as batch_lib
from marft_jax.learning.settings import LearnerSettings
from marft_jax.learning.values import reads_prompts
from marft_jax.team.prompts import Team
from marft_jax.types import Episode, StepResult, Turn


class Work(NamedTuple):
    """A training step.

    Attributes:
        episodes: of all processes.
        owners: who acts in an episode, turn by turn, as numbers of agents.
        context: the longest prompt plus action, in tokens.
        action: the longest action.
    """

    episodes: int
    owners: tuple[int, ...]
    context: int
    action: int

    @property
    def turns(self) -> int:
        return self.episodes * len(self.owners)


def step_work(config: Config, team: Team, workflow: str) -> Work:
    """The longest training step of a team; own workflows are taken to be sequential."""
    longest = max(sampling.max_new_tokens for sampling in team.sampling)
    actors = _actors(team, workflow) * config.env.horizon
    return Work(config.algo.episodes, tuple(actors), team.context, longest)


def _actors(team: Team, workflow: str) -> list[int]:
    """Who acts in one step of the environment."""
    every = list(range(len(team.profiles)))
    if workflow == "solo":
        return [team.opener]
    if workflow == "dag":
        names = team.names
        return [names.index(node.role) for layer in team.graph.layers() for node in layer]
    if workflow == "orchestrated":
        assert team.orchestrator is not None
        others = [agent for agent in every if agent != team.orchestrator]
        calls = [others[i % len(others)] for i in range(team.max_steps)]
        return [agent for call in calls for agent in (team.orchestrator, call)]
    if workflow == "debate":
        debaters = [agent for agent in every if agent != team.judge]
        return debaters * team.rounds + ([] if team.judge is None else [team.judge])
    return every


def longest_batch(
    settings: LearnerSettings,
    team: Team,
    level: batch_lib.Level,
    work: Work,
    shards: int,
    d_model: int,
) -> batch_lib.Batch:
    """The batch of such a step, made by the same function as a real one."""
    turns = []
    for number, agent in enumerate(work.owners, start=1):
        whole = work.context
        if team.shared:  # one conversation grows to the end of the context
            whole = work.context * number // len(work.owners)
        action = min(work.action, max(1, whole - work.context * (number - 1) // len(work.owners)))
        action = action if team.shared else work.action
        zeros = np.zeros(whole, np.int32)
        scores = np.zeros(action, np.float32)
        turn = Turn(
            agent, team.names[agent], 0, zeros[action:], zeros[:action], scores, "", True, (),
            False, 1.0,
        )  # fmt: skip
        turns.append(turn)
    group = settings.algo.group_size
    result = [StepResult("", 0.0, True)]
    episodes = [
        Episode(e // group, e // group, e % group, "", turns, result) for e in range(work.episodes)
    ]
    rewards = [np.zeros(len(turns), np.float32)] * work.episodes
    return batch_lib.build(
        episodes, rewards, team.owners, settings.algo, level,
        shards=shards, d_model=d_model, prompts=reads_prompts(settings, level),
    )  # fmt: skip
