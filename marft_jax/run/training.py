"""A training run that is open: all that its steps need besides learning, behind verbs."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from marft_jax.config import Config
from marft_jax.envs.threads import DaemonThreads
from marft_jax.errors import BadInput, Stopped
from marft_jax.formats import jsonlines
from marft_jax.learning.advantages import find_normalizer, groups_with_signal
from marft_jax.learning.algorithms import find_algorithm
from marft_jax.learning.batch import Batch, Level
from marft_jax.learning.credit import make_credit
from marft_jax.learning.estimates import Estimates
from marft_jax.learning.learner import Learner
from marft_jax.learning.settings import reuses_samples
from marft_jax.learning.state import TrainState, Version
from marft_jax.learning.step_rewards import find_step_reward
from marft_jax.parallel import compilation, processes
from marft_jax.random_keys import attempt
from marft_jax.rollout.collect import Collected, collect
from marft_jax.rollout.curriculum import Curriculum
from marft_jax.rollout.pipeline import Job, Pipeline
from marft_jax.run.checkpoints import Schedule
from marft_jax.run.compatibility import check_same_run
from marft_jax.run.directory import disk_errors, own_directory, write_settings
from marft_jax.run.guard import Guard, Verdict, by_agent
from marft_jax.run.lock import Lock
from marft_jax.run.loggers import find_loggers
from marft_jax.run.metrics import (
    Clock,
    Compilations,
    TruncationWarning,
    check_best_metric,
    metric_names,
    metrics_of,
)
from marft_jax.run.periodic_evaluation import PeriodicEvaluation
from marft_jax.run.recovery import open_checkpoints, resume, roll_back
from marft_jax.run.reporters import open_reporter
from marft_jax.run.setup import (
    Session,
    initial_state,
    make_rollout,
    open_session,
    open_source,
)
from marft_jax.run.signals import EXIT_STOPPED, GRACE_S, Stop
from marft_jax.run.transcripts import Decode, record, turn_numbers
from marft_jax.team.assemble import workflow_of
from marft_jax.team.team_files import Blueprint, load_team
from marft_jax.types import Episode, OnStep, Sample, TrainedStep

_POLL_S = 0.005


class Training:
    """A run between two of its steps, from the newest checkpoint of its directory to the last step.

    Attributes:
        source: where its episodes come from.
        session, learner: what plays, and what learns.
        state: all that training changes; ``step`` of its steps are done.
        metrics: the numbers of the step that was reported last, by name.
        clock: times the parts of the step.
        exit_code: 0 when the last step was reached, 75 when the run was stopped before.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        config: Config,
        blueprint: Blueprint,
        stop: Stop,
        folder: Path,
        on_step: OnStep | None,
    ):
        self._config, self._stop, self._folder, self._on_step = config, stop, folder, on_step
        loggers = find_loggers(config.run.loggers)
        stack.enter_context(Lock(folder))
        self.source = open_source(stack, config, "train")
        self._curriculum = Curriculum(self.source, config.env)
        self._evaluation = PeriodicEvaluation(stack, config)
        agents = [profile.name for profile in blueprint.agents]
        known = metric_names(config, agents, self._evaluation.plans)
        check_best_metric(config.run.best_metric, known)
        session = open_session(config, blueprint)._replace(stop=stop)
        team, algorithm = session.team, find_algorithm(config.algo.name)
        self.learner = Learner(session.learning, session.base, team, algorithm, session.mesh)
        self.session, self._config = session, session.config
        config = session.config
        self._credit = make_credit(config.algo, team)
        self._level: Level = algorithm.level
        self._guard = Guard(config.guard, team.names, folder / "transcripts" / "guard.jsonl")
        self._checkpoints = stack.enter_context(open_checkpoints(self.session))
        self._begin = functools.partial(initial_state, config, team)
        self.state, news = resume(self._checkpoints, self._guard, self.learner.init(), self._begin)
        self.step, self.exit_code = int(self.state.step), EXIT_STOPPED
        is_done = self.step >= config.run.steps
        if not is_done:
            write_settings(folder, config, blueprint)
        console = Console(highlight=False, quiet=not processes.is_lead())
        loggers = loggers if processes.is_lead() and not is_done else []
        reporter = open_reporter(folder, config.run.steps, loggers, self.step, console)
        self._reporter = stack.enter_context(reporter)
        news += [warning] if (warning := reuses_samples(config.algo)) else []
        for line in [_greeting(self.session, self.state), *news]:
            self._reporter.event(line)
        self._threads = stack.enter_context(DaemonThreads())
        self._schedule = Schedule(config.run)
        self._compilations = stack.enter_context(Compilations(self._reporter.compiled))
        self._truncation = TruncationWarning(team)
        self._lags = config.rollout.lag > 0
        self._pipeline = stack.enter_context(Pipeline(self._play, self._lags))
        self.session = self.session._replace(meet=self._pipeline.meet)
        self._asked, self._enough = self.step, False
        self.metrics: dict[str, float] = {}
        self._played: Sequence[Episode] = ()
        self.clock = Clock()
        self.clock.seconds["checkpoint_s"] = 0.0
        stop.plan, stop.save = _plan_of(self.step), self._save_and_close
        if jax.process_count() > 1:  # the others come to a stop when their episodes are played
            stop.grace_s = config.mesh.wait_seconds

    def steps(self) -> Iterator[int]:
        """The number of steps done, before each one that is left.

        Raises:
            Stopped: a signal came, or ``on_step`` wants no more; the last finished step is saved.
        """
        steps = self._config.run.steps
        if self.step < steps:
            first = self.step + 1
            self._reporter.event(f"compiling ... (step {first} takes longer than those after it)")
        while self.step < steps:
            self._stop.plan = _plan_of(self.step)
            yield self.step
            if processes.any_process(self._stop() or self._enough):
                raise Stopped
        where = f"{steps} steps in {self._config.run.dir}"
        self._reporter.event(f"done: {where}; to go on: --run.steps {2 * steps}")
        self.exit_code = 0

    @property
    def seed(self) -> tuple[int, int]:
        """Of all that is drawn in a step; after a rollback, that of a step never reached."""
        return self._config.run.seed, attempt(self.step, self._guard.rollbacks)

    def note(self, line: str) -> None:
        """Says something once, on the screen and in ``log.txt``."""
        self._reporter.event(line)

    def play(self) -> Collected:
        """The episodes of the step, their turns credited: played now, or ahead with a lag."""
        self._reporter.doing("playing")
        self._ask()
        collected = self._pipeline.take()
        self.clock.seconds |= collected.seconds
        self._stop.plan = _plan_in_update(self.step, self._stop.grace_s)
        self._reporter.doing("learning")
        return collected

    def check(self) -> None:
        """Raises the error of a step that is played ahead."""
        self._pipeline.check()

    def wait_for(self, arrays: Any) -> None:
        """Waits until the devices have made them, or a step that is played ahead fails."""
        own: list[Any] = [x for x in jax.tree.leaves(arrays) if isinstance(x, jax.Array)]
        while self._lags and not all(x.is_ready() for x in own):
            self._pipeline.check(_POLL_S)
        jax.block_until_ready(own)

    def preview(self) -> list[Episode]:
        """Plays the first task once, with the present adapters."""
        self.session.engine.load(self.state.adapters)
        source = self._curriculum.source(self._curriculum.level(self.state.progress))
        return make_rollout(self.session, source, self._threads).play([Sample(0, 0, 0)], 0).episodes

    @property
    def decode(self) -> Decode:
        """Token ids to text, of the team's model."""
        return self.session.team.tokenizer.decode

    def _ask(self) -> None:
        """Asks for every step whose adapters are known: that of the present ones, and at the start
        and after a rollback also those of the versions before."""
        past = self.state.past
        versions = (*past, self._present())
        while self._asked < min(self.step + len(versions), self._config.run.steps):
            adapters, progress = versions[self._asked - self.step]
            number = max(0, self._asked - len(past))
            key = attempt(self._asked, self._guard.rollbacks)
            self._pipeline.ask(Job(key, number, adapters, self._curriculum.level(progress)))
            self._asked += 1
        self.state = self.state._replace(past=versions[1:])  # as it is after the next update

    def _present(self) -> Version:
        """The present version, where it is played; what learns is donated, so with a lag a copy."""
        state = self.state
        if self._config.mesh.rollout:
            with self.clock("place_s"):
                adapters = jax.block_until_ready(self.session.engine.place(state.adapters))
            return Version(adapters, jnp.copy(state.progress))
        return state.version() if state.past else Version(state.adapters, state.progress)

    def _play(self, job: Job, unwanted: Callable[[], bool]) -> Collected:
        """Plays a step, in whichever thread; the cache is there only as long as that takes."""
        engine, stop = self.session.engine, self._stop
        session = self.session._replace(stop=lambda: stop() or unwanted())
        engine.load(job.adapters)
        try:
            source = self._curriculum.source(job.level)
            rollout = make_rollout(session, source, self._threads)
            played = collect(rollout, self._credit, groups_with_signal, self._config, job.attempt)
            seconds = {"reward_s": played.waited_s}
            by = {"version": job.version, "level": job.level, "prefix_cached": engine.reused}
            return played._replace(seconds=seconds, **by)
        finally:
            engine.release()

    def transcribe(self, collected: Collected, estimates: Estimates) -> None:
        """Writes the transcripts of the step, where they are due; the devices may still update."""
        done = self.step + 1
        if self._is_due(self._config.run.transcripts_every, done):
            numbers = turn_numbers(collected, estimates, self._level, self.decode)
            lines = [
                jsonlines.dumps(record(episode, self.decode, own))
                for episode, own in zip(collected.episodes, numbers, strict=True)
            ]
            jsonlines.write(self._folder / "transcripts" / f"{done}.jsonl", lines)

    def report(self, collected: Collected, batch: Batch, learned: dict[str, Any]) -> Verdict | None:
        """Evaluates where that is due, and reports the numbers of the step; a verdict says that the
        run must go back."""
        if compilation.is_crowded():
            self._pipeline.between(compilation.drop_programs)
        compiled, self._played = self._compilations.metrics(), collected.episodes
        if compiled["device/compiled"]:
            compilation.give_back_freed()
        done, nonfinite = self.step + 1, by_agent(learned.pop("nonfinite"), self.session.team)
        self.metrics = self._measure(collected, batch, learned) | compiled
        if self._is_due(self._config.eval.every, done):
            self.metrics |= self._pipeline.between(functools.partial(self._evaluate, done))
        numbers, verdict = self._guard.look(done, collected.played, self.metrics, nonfinite)
        self.metrics |= numbers | {"guard/lr_scale": float(self.state.lr_scale)}
        self._truncation.look(done, collected.played, self.metrics)
        self._stop.plan = _plan_of(done)
        self._reporter.log(done, self.metrics)
        return verdict

    def save(self, verdict: Verdict | None) -> None:
        """Ends the step: with its state held and, where that is due, saved; or back at the last
        good state. Only then is it shown to ``on_step``, which can spoil nothing any more."""
        self.clock = Clock()  # the next line has how long this save kept the next step waiting
        done, checkpoints, guard = self.step + 1, self._checkpoints, self._guard
        with self.clock("checkpoint_s"):
            if verdict is None:
                best, now = self._config.run.best_metric or "", self._schedule.is_due(done)
                metric = self.metrics.get(best)
                checkpoints.save(done, self.state, guard.memory, metric, guard.good, now)
            else:
                fresh = self.learner.init()
                self._pipeline.clear()
                self._pipeline.between(lambda: None)  # nothing else runs while processes meet
                self.state = roll_back(checkpoints, guard, done, verdict, fresh, self._begin)
                self._asked = int(self.state.step)
                self._reporter.rewind(int(self.state.step) + 1)
        self.step = int(self.state.step)
        if self._on_step is not None:
            enough = self._on_step(TrainedStep(done, self.metrics, self._played))
            self._enough = bool(enough) and self.step < self._config.run.steps

    def _measure(
        self, collected: Collected, batch: Batch, learned: dict[str, Any]
    ) -> dict[str, float]:
        """The numbers of the step, by which the curriculum advances."""
        team, seconds = self.session.team, self.clock.seconds
        metrics = metrics_of(collected, learned, team, seconds, self._config.algo)
        metrics |= self.clock.metrics() | {
            "tokens/prefix_cached": float(collected.prefix_cached),
            "tokens/prefix_shared": float(batch.prefix_shared),
        }
        if self._config.rollout.lag:
            lag = self.step - collected.version
            metrics |= {"rollout/version": float(collected.version), "rollout/lag": float(lag)}
        if self._config.env.curriculum is not None:
            metrics["curriculum/level"] = collected.level
        reward, progress = metrics["reward/mean"], self.state.progress
        progress = self._curriculum.after(progress, collected.level, reward)
        self.state = self.state._replace(progress=progress)
        return metrics

    def _evaluate(self, done: int) -> dict[str, float]:
        self.session.engine.load(self.state.adapters)
        return self._evaluation.evaluate(self.session, self._threads, done, self._reporter)

    def _is_due(self, every: int, done: int) -> bool:
        """Every so many steps, after the first and after the last; never if ``every`` is 0."""
        return every > 0 and (done % every == 0 or done in (1, self._config.run.steps))

    def _save_and_close(self) -> None:
        """Saves the last finished step and closes loggers, from another thread than training."""
        self._checkpoints.flush()
        closing = threading.Thread(target=self._reporter.close, daemon=True)
        closing.start()
        closing.join(GRACE_S)  # a logger may call a server that does not answer

    def end_early(self) -> None:
        """Saves the last finished step."""
        self._checkpoints.flush()
        self._reporter.event(f"stopped after step {self.step}; start again to continue")


