"""Steps of a run that the team samples itself.

With a lag η, step s is sampled with the adapters after max(0, s - η) updates, however long anything
takes. All that a step depends on is in its ``Job``; the clock decides only who waits for whom.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from marft_jax.errors import RunFailed
from marft_jax.models.lora import Adapters
from marft_jax.random_keys import attempt
from marft_jax.rollout.collect import Collected
from marft_jax.rollout.curriculum import Curriculum
from marft_jax.rollout.pipeline import Cancelled, Pipeline
from marft_jax.sampling.protocol import Sampler, version_of
from marft_jax.types import Episode, Version


class Job(NamedTuple):
    """A step to play, and all that it depends on.

    Attributes:
        attempt: number of the attempt at the step, see ``random_keys.attempt``.
        updates: number of updates that made the adapters.
        adapters: adapters of each base that sample the step; they are not overwritten before it is
            played.
        level: level of the curriculum.
    """

    attempt: int
    updates: int
    adapters: Mapping[str, Adapters]
    level: int


class LearnerState(Protocol):
    """What sampling reads of a training state. ``past`` holds the versions of the last states, the
    oldest first, as many as the lag."""

    @property
    def adapters(self) -> dict[str, Adapters]: ...

    @property
    def progress(self) -> jax.Array: ...

    @property
    def past(self) -> tuple[Version, ...]: ...

    def version(self) -> Version: ...


class RolloutSource(NamedTuple):
    """Steps of a run, sampled by the team that it trains.

    Attributes:
        play: plays the tasks of a job's level for its attempt, with the sampler's adapters; raises
            ``Stopped`` soon after the step is cancelled.
        steps: number of steps of the whole run; no later step is played ahead.
        copy_adapters: copies adapters to the devices that only play; None where there are none.
    """

    pipeline: Pipeline
    sampler: Sampler
    curriculum: Curriculum
    play: Callable[[Job, Cancelled], Collected]
    steps: int
    copy_adapters: Callable[[dict[str, Adapters]], dict[str, Adapters]] | None

    def take(
        self, state: LearnerState, step: int, rollbacks: int
    ) -> tuple[Collected, tuple[Version, ...]]:
        """Returns a step's episodes, and the versions that the next state has as its ``past``.

        Asks for every step whose adapters are known: the step of the present adapters, and at the
        start and after a rollback also the steps of the versions before them.

        Args:
            state: the training state after ``step`` updates.
            rollbacks: number of rollbacks so far.
        """
        started = time.perf_counter()
        versions, lag = (*state.past, self._present(state)), len(state.past)
        placed_s = {"place_s": time.perf_counter() - started} if self.copy_adapters else {}
        for number in range(step + self.pipeline.asked, min(step + lag + 1, self.steps)):
            adapters, progress = versions[number - step]
            level, updates = self.curriculum.level(progress), max(0, number - lag)
            job = Job(attempt(number, rollbacks), updates, adapters, level)
            self.pipeline.ask(functools.partial(self._play, job))
        collected = self.pipeline.take()
        return collected._replace(seconds={**collected.seconds, **placed_s}), versions[1:]

    def _present(self, state: LearnerState) -> Version:
        """Returns the present version. An update donates its state, so a version that is played
        beside an update is a copy."""
        if self.copy_adapters is not None:
            placed = self.copy_adapters(state.adapters)
            jax.block_until_ready(placed)  # pyright: ignore[reportUnknownMemberType]
            return Version(placed, jnp.copy(state.progress))
        return state.version() if state.past else Version(state.adapters, state.progress)

    def _play(self, job: Job, cancelled: Cancelled) -> Collected:
        """Plays a job in any thread; the sampler holds its memory only as long as that takes."""
        version = version_of(job.adapters)
        self.sampler.load(job.adapters, version)
        try:
            played = self.play(job, cancelled)
            _check_version(played.played, version)
            return played._replace(
                seconds={**played.seconds, "reward_s": played.waited_s},
                updates=job.updates,
                level=job.level,
                stats=self.sampler.stats(),
            )
        finally:
            self.sampler.release()


def _check_version(episodes: Sequence[Episode], version: str) -> None:
    """Raises ``RunFailed`` where a turn was sampled by other adapters than those of the step."""
    others = {turn.version for episode in episodes for turn in episode.turns} - {version}
    if others:
        raise RunFailed(
            f"expected actions sampled by the adapters of version {version}, got version "
            f"{min(others) or 'none'}: the sampler did not load the adapters that it was given"
        )
