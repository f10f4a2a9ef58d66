"""A training run that is open: all that its steps need besides learning, behind verbs."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from marft_jax import config as config_lib
from marft_jax.config import BadInput, Config
from marft_jax.envs.threads import DaemonThreads
from marft_jax.errors import Stopped
from marft_jax.formats import jsonlines
from marft_jax.learning.algorithms import find_algorithm, settle
from marft_jax.learning.batch import Batch, Level
from marft_jax.learning.credit import make_credit
from marft_jax.learning.estimates import Estimates
from marft_jax.learning.learner import Learner
from marft_jax.learning.step_rewards import find_step_reward
from marft_jax.parallel import compilation, processes
from marft_jax.rollout.collect import Collected, collect
from marft_jax.rollout.curriculum import Curriculum
from marft_jax.run import transcripts
from marft_jax.run.files import explained
from marft_jax.run.guard import Guard, by_agent
from marft_jax.run.held_out import HeldOut
from marft_jax.run.lock import Lock
from marft_jax.run.metrics import (
    Clock,
    Compilations,
    CutOff,
    metric_names,
    metrics_of,
    turn_numbers,
)
from marft_jax.run.reporters import Reporter
from marft_jax.run.safety import (
    Schedule,
    check_best_metric,
    open_checkpoints,
    resume,
    roll_back,
    watch,
)
from marft_jax.run.setup import Session, make_rollout, open_session, open_source
from marft_jax.run.signals import EXIT_STOPPED, Stop
from marft_jax.run.trained import initial_state
from marft_jax.team.team_files import Blueprint, dump_team, load_team

_DRAWS_PER_ROLLBACK = 1 << 20  # tasks and keys after a rollback are those of steps never reached


class Training:
    """A run between two of its steps, from the newest checkpoint of its directory to the last step.

    Attributes:
        source: where its episodes come from.
        session, learner: what plays, and what learns.
        state: all that training changes; ``step`` of its steps are done.
        clock: times the parts of the step.
        exit_code: 0 when the last step was reached, 75 when a signal stopped the run.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        config: Config,
        blueprint: Blueprint,
        stop: Stop,
        folder: Path,
    ):
        self._config, self._stop, self._folder = config, stop, folder
        self._lock = stack.enter_context(Lock(folder))
        self.source = source = open_source(stack, config, "train")
        self._held_out = HeldOut(stack, config)
        agents = [profile.name for profile in blueprint.agents]
        names = metric_names(config, agents, self._held_out.plans)
        check_best_metric(config.run.best_metric, names)
        self._threads = DaemonThreads()
        self.session = open_session(config, blueprint)._replace(stop=stop)
        team, mesh = self.session.team, self.session.mesh
        algorithm = find_algorithm(config.algo.name)
        self._credit = make_credit(config.algo, team)
        self._level: Level = algorithm.level
        self.learner = Learner(config, self.session.base, team, algorithm, mesh)
        self._config = config = self.learner.config
        self._guard = Guard(config.guard, team.names, folder / "transcripts" / "guard.jsonl")
        self._checkpoints = stack.enter_context(open_checkpoints(config, self.session))
        self._begin = functools.partial(initial_state, config, team)
        fresh = self.learner.init()
        self.state, news = resume(self._checkpoints, self._guard, fresh, self._begin)
        self.step, self.exit_code = int(self.state.step), EXIT_STOPPED
        write_settings(folder, config, blueprint)
        console = Console(highlight=False, quiet=not processes.is_lead())
        self._reporter = stack.enter_context(
            Reporter(folder, config.run.steps, config.run.tensorboard, self.step + 1, console)
        )
        for line in [_greeting(config, self.session, self.step), *news]:
            self._reporter.event(line)
        self._curriculum = Curriculum(source, config)
        self._schedule, self._compilations = Schedule(config.run), Compilations()
        self._cut_off, self.clock = CutOff(team), Clock()
        self.clock.seconds["checkpoint_s"] = 0.0
        stop.plan, stop.save = _plan_of(self.step), self._checkpoints.flush
        stack.enter_context(self._stopped_in_order())
        if jax.process_count() > 1:  # the others come to a stop when their episodes are played
            stop.grace_s = config.mesh.wait_seconds

    def steps(self) -> Iterator[int]:
        """The number of steps done, before each one that is left.

        Raises:
            Stopped: a signal came; the last finished step is saved.
        """
        steps = self._config.run.steps
        if self.step < steps:
            told = f"compiling ... (step {self.step + 1} takes longer than those after it)"
            self._reporter.event(told)
        while self.step < steps:
            self._stop.plan = _plan_of(self.step)
            yield self.step
            if processes.any_process(self._stop()):
                raise Stopped
        self._reporter.event(f"done: {steps} steps in {self._folder}")
        self.exit_code = 0

    @property
    def seed(self) -> tuple[int, int]:
        """Of all that is drawn in a step; after a rollback, that of a step never reached."""
        return self._config.run.seed, self.step + self._guard.rollbacks * _DRAWS_PER_ROLLBACK

    def note(self, line: str) -> None:
        """Says something once, on the screen and in ``log.txt``."""
        self._reporter.event(line)

    def play(self) -> Collected:
        """Plays the episodes of the step with the present adapters, and credits their turns."""
        engine = self.session.engine
        self._reporter.doing("playing")
        engine.load(self.state.adapters)
        source = self._curriculum.source(self._curriculum.level(self.state.progress))
        rollout = make_rollout(self.session, source, self._threads)
        with self.clock("rollout_s"):
            collected = collect(rollout, self._credit, self._config, self.seed[1])
        self.clock.seconds["reward_s"] = collected.waited_s
        self._reporter.doing("learning")
        engine.rest()
        compilation.give_back_freed()  # before the update, which takes most
        return collected

    def transcribe(self, collected: Collected, batch: Batch, estimates: Estimates) -> None:
        """Writes the transcripts of the step, where they are due; the devices may still update."""
        self._lock.check()
        self._checkpoints.check()
        done = self.step + 1
        if self._is_due(self._config.run.transcripts_every, done):
            numbers = turn_numbers(collected, batch, estimates, self._level)
            file = self._folder / "transcripts" / f"{done}.jsonl"
            decode = self.session.team.tokenizer.decode
            transcripts.write(file, collected.episodes, decode, numbers)

    def report(self, collected: Collected, batch: Batch, learned: dict[str, Any]) -> None:
        """Evaluates where that is due, reports the numbers of the step, and ends it: with its state
        held and, where that is due, saved, or back at the last good one where the guard says so."""
        compilation.drop_programs_when_crowded()
        compilation.give_back_freed()
        config, team, engine = self._config, self.session.team, self.session.engine
        done, nonfinite = self.step + 1, by_agent(learned.pop("nonfinite"), team)
        metrics = metrics_of(collected, learned, team, self.clock, config.algo)
        metrics |= self._compilations.metrics()
        metrics |= {"tokens/reused": float(engine.reused), "tokens/joined": float(batch.joined)}
        if config.env.curriculum is not None:
            metrics["curriculum/level"] = self._curriculum.level(self.state.progress)
        progress = self._curriculum.after(self.state.progress, metrics["reward/mean"])
        self.state = self.state._replace(progress=progress)
        if self._is_due(config.eval.every, done):
            engine.load(self.state.adapters)
            metrics |= self._held_out.evaluate(self.session, self._threads, done, self._reporter)
        verdict = watch(self._guard, done, collected.played, metrics, nonfinite)
        self._cut_off.look(done, collected.played, metrics)
        self._reporter.log(done, metrics | {"guard/lr_scale": float(self.state.lr_scale)})
        self.clock = Clock()  # the next line tells how long this save kept the next step waiting
        with self.clock("checkpoint_s"):
            if verdict is None:
                best, guard = metrics.get(config.run.best_metric or ""), self._guard
                self._checkpoints.hold(done, self.state, guard.memory, best, guard.good)
                if self._schedule.is_due(done):
                    self._checkpoints.save_held()
            else:
                fresh, checkpoints, guard = self.learner.init(), self._checkpoints, self._guard
                begin, settings = self._begin, config.guard
                self.state = roll_back(checkpoints, guard, done, verdict, fresh, begin, settings)
                self._reporter.rewind(int(self.state.step) + 1)
        self.step = int(self.state.step)

    def _is_due(self, every: int, done: int) -> bool:
        """Every so many steps, after the first and after the last; never if ``every`` is 0."""
        return every > 0 and (done % every == 0 or done in (1, self._config.run.steps))

    @contextlib.contextmanager
    def _stopped_in_order(self) -> Iterator[None]:
        """Where a signal stops what happens inside, the last finished step is saved."""
        try:
            yield
        except Stopped:
            self._checkpoints.flush()
            self._reporter.event(
                f"stopped after step {self._reporter.step}; start again to continue"
            )


