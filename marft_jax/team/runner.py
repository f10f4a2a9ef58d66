"""Keeps many episodes alive at once and hands every outstanding act to the engine.

Episodes are asynchronous: an act enters the engine as soon as its episode is ready for it,
whichever agent it belongs to, and environments answer in worker threads meanwhile. The order stays
a pure function of the episodes: acts queue by episode, and an environment's answer is taken up at
a fixed point, one engine step after it was asked for, never by the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future

from marft_jax.config import BadInput
from marft_jax.engine.engine import Completion, Engine, Request
from marft_jax.envs.base import Env
from marft_jax.team.context import ContextFull, Team
from marft_jax.team.workflows import Step, Workflow
from marft_jax.types import Act, Episode, StepResult, Turn


class Rollout:
    """Plays episodes of one team.

    Args:
        engine: samples the actions.
        team: who acts.
        workflow: who acts when.
        create_env: makes an environment for each episode.
        threads: where environments answer.

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
    ):
        self._engine, self._team, self._workflow = engine, team, workflow
        self._create_env, self._threads = create_env, threads
        self.waited_s = 0.0

    def play(self, tasks: Sequence[int], step: int, *, first: int = 0) -> list[Episode]:
        """Plays one episode per task and returns them in that order.

        Args:
            tasks: the integers that the environments are reset with.
            step: the training step, folded into every sampling key with the number of the
                episode in this step and of the turn in its episode.
            first: the number of the first episode in this step.

        Raises:
            BadInput: a task's own text does not fit the context.
        """
        self.waited_s = 0.0
        live = [_Live(self, number, task) for number, task in enumerate(tasks, start=first)]
        asked: dict[int, tuple[_Live, int]] = {}
        for episode in live:
            episode.advance(None)
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
                result = episode.result()
                self.waited_s += 0.0 if self._engine.busy else time.perf_counter() - started
                episode.advance(result)
            if not asked and all(episode.over for episode in live):
                return [episode.episode() for episode in live]


class _Live:
    """One episode in the making: its generator, and what it is waiting for."""

    def __init__(self, rollout: Rollout, number: int, task: int):
        self._team = rollout._team
        self._env = rollout._create_env()
        self._threads = rollout._threads
        self._number, self._task = number, task
        self._observation = self._env.reset(task)
        self._turns: list[Turn] = []
        self._results: list[StepResult] = []
        self._acts: list[Act] = []
        self._answers: list[Turn | None] = []
        self._fresh = False
        self._future: Future[StepResult] | None = None
        self._generator = rollout._workflow(self._team, self._observation)
        self.over = False

    @property
    def is_grading(self) -> bool:
        return self._future is not None

    def advance(self, answer: list[Turn] | StepResult | None) -> None:
        """Gives the generator its answer and notes what it wants next."""
        if isinstance(answer, StepResult):
            self._results.append(answer)
            self._future = None
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
                self._future = self._threads.submit(self._env.step, wish.turns)
            elif not isinstance(wish, list) or not wish:
                raise BadInput(
                    f"--team.workflow: expected a yielded list of acts, or Step, got {wish!r:.60}"
                )
            else:
                self._acts, self._fresh = wish, True
                self._answers = [None] * len(wish)

    def take_acts(self) -> list[tuple[int, Act]]:
        """The acts that were not handed out yet, each with its number among its siblings."""
        fresh, self._fresh = self._fresh, False
        return list(enumerate(self._acts)) if fresh else []

    def request(self, act: Act, branch: int, step: int) -> Request:
        fold = (step, self._number, len(self._turns) + branch)
        return Request(act.prompt, self._team.owners[act.agent], act.sampling, fold)

    def receive(self, branch: int, completion: Completion) -> None:
        """Takes one act's tokens; when all siblings have theirs, the workflow goes on."""
        self._answers[branch] = self._turn(self._acts[branch], completion)
        turns = [turn for turn in self._answers if turn is not None]
        if len(turns) == len(self._acts):
            self._turns += turns
            self.advance(turns)

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
        )

    def result(self) -> StepResult:
        assert self._future is not None
        result = self._future.result()
        return result._replace(reward=float(result.reward), done=bool(result.done))

    def episode(self) -> Episode:
        return Episode(self._task, self._observation, tuple(self._turns), tuple(self._results))
