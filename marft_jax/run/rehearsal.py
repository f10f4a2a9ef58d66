"""A rehearsal: what the coming steps will need, before they are played.

A run's first step cannot show how large its batches get: a longer task comes, or more tokens are
said, and a program has to be compiled again for it. So after that step the team's workflow runs
once more on the tasks of the steps to come, in an engine that quotes what was said in the first
one. No model takes part; prompts, rows and groups are as they will be, but for what the team will
have learned to say.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np

from marft_jax.envs.base import EnvSource
from marft_jax.parallel import processes
from marft_jax.rollout.collect import tasks_of
from marft_jax.rollout.rollout import Rollout
from marft_jax.run.setup import Session
from marft_jax.team.workflows import find_workflow
from marft_jax.types import Episode, StepResult, Turn

# so many show what is rare; of large steps, which differ less from each other, two at least
_EPISODES = 256


def rehearse(
    session: Session,
    source: EnvSource,
    threads: Executor,
    played: Sequence[Episode],
    step: int,
) -> list[list[Episode]]:
    """Episodes of the steps after ``step``, about 256 in all, as they might be.

    A run with fewer left rehearses them several times, with other things said each time. The
    programs that the engine would run there are compiled by its next ``compile_ahead``.

    Args:
        source: without ``question``, nothing is rehearsed.
        played: episodes to quote from, each with turns.
    """
    if source.question is None:
        return []
    config, steps = session.config, []
    coming = max(2, _EPISODES // config.algo.episodes)
    most = max(len(episode.turns) for episode in played)
    left = range(step + 1, config.run.steps)
    for n, later in enumerate(itertools.islice(itertools.cycle(left), coming)):
        tasks = tasks_of(config, later)
        rng = np.random.default_rng([config.run.seed, n])
        drawn = rng.integers(len(played), size=len(tasks))
        parts = _Parts(source.question, tasks, [played[i] for i in drawn])
        engine = session.engine.rehearsing(parts.action)
        rollout = Rollout(
            engine,
            session.team,
            find_workflow(session.workflow),
            parts.env,
            threads,
            max_failed=None,
            step_seconds=config.rollout.step_seconds,
            max_turns=most,  # a workflow might wait for a word that is never said
            stop=session.stop,
        )
        rehearsed = processes.together(rollout).play(range(len(tasks)), later)
        steps.append([episode for episode in rehearsed if episode.turns])
    return [episodes for episodes in steps if episodes]


class _Parts(NamedTuple):
    """The episodes of a step: task i, and what is quoted there."""

    question: Callable[[int], str]
    tasks: Sequence[int]
    quoted: Sequence[Episode]

    def action(self, episode: int, turn: int) -> np.ndarray:
        """What is said in that turn; after the last one, what was said last."""
        turns = self.quoted[episode].turns
        return turns[min(turn, len(turns) - 1)].action

    def env(self) -> _Again:
        return _Again(self)


class _Again:
    """An environment that gives episode i its task, and answers as in the one that is quoted."""

    def __init__(self, parts: _Parts):
        self._parts, self._steps = parts, 0

    def reset(self, seed: int) -> str:
        self._quoted = self._parts.quoted[seed]
        self._question = self._parts.question(self._parts.tasks[seed])
        return self._question

    def step(self, turns: Sequence[Turn]) -> StepResult:
        result = self._quoted.results[min(self._steps, len(self._quoted.results) - 1)]
        self._steps += 1
        observation = result.observation.replace(self._quoted.task, self._question)
        return result._replace(observation=observation)