@contextlib.contextmanager
def open_training(config: Config) -> Iterator[Training]:
    """Opens a run; whatever ends what happens inside, its last finished step is saved.

    Raises:
        BadInput: settings, data, model, team or a saved run that do not fit.
        RunFailed: the run directory cannot be written.
    """
    config = settle(config)
    blueprint = load_team(config.team.file)
    check_learns(config, blueprint)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(Stop("stopped before a step was finished; start again"))
        processes.start(config.mesh)
        stack.enter_context(explained(Path(config.run.dir)))
        folder = stack.enter_context(_own_directory(config))
        yield Training(stack, config, blueprint, stop, folder)


def _plan_of(step: int) -> str:
    """What a signal leads to in the step after this one."""
    saved = f"saving step {step}, " if step else "nothing is finished yet, "
    return f"stopping: {saved}what is begun of step {step + 1} is thrown away"


@contextlib.contextmanager
def _own_directory(config: Config) -> Iterator[Path]:
    """The run directory; a passing one for processes beside the first, who reads and writes
    nothing of the run but its checkpoints."""
    if processes.is_lead():
        yield Path(config.run.dir)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch)


def check_learns(config: Config, blueprint: Blueprint) -> None:
    """Raises ``BadInput`` where a profile's step reward is none, or its samples teach nothing."""
    for profile in blueprint.agents:
        if profile.reward is not None:
            find_step_reward(profile.reward)
        sampled = config.algo.name != "imitation"
        if sampled and profile.trainable and profile.sampling(config.team).temperature == 0:
            raise BadInput(
                f"agent {profile.name!r}: expected a temperature above 0 in training, got 0: "
                "greedy samples teach nothing; raise --team.temperature, or its own"
            )


def write_settings(folder: Path, config: Config, blueprint: Blueprint) -> None:
    """``config.yaml`` and ``team.yaml``: the run directory explains itself."""
    own = config_lib.replaced(config, "team.file", "team.yaml")  # beside it
    jsonlines.write(folder / "team.yaml", [dump_team(blueprint)])
    jsonlines.write(folder / "config.yaml", [config_lib.dump(own)])


def _greeting(config: Config, session: Session, start: int) -> str:
    """One line: what is about to happen."""
    shape = "x".join(str(size) for size in session.mesh.shape.values())
    where = f"{session.mesh.devices.flat[0].device_kind} mesh {shape}"
    who = f"{', '.join(session.team.names)} ({session.workflow})"
    what = f"{who} on {session.base.source}, {config.env.name}"
    begin = f"continuing after step {start}" if start else "from the beginning"
    return f"{config.algo.name}: {what}; {where}; {config.run.dir}, {begin}"
