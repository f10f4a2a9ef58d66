"""Keeps many episodes alive at once and hands every outstanding act to the engine.

Episodes are asynchronous: an act enters the engine as soon as its episode is ready for it,
whichever agent it belongs to, and environments answer in threads meanwhile. The order stays a pure
function of the episodes: acts queue by episode, and an environment's answer is taken up at a fixed
point, one engine step after it was asked for, never by the clock.

An episode whose environment or workflow fails is dropped; the others go on. One that hangs is not
waited for longer than a quarter of its time: then the others go on without it, so that those that
hang run out of time together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from marft_jax.engine.engine import Engine
from marft_jax.envs.base import Env
from marft_jax.envs.threads import Call
from marft_jax.errors import BadInput, EpisodesFailed, Stopped
from marft_jax.rollout.live_episode import Limits, LiveEpisode, Stage
from marft_jax.team.prompts import Team
from marft_jax.team.workflows import Workflow
from marft_jax.types import Episode

LOGGER = logging.getLogger("marft_jax")

_LOOK_SECONDS = 0.1  # between two looks at the clock, and at ``stop``
_PATIENCE, _LATER = 0.25, 1.0  # share of its time that one is waited for; seconds, once one hangs
_CLOSE_SECONDS = 2.0  # for what environments and workflows do when they are dropped


class Rollout:
    """Plays episodes of one team.

    Args:
        engine: samples the actions.
        team: who acts.
        workflow: who acts when.
        create_env: makes an environment for each episode.
        threads: where environments and workflows run.
        max_failed: the fraction of episodes that may fail; None for all of them, and not a word.
        step_seconds: an environment or a workflow that takes longer to answer has failed.
        max_tool_calls: how often an agent may call a tool of the environment in one turn.
        max_turns: an episode that wants more turns is ended, as truncated.
        stop: asked again and again, between two steps of the engine and wherever a play waits.
        report: told again and again how many episodes are over.

    Attributes:
        waited_s: seconds that the last ``play`` waited for environments with nothing to decode.
    """

    def __init__(
        self,
        engine: Engine,
        team: Team,
        workflow: Callable[[Team, str], Workflow],
        create_env: Callable[[], Env],
        threads: Executor,
        *,
        max_failed: float | None = 0.0,
        step_seconds: float | None = None,
        max_tool_calls: int = 4,
        max_turns: int = 128,
        stop: Callable[[], bool] = lambda: False,
        report: Callable[[int], None] | None = None,
    ):
        self._engine, self._team, self._workflow = engine, team, workflow
        self._create_env, self._threads = create_env, threads
        self._limits = Limits(max_turns, max_tool_calls, step_seconds)
        self._max_failed, self._stop = max_failed, stop
        self._report = report or (lambda over: None)
        self.waited_s = 0.0

    def play(self, tasks: Sequence[int], step: int, *, first: int = 0) -> list[Episode]:
        """Plays one episode per task and returns them in that order.

        A failed episode has no turns and says in its result's ``info["failed"]`` why.

        Args:
            tasks: the integers that the environments are reset with.
            step: the training step, folded into every sampling key with the number of the
                episode in this step and of the act in its episode.
            first: the number of the first episode in this step.

        Raises:
            BadInput: too many episodes failed, and the first of them for a reason that the user
                can mend in the settings or in a class or function of their own.
            EpisodesFailed: too many episodes failed.
            Stopped: ``stop`` said so.
        """
        self.waited_s = 0.0
        stage = Stage(self._team, self._workflow, self._create_env, self._threads, self._limits)
        live = [LiveEpisode(stage, number, task) for number, task in enumerate(tasks, first)]
        try:
            self._play(stage, live, step)
        except BaseException:
            stage.leave(0.0)
            for episode in live:
                episode.leave()
            raise
        stage.leave(_CLOSE_SECONDS)
        self._check(live, step)
        return [episode.episode() for episode in live]

    def _play(self, stage: Stage, live: Sequence[LiveEpisode], step: int) -> None:
        asked = {}
        while asked or not all(episode.over for episode in live):
            self._report(sum(episode.over for episode in live))
            for episode in live:
                for branch, act in episode.take_acts():
                    ticket = self._engine.submit(episode.request(branch, act, step))
                    asked[ticket] = episode, branch
            due = _calls(live)
            for ticket, completion in self._engine.step():
                episode, branch = asked.pop(ticket)
                episode.receive(branch, completion)
            started = time.perf_counter()
            self._wait(stage, live, due)
            self.waited_s += 0.0 if self._engine.busy else time.perf_counter() - started
            self._wait(stage, live, [call for call in _calls(live) if call.in_turn])

    def _wait(self, stage: Stage, live: Sequence[LiveEpisode], due: Sequence[Call]) -> None:
        """Waits for these calls, and lets their episodes go on.

        Raises:
            Stopped: ``stop`` said so.
        """
        while True:
            stage.news.clear()
            stage.in_turn.go()
            if self._stop():
                raise Stopped
            come = {call for call in due if call.is_settled()}
            idle = not self._engine.busy and not come and len(due) == len(_calls(live))
            if not self._is_worth_waiting(live, [call for call in due if call not in come], idle):
                break
            stage.news.wait(_LOOK_SECONDS)
        for episode in live:
            episode.take_answers(come)

    def _is_worth_waiting(
        self, live: Sequence[LiveEpisode], left: Sequence[Call], idle: bool
    ) -> bool:
        """True while anything is left to wait for, but for calls that seem to hang."""
        seconds = self._limits.seconds
        if not left or idle or seconds is None:
            return bool(left)
        patience = seconds * _PATIENCE
        if any(call.has_taken(patience) for call in _calls(live)):
            patience = min(patience, _LATER)
        return not all(call.has_taken(patience) for call in left)

    def _check(self, live: Sequence[LiveEpisode], step: int) -> None:
        """Says in the log what became of the episodes that did not end by themselves."""
        if self._max_failed is None:
            return
        most = self._limits.turns
        capped = [episode for episode in live if episode.truncated == "turns"]
        if capped:
            LOGGER.warning(
                "step %d: %d of %d episodes were ended at --rollout.max_turns %d",
                step + 1, len(capped), len(live), most,
            )  # fmt: skip
        if capped and all(episode.was_never_graded for episode in live):
            raise BadInput(
                f"--team.workflow: in {most} turns (--rollout.max_turns) it never yielded a Step"
            )
        failed = [(e.task, e.failure) for e in live if e.failure is not None]
        for task, failure in failed:
            LOGGER.warning("step %d: dropped an episode: task %d: %s", step + 1, task, failure.text)
        if failed and (len(failed) > self._max_failed * len(live) or len(failed) == len(live)):
            task, failure = failed[0]
            if failure.is_bad_input:
                raise BadInput(failure.text)
            raise EpisodesFailed(
                f"{len(failed)} of {len(live)} episodes failed, the first with task {task}: "
                f"{failure.text}; --rollout.max_failed_fraction allows {self._max_failed:g}"
            )


def _calls(live: Sequence[LiveEpisode]) -> list[Call]:
    """Lists the calls that the episodes wait for."""
    return [call for episode in live for call in episode.calls]
