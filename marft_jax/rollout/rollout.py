"""Plays many episodes at once and submits every outstanding act to the sampler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import KW_ONLY, dataclass

from marft_jax.envs.base import Env
from marft_jax.envs.threads import Calls
from marft_jax.errors import BadInput, EpisodesFailed
from marft_jax.plugins import Failure
from marft_jax.random_keys import ActionKey, Stream, occasion
from marft_jax.rollout.actions import TurnSampler, branch_sampler, turn_sampler
from marft_jax.rollout.env_session import EnvSession, Limits
from marft_jax.rollout.episode import play_episode
from marft_jax.rollout.rounds import Rounds
from marft_jax.sampling.protocol import Sampler
from marft_jax.team.prompts import Team
from marft_jax.team.workflows import Workflow, find_workflow
from marft_jax.types import Episode, FailedEpisode, Played, Sample

LOGGER = logging.getLogger("marft_jax")

_CLOSE_SECONDS = 2.0  # for environments and workflows that are dropped


@dataclass(frozen=True, eq=False)
class Rollout:
    """Plays episodes of one team.

    Attributes:
        sampler: None where all actions are recorded.
        threads: run environments, workflows and tools.
        max_failed: fraction of the episodes that may fail; None: all may, and nothing is logged.
        step_seconds: time limit of a call of environment or workflow, whose episode then fails.
        max_tool_calls: tool calls of an agent in one turn, at most.
        max_turns: turns of an episode, at most; one that wants more is truncated.
        snapshots: take snapshots of environments that offer them, for branches to begin with.
        recorded: makes what finds the recorded turns of an episode; None: turns are sampled.
        stream: random stream of the actions.
        stop: asked again and again while a play waits; True ends the play with ``Stopped``.
        report: called with the number of episodes that are over.

    Raises:
        BadInput: the sampler's context is shorter than the team's.
    """

    sampler: Sampler | None
    team: Team
    workflow: Callable[[Team, str], Workflow]
    create_env: Callable[[], Env]
    threads: Executor
    _: KW_ONLY
    max_failed: float | None = 0.0
    step_seconds: float | None = None
    max_tool_calls: int = 4
    max_turns: int = 128
    snapshots: bool = False
    recorded: Callable[[Sample], TurnSampler] | None = None
    stream: Stream = Stream.TRAINING
    stop: Callable[[], bool] = lambda: False
    report: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        if self.sampler is None:
            return
        limits = self.sampler.capabilities.contexts
        for base, context in zip(self.team.bases, self.team.contexts, strict=True):
            if context > (longest := limits.get(base, context)):
                raise BadInput(
                    f"--model.context {context}: expected at most {longest}, the longest prompt "
                    "and action of the sampler; lower it"
                )

    def play(self, samples: Sequence[Sample], step: int) -> Played:
        """Plays an episode for each sample; returns them in the order of the samples.

        Args:
            step: number of the attempt at a training step; part of every action's random key.

        Raises:
            BadInput: too many episodes failed, the first because of a setting or of the user's own
                class or function; or the sampler cannot do what the environment needs.
            EpisodesFailed: too many episodes failed for another reason.
            RunFailed: the sampler cannot show which adapters sampled.
            Stopped: ``stop`` returned True.
        """
        calls = Calls(self.threads, self.step_seconds)
        episodes = [self._play(sample, step, calls) for sample in samples]
        ended, waited_s = Rounds(self.sampler, calls, self.stop).run(episodes, self.report)
        calls.wait(_CLOSE_SECONDS)
        pairs = list(zip(samples, ended, strict=True))
        failures = [(sample, end) for sample, end in pairs if isinstance(end, Failure)]
        played = Played(
            [episode for episode in ended if isinstance(episode, Episode)],
            [FailedEpisode(*sample[:3], failure.text) for sample, failure in failures],
            waited_s,
        )
        self._check(played, bool(failures) and failures[0][1].is_bad_input, step)
        if self.sampler is not None:
            self.sampler.verify_adapters()
        return played

    async def _play(self, sample: Sample, step: int, calls: Calls) -> Episode | Failure:
        """Plays an episode, or returns why it failed."""
        team, workflow, branch = self.team, self.workflow, sample.branch
        if sample.alone is not None:
            team, workflow = team.alone(sample.alone), find_workflow("solo")
        sampled_anew = (branch.turn, branch.number) if branch else (0, 0)
        key = ActionKey(self.stream, step, sample.index, sample.member, 0, 0, *sampled_anew)
        sampler = self.recorded(sample) if self.recorded else turn_sampler(team, key)
        sampler = branch_sampler(team, branch, sampler) if branch else sampler
        limits = Limits(self.max_turns, self.max_tool_calls, self.snapshots)
        env = EnvSession(team, self.create_env, calls, limits)
        try:
            return await play_episode(team, workflow, env, sample, sampler)
        except Failure as failure:
            return failure
        finally:
            env.call("close", env.close)

    def _check(self, played: Played, is_bad_input: bool, step: int) -> None:
        """Logs truncated and failed episodes; raises where too many failed, see ``play``.

        Args:
            is_bad_input: the first failure is one of a setting or of the user's own code.
        """
        if (max_failed := self.max_failed) is None:
            return
        episodes, failed, _ = played
        where, most, total = (
            occasion(self.stream, step),
            self.max_turns,
            len(episodes) + len(failed),
        )
        cuts = [episode.results[-1].info.get("truncated") for episode in episodes]
        if capped := cuts.count("turns"):
            why = f"were ended at --rollout.max_turns {most}"
            LOGGER.warning("%s: %d of %d episodes %s", where, capped, total, why)
            if all(cuts) and not failed and all(len(e.results) == 1 for e in episodes):
                raise BadInput(
                    f"--team.workflow: in {most} turns (--rollout.max_turns) it never yielded a "
                    "Step"
                )
        too_many = len(failed) > max_failed * total or len(failed) == total > 0
        if too_many and is_bad_input:
            raise BadInput(failed[0].why)
        for episode in failed:
            what = f"task {episode.index}: {episode.why}"
            LOGGER.warning("%s: dropped an episode: %s", where, what)
        if too_many:
            raise EpisodesFailed(
                f"{len(failed)} of {total} episodes failed, the first with task "
                f"{failed[0].index}: {failed[0].why}; --rollout.max_failed_fraction allows "
                f"{max_failed:g}"
            )
