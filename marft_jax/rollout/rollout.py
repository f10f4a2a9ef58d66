"""Keeps many episodes alive at once and gives every outstanding act to the engine.

An act enters the engine as soon as its episode is ready for it, and environments answer in threads
meanwhile. The order stays a pure function of the episodes: acts queue by episode, and an answer is
taken up at a fixed point, one engine step after it was asked for, never by the clock. Only an
episode that hangs is not waited for longer than a quarter of its time: the others go on without
it, so that those that hang run out of time together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Protocol

from marft_jax.envs.base import Env
from marft_jax.envs.threads import Calls, UserCall
from marft_jax.errors import BadInput, EpisodesFailed, Stopped
from marft_jax.random_keys import ActionKey, Stream
from marft_jax.rollout.live_episode import LiveEpisode, Part
from marft_jax.rollout.user_side import Rules
from marft_jax.sampling.protocol import Completion, Request
from marft_jax.team.prompts import Team
from marft_jax.team.workflows import Workflow
from marft_jax.types import FailedEpisode, Played, Sample

LOGGER = logging.getLogger("marft_jax")

_LOOK_SECONDS = 0.1  # between two looks at the clock, and at ``stop``
_PATIENCE = 0.25  # share of its time that a call is waited for
_PATIENCE_SECONDS = 1.0  # at most, once one hangs
_CLOSE_SECONDS = 2.0  # for what environments and workflows do when they are dropped


class Sampler(Protocol):
    """Answers requests: an ``Engine``, or what stands in its place."""

    @property
    def busy(self) -> bool: ...

    def submit(self, request: Request) -> int: ...

    def step(self) -> Sequence[tuple[int, Completion]]: ...


class Rollout:
    """Plays episodes of one team; environments and workflows run in ``threads``."""

    def __init__(
        self,
        engine: Sampler,
        team: Team,
        workflow: Callable[[Team, str], Workflow],
        create_env: Callable[[], Env],
        threads: Executor,
        *,
        max_failed: float | None = 0.0,  # fraction of episodes that may fail; None: all, no log
        step_seconds: float | None = None,  # who takes longer to answer has failed
        max_tool_calls: int = 4,  # of an agent in one turn
        max_turns: int = 128,  # an episode that wants more is ended, as truncated
        snapshots: bool = False,  # branches begin with those of environments that offer them
        stream: Stream = Stream.TRAINING,
        stop: Callable[[], bool] = lambda: False,  # asked again and again, wherever a play waits
        report: Callable[[int], None] | None = None,  # called with how many episodes are over
    ):
        self._engine, self._threads = engine, threads
        self._rules = Rules(team, workflow, create_env, max_turns, max_tool_calls, snapshots)
        self._seconds, self._max_failed, self._stream = step_seconds, max_failed, stream
        self._stop, self._report = stop, report

    def play(self, samples: Sequence[Sample], step: int) -> Played:
        """Plays an episode for each sample; returns them in that order.

        Args:
            step: the training step, or the attempt at it: part of every action's random key.

        Raises:
            BadInput: too many episodes failed, and the first of them for a reason that the user
                can mend in the settings or in a class or function of their own.
            EpisodesFailed: too many episodes failed.
            Stopped: ``stop`` returned true.
        """
        calls = Calls(self._threads, self._seconds)
        live = [
            LiveEpisode(self._rules, calls, s, _first_key(self._stream, step, s)) for s in samples
        ]
        try:
            waited_s = self._run(calls, live)
        finally:
            for episode in live:
                episode.drop()
        calls.wait(_CLOSE_SECONDS)
        failed = [FailedEpisode(*e.sample[:3], e.failure.text) for e in live if e.failure]
        if self._max_failed is not None:
            self._check(live, failed, step, self._max_failed)
        return Played([e.episode for e in live if not e.failure], failed, waited_s)

    def _run(self, calls: Calls, live: Sequence[LiveEpisode]) -> float:
        """Plays until all are over; returns the seconds without anything to decode."""
        asked: dict[int, tuple[LiveEpisode, Part]] = {}
        waited_s = 0.0
        while asked or not all(episode.over for episode in live):
            if self._report is not None:
                self._report(sum(episode.over for episode in live))
            for episode in live:
                for part, request in episode.take_requests():
                    asked[self._engine.submit(request)] = episode, part
            due = _calls(live)
            for ticket, completion in self._engine.step():
                episode, part = asked.pop(ticket)
                episode.receive(part, completion)
            started = time.perf_counter()
            self._wait(calls, live, due)
            waited_s += 0.0 if self._engine.busy else time.perf_counter() - started
            self._wait(calls, live, [call for call in _calls(live) if call.in_turn])
        return waited_s

    def _wait(self, calls: Calls, live: Sequence[LiveEpisode], due: Sequence[UserCall]) -> None:
        """Waits for these calls, and lets their episodes go on.

        Raises:
            Stopped: ``stop`` returned true.
        """
        while True:
            calls.ended.clear()
            calls.advance()
            if self._stop():
                raise Stopped
            settled = {call for call in due if call.is_settled()}
            idle = not self._engine.busy and not settled and len(due) == len(_calls(live))
            if not self._is_worth_waiting(live, [c for c in due if c not in settled], idle):
                break
            calls.ended.wait(_LOOK_SECONDS)
        for episode in live:
            episode.take_answers(settled)

    def _is_worth_waiting(
        self, live: Sequence[LiveEpisode], left: Sequence[UserCall], idle: bool
    ) -> bool:
        """True while anything is left to wait for, but for calls that seem to hang."""
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
        """Logs what became of the episodes that did not end by themselves; too many are refused."""
        most, capped = self._rules.max_turns, sum(e.truncated == "turns" for e in live)
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