@contextlib.contextmanager
def open_training(config: Config, on_step: OnStep | None = None) -> Iterator[Training]:
    """Opens a run; whatever ends what happens inside, its last finished step is saved.

    Args:
        on_step: is shown every finished step, in each process; what it raises ends the run.

    Raises:
        BadInput: settings, data, model, team or a saved run that do not fit.
        RunFailed: the run directory cannot be written.
    """
    find_normalizer(config.algo.normalize)  # before a model is loaded
    blueprint = load_team(config.team.file)
    run_dir = Path(config.run.dir).absolute()  # an environment may change directories
    check_same_run(run_dir, config, workflow_of(config, blueprint))
    check_learns(config, blueprint)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(Stop("stopped before a step was finished; start again"))
        processes.start(config.mesh)
        stack.enter_context(disk_errors(run_dir))
        folder = stack.enter_context(own_directory(run_dir))
        training = Training(stack, config, blueprint, stop, folder, on_step)
        try:
            yield training
        except Stopped:
            training.end_early()


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


def _plan_in_update(step: int, grace_s: float) -> str:
    """Announces the effect of a signal while the step after this one is learned from."""
    saved = f"step {step}" if step else "nothing"
    return f"stopping: saving step {step + 1} if it is done in {grace_s:.0f} s, else {saved}"


def _plan_of(step: int) -> str:
    """Announces the effect of a signal while the step after this one is played."""
    saved = f"saving step {step}, " if step else "nothing is finished yet, "
    return f"stopping: {saved}what is begun of step {step + 1} is thrown away"


def _greeting(session: Session, state: TrainState) -> str:
    """The line that a run begins with."""
    start = int(state.step)
    config, shape = session.config, "x".join(map(str, session.mesh.shape.values()))
    where = session.mesh.devices.flat[0].device_kind
    if apart := config.mesh.rollout:
        size = sum(x.nbytes for x in jax.tree.leaves(state.adapters)) / 1e6
        where += f", plays on {'x'.join(map(str, apart))} others ({size:.2g} MB of adapters each)"
        where += ", learns on"
    where += f" mesh {shape}"
    who = f"{', '.join(session.team.names)} ({session.workflow})"
    what = f"{who} on {session.base.source}, {config.env.name}"
    begin = f"continuing after step {start}" if start else "from the beginning"
    return f"{config.algo.name}: {what}; {where}; {config.run.dir}, {begin}"
