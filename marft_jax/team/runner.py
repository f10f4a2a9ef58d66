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


class Stopped(Exception):
    """A play was told to stop; its episodes are thrown away."""


class Rollout:
    """Plays episodes of one team.

    Args:
        engine: samples the actions.
        team: who acts.
        workflow: who acts when.
        create_env: makes an environment for each episode.
        threads: where environments answer.
        max_failed: the fraction of episodes that may fail; None for all of them, and not a word.
        step_seconds: an environment that takes longer to answer has failed.
        max_tool_calls: how often an agent may call a tool of the environment in one turn.
        stop: asked again and again; where it says so, playing ends with ``Stopped``.
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
        stop: Callable[[], bool] = lambda: False,
        report: Callable[[int], None] | None = None,
    ):
        self._engine, self._team, self._workflow = engine, team, workflow
        self._create_env, self._threads = create_env, threads
        self._max_failed, self._step_seconds = max_failed, step_seconds
        self._max_tool_calls = max_tool_calls
        self._stop, self._report = stop, report or (lambda over: None)
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
            Stopped: ``stop`` said so.
        """
        self.waited_s = 0.0
        live = [_Live(self, number, task) for number, task in enumerate(tasks, start=first)]
        asked: dict[int, tuple[_Live, int]] = {}
        for episode in live:
            episode.prepare()
        for episode in live:
            episode.begin(self._step_seconds)
        while True:
            if self._stop():
                raise Stopped
            self._report(sum(episode.over for episode in live))
            for episode in live:
                for branch, act in episode.take_acts():
                    asked[self._engine.submit(episode.request(act, branch, step))] = episode, branch
            due = [episode for episode in live if episode.is_waiting]
            for ticket, completion in self._engine.step():
                episode, branch = asked.pop(ticket)
                episode.receive(branch, completion)
            for episode in due:
                started = time.perf_counter()
                episode.take_answers(self._step_seconds)
                self.waited_s += 0.0 if self._engine.busy else time.perf_counter() - started
            if not asked and all(episode.over for episode in live):
                self._check(live, step)
                return [episode.episode() for episode in live]

    def _check(self, live: Sequence[_Live], step: int) -> None:
        if self._max_failed is None:
            return
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


class _Branch:
    """An act that was asked for, and its turns: several where the agent calls tools in between."""

    def __init__(self, act: Act):
        self.act = act
        self.turns: list[Turn] = []
        self.asked = False
        self.tool: Future[str | None] | None = None
        self.over = False


