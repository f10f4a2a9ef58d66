"""Keeps many episodes alive at once and hands every outstanding act to the engine.

Episodes are asynchronous: an act enters the engine as soon as its episode is ready for it,
whichever agent it belongs to, and environments answer in worker threads meanwhile. The order stays
a pure function of the episodes: acts queue by episode, and an environment's answer is taken up at
a fixed point, one engine step after it was asked for, never by the clock.

An episode whose environment or workflow fails is dropped; the others go on.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from marft_jax.config import BadInput
from marft_jax.engine.engine import Completion, Engine, Request
from marft_jax.envs.base import Env
from marft_jax.team.context import ContextFull, Team
from marft_jax.team.workflows import Step, Workflow
from marft_jax.types import Act, Episode, StepResult, Turn

LOGGER = logging.getLogger("marft_jax")


class EpisodesFailed(RuntimeError):
    """More episodes failed than the settings allow."""


class Rollout:
    """Plays episodes of one team.

    Args:
        engine: samples the actions.
        team: who acts.
        workflow: who acts when.
        create_env: makes an environment for each episode.
        threads: where environments answer.
        max_failed: the fraction of episodes that may fail.
        step_seconds: an environment that takes longer to answer has failed.

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
        max_failed: float = 0.0,
        step_seconds: float | None = None,
    ):
        self._engine, self._team, self._workflow = engine, team, workflow
        self._create_env, self._threads = create_env, threads
        self._max_failed, self._step_seconds = max_failed, step_seconds
        self.waited_s = 0.0

    def play(self, tasks: Sequence[int], step: int, *, first: int = 0) -> list[Episode]:
        """Plays one episode per task and returns them in that order.

        A failed episode has no turns and says in its result's ``info["failed"]`` why.

        Args:
            tasks: the integers that the environments are reset with.
            step: the training step, folded into every sampling key with the number of the
                episode in this step and of the turn in its episode.
            first: the number of the first episode in this step.

        Raises:
            BadInput: too many episodes failed, and the first of them for a reason that the user
                can mend in the settings.
            EpisodesFailed: too many episodes failed.
        """
        self.waited_s = 0.0
        live = [_Live(self, number, task) for number, task in enumerate(tasks, start=first)]
        asked: dict[int, tuple[_Live, int]] = {}
        for episode in live:
            episode.begin()
        while True:
            for episode in live:
                for branch, act in episode.take_acts():
                    asked[self._engine.submit(episode.request(act, branch, step))] = episode, branch
            due = [episode for episode in live if episode.is_grading]
            for ticket, completion in self._engine.step():
                episode, branch = asked.pop(ticket)
                episode.receive(branch, completion)
            for episode in due:
                started = time.perf_counter()
                episode.take_result(self._step_seconds)
                self.waited_s += 0.0 if self._engine.busy else time.perf_counter() - started
            if not asked and all(episode.over for episode in live):
                self._check(live, step)
                return [episode.episode() for episode in live]

    def _check(self, live: Sequence[_Live], step: int) -> None:
        failed = [episode for episode in live if episode.error]
        for episode in failed:
            LOGGER.warning("step %d: dropped an episode: %s", step + 1, episode.failure())
        if failed and (len(failed) > self._max_failed * len(live) or len(failed) == len(live)):
            first = failed[0].error
            if isinstance(first, BadInput):
                raise first
            raise EpisodesFailed(
                f"{len(failed)} of {len(live)} episodes failed, the first with "
                f"{failed[0].failure()}; --rollout.max_failed_fraction allows {self._max_failed:g}"
            ) from first


