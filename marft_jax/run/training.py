"""A training run that is open: the values of its steps, and what becomes of each step.

``open_training`` opens everything that a run needs. The training state goes from step to step as a
value (``train.learn_from``); what is here reads it, reports it, and saves it or takes it back.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from marft_jax.config import Config
from marft_jax.envs.base import EnvSource
from marft_jax.errors import Stopped
from marft_jax.formats import jsonlines
from marft_jax.learning import pool
from marft_jax.learning.advantages import groups_with_signal
from marft_jax.learning.algorithms import find_algorithm
from marft_jax.learning.batch import Batch
from marft_jax.learning.credit import make_credit
from marft_jax.learning.estimates import Estimates
from marft_jax.learning.learner import Learner
from marft_jax.learning.optimiser import rate_factor
from marft_jax.learning.state import TrainState
from marft_jax.parallel import compilation, processes
from marft_jax.random_keys import attempt
from marft_jax.rollout.collect import Collected, collect
from marft_jax.rollout.curriculum import Curriculum
from marft_jax.rollout.pipeline import Job, Pipeline, Sampled, Unwanted
from marft_jax.run.answers import PeriodicEvaluation
from marft_jax.run.checkpoints import Checkpoints, Schedule
from marft_jax.run.guard import Guard, Verdict, by_agent
from marft_jax.run.metrics import (
    Clock,
    Compilations,
    TruncationWarning,
    check_best_metric,
    metrics_of,
)
from marft_jax.run.recovery import Begin, roll_back
from marft_jax.run.reporters import Reporter
from marft_jax.run.setup import Session, make_rollout
from marft_jax.run.signals import EXIT_STOPPED, GRACE_S, Ended, Stop
from marft_jax.run.transcripts import record, sample_rows, turn_numbers


class Training(NamedTuple):
    """An open run. Its parts are host objects; what training changes is in ``TrainState``.

    Attributes:
        session, learner: what plays, and what learns.
        source, curriculum: the tasks, and which of them a step plays.
        state: that the run begins or goes on with.
        begin: makes the state of a run that begins out of a fresh one.
        pipeline: the thread that plays, where there is one.
        folder: the run directory; a temporary one in processes beside the first.
    """

    session: Session
    learner: Learner
    source: EnvSource
    curriculum: Curriculum
    state: TrainState
    begin: Begin
    checkpoints: Checkpoints
    schedule: Schedule
    guard: Guard
    truncation: TruncationWarning
    evaluation: PeriodicEvaluation
    reporter: Reporter
    compilations: Compilations
    pipeline: Pipeline
    threads: Executor
    stop: Stop
    folder: Path

    @property
    def config(self) -> Config:
        """Every setting, with what the base decided."""
        return self.session.config

    def seed(self, step: int) -> tuple[int, int]:
        """Seeds all that is drawn in a step; after a rollback, as in a step never reached."""
        return self.config.run.seed, attempt(step, self.guard.rollbacks)

    def compiling(self, first: int) -> str:
        """Says that a run's first step compiles, how many programs there can be, and where they are
        kept for the next start."""
        most = f"; at most {self.session.engine.most_programs} to play, as prompts grow"
        played = "" if self.config.algo.recorded else most
        kept = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
        where = f"; kept in {kept}" if kept else ""
        return f"compiling ... (step {first} takes longer than those after it{played}{where})"

    def announce(self, step: int, what: str) -> None:
        """Shows what goes on in the step after ``step``, and prepares the line of a signal."""
        self.reporter.doing(what)
        if what == "learning":
            saved, grace_s = f"step {step}" if step else "nothing", self.stop.grace_s
            effect = f"saving step {step + 1} if it is done in {grace_s:.0f} s, else {saved}"
        else:
            saved = f"saving step {step}" if step else "nothing is finished yet"
            effect = f"{saved}; the unfinished step {step + 1} is dropped"
        self.stop.expect(f"stopping: {effect}")

    def sampled(self) -> Sampled:
        """Steps that the team plays itself."""
        algo = self.config.algo
        credit = make_credit(algo, self.session.team)
        has_signal = functools.partial(groups_with_signal, algo=algo)

        def play(job: Job, unwanted: Unwanted) -> Collected:
            source = self.curriculum.source(job.level)
            rollout = make_rollout(self.session, source, self.threads, unwanted=unwanted)
            return collect(rollout, credit, has_signal, self.config, job.attempt)

        steps, apart = self.config.run.steps, bool(self.config.mesh.rollout)
        return Sampled(self.pipeline, self.session.engine, self.curriculum, play, steps, apart)

    def transcribe(self, done: int, collected: Collected, estimates: Estimates) -> None:
        """Writes the transcripts of a step where they are due; the devices may still update."""
        if not self._is_due(self.config.run.transcripts_every, done):
            return
        decode = self.session.team.tokenizer.decode
        level = find_algorithm(self.config.algo.name).level
        numbers = list(turn_numbers(collected, estimates, level, decode))
        lines = [
            jsonlines.dumps(record(episode, decode, own))
            for episode, own in zip(collected.episodes, numbers, strict=True)
        ]
        jsonlines.write(self.folder / "transcripts" / f"{done}.jsonl", lines)
        self.reporter.samples(done, sample_rows(done, collected.episodes, numbers))

    def measure(
        self,
        state: TrainState,
        collected: Collected,
        batch: Batch,
        learned: Mapping[str, Any],
        clock: Clock,
    ) -> tuple[TrainState, dict[str, float]]:
        """Returns the numbers of the step, and the state with the curriculum moved by them."""
        seconds = {**clock.seconds, **collected.seconds, "step_s": clock.total_s}
        metrics = metrics_of(
            int(state.step), collected, batch, learned, seconds, self.session.team, self.config
        )
        compiled = self.compilations.metrics()
        if compiled["device/compiled"]:
            compilation.give_back_freed()
        after = self.curriculum.after(state.progress, collected.level, metrics["reward/mean"])
        state = state._replace(progress=after)
        if (past := pool.past_of(self.session.team)) is not None:
            seed = self.seed(int(state.step))
            state = pool.after(past, self.config.rollout, state, collected.played, seed)
        return state, metrics | compiled

    def report(
        self,
        state: TrainState,
        collected: Collected,
        metrics: Mapping[str, float],
        learned: Mapping[str, Any],
    ) -> tuple[dict[str, float], Verdict | None]:
        """Evaluates where that is due, and reports the numbers of the step; a verdict says that the
        run must go back."""
        if compilation.is_crowded():
            self.pipeline.between(compilation.drop_programs)
        done, reported = int(state.step), dict(metrics)
        if self._is_due(self.config.eval.every, done):
            reported |= self.pipeline.between(functools.partial(self._evaluate, state))
        nonfinite = by_agent(learned["nonfinite"], self.session.team)
        numbers, verdict = self.guard.look(done, collected.played, reported, nonfinite)
        reported |= numbers | {"guard/lr_scale": float(state.lr_scale), "lr": self._lr(state)}
        known = {*reported, *self.evaluation.metric_names}
        check_best_metric(self.config.run.best_metric, known)
        self.truncation.look(done, collected.played, reported)
        self.announce(done, "saving")
        self.reporter.log(done, reported)
        return reported, verdict

    def _lr(self, state: TrainState) -> float:
        """Returns the learning rate with which the step that led to this state was taken."""
        factor = float(rate_factor(self.session.learning, int(state.step) - 1))
        return self.session.learning.lr * float(state.lr_scale) * factor

    def _evaluate(self, state: TrainState) -> dict[str, float]:
        self.session.load(state.adapters)
        return self.evaluation.evaluate(self.session, self.threads, int(state.step), self.reporter)

    def save(
        self, state: TrainState, metrics: Mapping[str, float], verdict: Verdict | None
    ) -> TrainState:
        """Holds the state and saves it where that is due; or returns the last good one."""
        done, guard = int(state.step), self.guard
        if verdict is None:
            metric = metrics.get(self.config.run.best_metric or "")
            now = self.schedule.is_due(done)
            self.checkpoints.save(done, state, guard.memory, metric, guard.good, now)
            return state
        self.pipeline.clear()
        self.pipeline.between(lambda: None)  # nothing else runs while processes meet
        fresh = self.learner.init()
        state = roll_back(self.checkpoints, guard, done, verdict, fresh, self.begin)
        self.reporter.rewind(int(state.step) + 1)
        return state

    def stop_if(self, enough: bool) -> None:
        """Raises ``Stopped`` where a signal came, or that was enough, in any process."""
        if processes.any_process(self.stop() or enough):
            raise Stopped

    def ended(self) -> Ended:
        """Says why a run that was stopped ended."""
        why = "a signal came" if self.stop() else "on_step wanted no more"
        return Ended(EXIT_STOPPED, f"{why}; {self.stopped()}")

    def stopped(self) -> str:
        """Says which step a run that was stopped has saved, and what starting again does."""
        if not (done := self.checkpoints.step):
            return "stopped before a step was finished: nothing is saved; start again to begin anew"
        where = f"which is saved in {self.config.run.dir}"
        return f"stopped after step {done}, {where}; start again to continue"

    def save_and_close(self) -> str:
        """Saves the last finished step, says which, and closes loggers: from another thread than
        training."""
        self.checkpoints.flush()
        closing = threading.Thread(target=self.reporter.close, daemon=True)
        closing.start()
        closing.join(GRACE_S)  # a logger may call a server that does not answer
        return self.stopped()

    def _is_due(self, every: int, done: int) -> bool:
        """True every so many steps, after the first and the last; never if ``every`` is 0."""
        return every > 0 and (done % every == 0 or done in (1, self.config.run.steps))