class _Live:
    """One episode in the making: its generator, and what it is waiting for."""

    def __init__(self, rollout: Rollout, number: int, task: int):
        self._rollout, self._team = rollout, rollout._team
        self._number, self._task = number, task
        self._observation = ""
        self._env: Env
        self._reset: Future[None]
        self._generator: Workflow
        self._turns: list[Turn] = []
        self._results: list[StepResult] = []
        self._branches: list[_Branch] = []
        self._graded: Future[StepResult] | None = None
        self._step_info: dict[str, Any] = {}
        self.over = False
        self.error: Exception | None = None

    @property
    def is_waiting(self) -> bool:
        """For its environment: a grade, or a tool."""
        return self._graded is not None or any(branch.tool for branch in self._branches)

    def prepare(self) -> None:
        """Asks the environment for the task, in a thread."""

        def reset() -> None:
            self._env = self._rollout._create_env()
            self._observation = self._env.reset(self._task)

        self._reset = self._rollout._threads.submit(reset)

    def begin(self, seconds: float | None) -> None:
        """Asks the workflow for its first wish."""

        def start() -> None:
            self._reset.result(seconds)
            if (view := getattr(self._env, "view", None)) is not None:
                if self._team.shared:
                    raise BadInput(
                        "--team.context shared: this environment shows each agent a part of the "
                        "state, and a conversation shows all of them everything; use own"
                    )
                self._team = self._team._replace(view=view)
            self._generator = self._rollout._workflow(self._team, self._observation)
            self._ask(None)

        self._try(start)

    def _try(self, run: Callable[[], None]) -> None:
        """Runs it; if that fails, so has the episode."""
        try:
            run()
        except Exception as error:  # code of the user: an environment, a workflow
            self.error, self.over, self._graded, self._branches = error, True, None, []

    def failure(self) -> str:
        """Where and why it failed, on one line."""
        assert self.error is not None
        frames = traceback.extract_tb(self.error.__traceback__)
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        return f"task {self._task}: {type(self.error).__name__}: {self.error}{where}"

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
                self._graded = self._rollout._threads.submit(self._env.step, wish.turns)
            elif not isinstance(wish, list) or not wish:
                raise BadInput(
                    f"--team.workflow: expected a yielded list of acts, or Step, got {wish!r:.60}"
                )
            else:
                self._branches = [_Branch(act) for act in wish]

    def _note(self, step: Step) -> None:
        """What is graded is what the episode records."""
        for turn in step.turns:
            self._turns[turn.index] = turn
        self._step_info = dict(step.info)

    def take_acts(self) -> list[tuple[int, Act]]:
        """The acts that were not handed out yet, each with its number among its siblings."""
        fresh = [(i, b) for i, b in enumerate(self._branches) if not (b.asked or b.over or b.tool)]
        for _, branch in fresh:
            branch.asked = True
        return [(i, branch.act) for i, branch in fresh]

    def request(self, act: Act, branch: int, step: int) -> Request:
        calls = len(self._branches[branch].turns) * len(self._branches)
        fold = (step, self._number, len(self._turns) + branch + calls)
        return Request(act.prompt, self._team.owners[act.agent], act.sampling, fold)

    def receive(self, branch: int, completion: Completion) -> None:
        """Takes one act's tokens; when all siblings have theirs, the workflow goes on."""
        if self.over:  # it failed while the engine was at work
            return
        mine = self._branches[branch]
        turn = self._turn(mine.act, completion)
        mine.turns.append(turn)
        mine.asked = False
        tool = getattr(self._env, "tool", None)
        if tool is not None and len(mine.turns) <= self._rollout._max_tool_calls:
            mine.tool = self._rollout._threads.submit(tool, turn)
        else:
            mine.over = True
        self._try(self._go_on)

    def _go_on(self) -> None:
        """Answers the workflow when every sibling has spoken its last word."""
        if not all(branch.over for branch in self._branches):
            return
        answers = []
        for branch in self._branches:
            first = len(self._turns)
            for call, turn in enumerate(branch.turns):
                own = tuple(range(first, first + call))  # what it said before it called a tool
                self._turns.append(turn._replace(index=first + call, sees=(*turn.sees, *own)))
            answers.append(self._turns[-1])
        self._branches = []
        self._ask(answers)

    def _turn(self, act: Act, completion: Completion) -> Turn:
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
            start=act.start,
        )

    def take_answers(self, seconds: float | None) -> None:
        """Waits for the environment, so long and no longer, and goes on with what it says."""

        def take() -> None:
            for branch in self._branches:
                if branch.tool is not None:
                    said, branch.tool = branch.tool.result(seconds), None
                    act = None if said is None else self._team.resume(branch.turns[-1], said)
                    branch.act, branch.over = act or branch.act, act is None
            if self._graded is None:
                return self._go_on()
            result = self._graded.result(seconds)
            info = {**result.info, **self._step_info}
            result = result._replace(reward=float(result.reward), done=bool(result.done), info=info)
            self._graded = None
            self._results.append(result)
            self._ask(result)

        self._try(take)

    def episode(self) -> Episode:
        if self.error:
            failed = StepResult("", 0.0, True, {"failed": self.failure()})
            return Episode(self._task, self._observation, (), (failed,))
        return Episode(self._task, self._observation, tuple(self._turns), tuple(self._results))
