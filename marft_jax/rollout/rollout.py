"""Plays many episodes at once and submits every outstanding act to the sampler.

An act is submitted as soon as its episode is ready for it; meanwhile environments answer in
threads. The order of requests is a pure function of the episodes, not of the clock: acts queue by
episode, and an environment's answer is used one step of the sampler after it was asked for. The one
exception is a call that hangs. The other episodes wait for it at most a quarter of its time limit
and then go on, so that all calls that hang reach their time limit together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from marft_jax.envs.base import Env
from marft_jax.envs.threads import Calls, UserCall
from marft_jax.errors import BadInput, EpisodesFailed, Stopped
from marft_jax.random_keys import ActionKey, Stream
from marft_jax.rollout.env_session import RolloutSpec
from marft_jax.rollout.live_episode import EpisodeCoroutine, LiveEpisode
from marft_jax.sampling.protocol import Sampler
from marft_jax.team.prompts import Team
from marft_jax.team.workflows import Workflow
from marft_jax.types import AnsweredCall, FailedEpisode, Played, Sample

LOGGER = logging.getLogger("marft_jax")

_Asked = dict[int, tuple[LiveEpisode, EpisodeCoroutine]]
"""Unanswered requests, by ticket."""

_LOOK_SECONDS = 0.1  # between two looks at the clock and at ``stop``
_PATIENCE = 0.25  # share of its time limit for which the other episodes wait for a call
_PATIENCE_SECONDS = 1.0  # the same once a call hangs, at most
_CLOSE_SECONDS = 2.0  # for environments and workflows that are dropped


class Rollout:
    """Plays episodes of one team.

    Args:
        threads: run environments, workflows and tools.
        max_failed: fraction of the episodes that may fail; None: all may, and nothing is logged.
        step_seconds: time limit of a call of environment or workflow, whose episode then fails.
        max_tool_calls: tool calls of an agent in one turn, at most.
        max_turns: turns of an episode, at most; one that wants more is truncated.
        snapshots: take snapshots of environments that offer them, for branches to begin with.
        recorded_calls: see ``RolloutSpec``.
        stream: random stream of the actions.
        stop: asked again and again while a play waits; True ends the play with ``Stopped``.
        report: called with the number of episodes that are over.

    Raises:
        BadInput: the sampler's context is shorter than the team's.
    """

    def __init__(
        self,
        sampler: Sampler,
        team: Team,
        workflow: Callable[[Team, str], Workflow],
        create_env: Callable[[], Env],
        threads: Executor,
        *,
        max_failed: float | None = 0.0,
        step_seconds: float | None = None,
        max_tool_calls: int = 4,
        max_turns: int = 128,
        snapshots: bool = False,
        recorded_calls: Callable[[int, int, int], Sequence[AnsweredCall]] = lambda i, act, turn: (),
        stream: Stream = Stream.TRAINING,
        stop: Callable[[], bool] = lambda: False,
        report: Callable[[int], None] | None = None,
    ):
        for base, context in zip(team.bases, team.contexts, strict=True):
            if context > (longest := sampler.capabilities.contexts.get(base, context)):
                raise BadInput(
                    f"--model.context {context}: expected at most {longest}, the longest prompt "
                    "and action of the sampler; lower it"
                )
        self._sampler, self._threads = sampler, threads
        limits = max_turns, max_tool_calls
        own = threads, recorded_calls
        self._spec = RolloutSpec(team, workflow, create_env, *limits, snapshots, *own)
        self._seconds, self._max_failed, self._stream = step_seconds, max_failed, stream
        self._stop, self._report = stop, report

    def play(self, samples: Sequence[Sample], step: int) -> Played:
        """Plays an episode for each sample; returns them in the order of the samples.

        Args:
            step: number of the attempt at a training step; part of every action's random key.

        Raises:
            BadInput: too many episodes failed, the first because of a setting or of the user's own
                class or function; or the sampler cannot do what the environment needs.
            EpisodesFailed: too many episodes failed for another reason.
            Stopped: ``stop`` returned True.
        """
        calls = Calls(self._threads, self._seconds)
        live = [
            LiveEpisode(self._spec, calls, s, _first_key(self._stream, step, s)) for s in samples
        ]
        asked: _Asked = {}
        try:
            waited_s = self._run(calls, live, asked)
        finally:
            for episode in live:
                episode.drop()
            for ticket in asked:  # after an error, or a stop
                self._sampler.cancel(ticket)
        calls.wait(_CLOSE_SECONDS)
        failed = [FailedEpisode(*e.sample[:3], e.failure.text) for e in live if e.failure]
        if self._max_failed is not None:
            self._check(live, failed, step, self._max_failed)
        return Played([e.episode for e in live if not e.failure], failed, waited_s)

    def _run(self, calls: Calls, live: Sequence[LiveEpisode], asked: _Asked) -> float:
        """Plays until all episodes are over; returns the seconds in which nothing was sampled.

        Args:
            asked: an empty mapping, which holds the unanswered requests meanwhile.
        """
        waited_s = 0.0
        while asked or not all(episode.over for episode in live):
            if self._report is not None:
                self._report(sum(episode.over for episode in live))
            for episode in live:
                for part, request in episode.take_requests():
                    if refusal := self._sampler.capabilities.refusal(request):
                        raise BadInput(f"--rollout.sampler: {refusal}; use engine")
                    asked[self._sampler.submit(request)] = episode, part
            due = _calls(live)
            for ticket, completion in self._sampler.step():
                episode, part = asked.pop(ticket)
                episode.receive(part, completion)
            started = time.perf_counter()
            self._wait(calls, live, due)
            waited_s += 0.0 if self._sampler.busy else time.perf_counter() - started
            self._wait(calls, live, [call for call in _calls(live) if call.serialised])
        return waited_s

    def _wait(self, calls: Calls, live: Sequence[LiveEpisode], due: Sequence[UserCall]) -> None:
        """Waits for the calls that are ``due``, and lets their episodes go on."""
        while True:
            calls.ended.clear()
            if self._stop():
                raise Stopped
            settled = {call for call in due if call.is_settled()}
            idle = not self._sampler.busy and not settled and len(due) == len(_calls(live))
            if not self._is_worth_waiting(live, [c for c in due if c not in settled], idle):
                break
            calls.ended.wait(_LOOK_SECONDS)
        for episode in live:
            episode.take_answers(settled)

    def _is_worth_waiting(
        self, live: Sequence[LiveEpisode], left: Sequence[UserCall], idle: bool
    ) -> bool:
        """True while a call is left that does not seem to hang, or nothing else can be done."""
        if not left or idle or self._seconds is None:
            return bool(left)
        patience = self._seconds * _PATIENCE
        if any(call.has_taken(patience) for call in _calls(live)):
            patience = min(patience, _PATIENCE_SECONDS)
        return not all(call.has_taken(patience) for call in left)

    def _check(
        self,
        live: Sequence[LiveEpisode],
        failed: Sequence[FailedEpisode],
        step: int,
        max_failed: float,
    ) -> None:
        """Logs truncated and failed episodes; raises where too many failed, see ``play``."""
        most, capped = self._spec.max_turns, sum(e.truncated == "turns" for e in live)
        if capped:
            why = f"were ended at --rollout.max_turns {most}"
            LOGGER.warning("step %d: %d of %d episodes %s", step + 1, capped, len(live), why)
        if capped and all(episode.was_never_graded for episode in live):
            raise BadInput(
                f"--team.workflow: in {most} turns (--rollout.max_turns) it never yielded a Step"
            )
        too_many = failed and (len(failed) > max_failed * len(live) or len(failed) == len(live))
        if too_many and next(e.failure for e in live if e.failure).is_bad_input:
            raise BadInput(failed[0].why)
        for episode in failed:
            what = f"task {episode.index}: {episode.why}"
            LOGGER.warning("step %d: dropped an episode: %s", step + 1, what)
        if too_many:
            raise EpisodesFailed(
                f"{len(failed)} of {len(live)} episodes failed, the first with task "
                f"{failed[0].index}: {failed[0].why}; --rollout.max_failed_fraction allows "
                f"{max_failed:g}"
            )


def _first_key(stream: Stream, step: int, sample: Sample) -> ActionKey:
    branch = sample.branch
    own = (branch.turn, branch.number) if branch else (0, 0)
    return ActionKey(stream, step, sample.index, sample.member, 0, 0, *own)


def _calls(live: Sequence[LiveEpisode]) -> list[UserCall]:
    """Lists the calls that the episodes wait for."""
    return [call for episode in live for call in episode.calls]