class _Live:
    """One episode in the making: its generator, and what it is waiting for."""

    def __init__(self, rollout: Rollout, number: int, task: int):
        self._rollout, self._team = rollout, rollout._team
        self._number, self._task = number, task
        self._observation = ""
        self._env: Env
        self._generator: Workflow
        self._turns: list[Turn] = []
        self._results: list[StepResult] = []
        self._acts: list[Act] = []
        self._answers: list[Turn | None] = []
        self._fresh = False
        self._future: Future[StepResult] | None = None
        self._step_info: dict[str, Any] = {}
        self.over = False
        self.error: Exception | None = None

    @property
    def is_grading(self) -> bool:
        return self._future is not None

    def begin(self) -> None:
        """Asks the environment for the task and the workflow for its first wish."""

        def start() -> None:
            self._env = self._rollout._create_env()
            self._observation = self._env.reset(self._task)
            self._generator = self._rollout._workflow(self._team, self._observation)

        if self._tried(start):
            self._advance(None)

    def _tried(self, run: Callable[[], None]) -> bool:
        """Whether it went well; if not, the episode is over, and failed."""
        try:
            run()
        except Exception as error:  # code of the user: an environment, a workflow
            self.error, self.over, self._future, self._fresh = error, True, None, False
        return self.error is None

    def failure(self) -> str:
        """Where and why it failed, on one line."""
        assert self.error is not None
        frames = traceback.extract_tb(self.error.__traceback__)
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        return f"task {self._task}: {type(self.error).__name__}: {self.error}{where}"

    def _advance(self, answer: list[Turn] | StepResult | None) -> None:
        self._tried(lambda: self._ask(answer))

    def _ask(self, answer: list[Turn] | StepResult | None) -> None:
        """Gives the generator its answer and notes what it wants next."""
        try:
            wish = self._generator.send(answer)
        except StopIteration:
            if not self._turns:
                raise BadInput("--team.workflow: it returned before any agent acted") from None
            self.over = True
        except ContextFull:
            if not self._turns:
                raise
            self._results.append(StepResult("", 0.0, True, {"truncated": "context"}))
            self.over = True
        else:
            if isinstance(wish, Step):
                self._note(wish)
                self._future = self._rollout._threads.submit(self._env.step, wish.turns)
            elif not isinstance(wish, list) or not wish:
                raise BadInput(
                    f"--team.workflow: expected a yielded list of acts, or Step, got {wish!r:.60}"
                )
            else:
                self._acts, self._fresh = wish, True
                self._answers = [None] * len(wish)

    def _note(self, step: Step) -> None:
        """What is graded is what the episode records."""
        for turn in step.turns:
            self._turns[turn.index] = turn
        self._step_info = dict(step.info)

    def take_acts(self) -> list[tuple[int, Act]]:
        """The acts that were not handed out yet, each with its number among its siblings."""
        fresh, self._fresh = self._fresh, False
        return list(enumerate(self._acts)) if fresh else []

    def request(self, act: Act, branch: int, step: int) -> Request:
        fold = (step, self._number, len(self._turns) + branch)
        return Request(act.prompt, self._team.owners[act.agent], act.sampling, fold)

    def receive(self, branch: int, completion: Completion) -> None:
        """Takes one act's tokens; when all siblings have theirs, the workflow goes on."""
        self._answers[branch] = self._turn(self._acts[branch], branch, completion)
        turns = [turn for turn in self._answers if turn is not None]
        if len(turns) == len(self._acts):
            self._turns += turns
            self._advance(turns)

    def _turn(self, act: Act, branch: int, completion: Completion) -> Turn:
        profile = self._team.profiles[act.agent]
        return Turn(
            agent=act.agent,
            name=profile.name,
            step=act.step,
            prompt=act.prompt,
            action=completion.ids,
            logprobs=completion.logprobs,
            text=self._team.tokenizer.decode(completion.ids.tolist()).strip(),
            answers=profile.answers,
            sees=act.sees,
            truncated=not completion.finished,
            temperature=act.sampling.temperature or 1.0,
            index=len(self._turns) + branch,
            start=act.start,
        )

    def take_result(self, seconds: float | None) -> None:
        """Waits for the environment's answer, so long and no longer, and goes on with it."""

        def take() -> None:
            assert self._future is not None
            result = self._future.result(seconds)
            info = {**result.info, **self._step_info}
            result = result._replace(reward=float(result.reward), done=bool(result.done), info=info)
            self._future = None
            self._results.append(result)
            self._ask(result)

        self._tried(take)

    def episode(self) -> Episode:
        if self.error:
            failed = StepResult("", 0.0, True, {"failed": self.failure()})
            return Episode(self._task, self._observation, (), (failed,))
        return Episode(self._task, self._observation, tuple(self._turns), tuple(self._results))
