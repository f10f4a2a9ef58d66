"""Measuring a training step: its numbers, transcripts and evaluations, and the guard's verdict."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

from marft_jax.formats import jsonlines
from marft_jax.learning.algorithms import find_algorithm
from marft_jax.learning.batch import Batch
from marft_jax.learning.estimates import Estimates
from marft_jax.learning.optimiser import rate_factor
from marft_jax.learning.settings import LearnerSettings
from marft_jax.learning.state import TrainState
from marft_jax.parallel import compilation
from marft_jax.rollout.collect import Collected
from marft_jax.rollout.pipeline import Pipeline
from marft_jax.run.answers import PeriodicEvaluation
from marft_jax.run.guard import Guard, Verdict, by_agent
from marft_jax.run.metrics import (
    Clock,
    Compilations,
    check_best_metric,
    metrics_of,
)
from marft_jax.run.reporters import Reporter
from marft_jax.run.setup import Session
from marft_jax.run.transcripts import record, turn_numbers


class Measuring(NamedTuple):
    """Everything that measures and reports the steps of a run.

    Attributes:
        folder: the run directory; a temporary one in processes beside the first.
    """

    session: Session
    guard: Guard
    evaluation: PeriodicEvaluation
    compilations: Compilations
    reporter: Reporter
    pipeline: Pipeline
    threads: Executor
    folder: Path

    def transcribe(self, done: int, collected: Collected, estimates: Estimates) -> None:
        """Writes the transcripts of a step where they are due; the devices may still update."""
        config, decoders = self.session.config, self.session.team.decoders
        if not self._is_due(config.run.transcripts_every, done):
            return
        level = find_algorithm(config.algo.name).level
        numbers = list(turn_numbers(collected, estimates, level, decoders))
        lines = [
            jsonlines.dumps(record(episode, decoders, own))
            for episode, own in zip(collected.episodes, numbers, strict=True)
        ]
        jsonlines.write(self.folder / "transcripts" / f"{done}.jsonl", lines)

    def measure(
        self,
        done: int,
        collected: Collected,
        batch: Batch,
        learned: Mapping[str, Any],
        clock: Clock,
    ) -> dict[str, float]:
        """Returns the numbers of the step after which ``done`` steps are done."""
        seconds = {**clock.seconds, **collected.seconds, "step_s": clock.total_s}
        team, config = self.session.team, self.session.config
        metrics = metrics_of(done, collected, batch, learned, seconds, team, config)
        compiled = self.compilations.metrics()
        if compiled["device/compiled"]:
            compilation.give_back_freed()
        return metrics | compiled

    def report(
        self,
        state: TrainState,
        collected: Collected,
        metrics: Mapping[str, float],
        learned: Mapping[str, Any],
    ) -> tuple[dict[str, float], Verdict | None]:
        """Reports the numbers of a step and, where one is due, of an evaluation.

        Returns:
            All numbers, and a verdict where the run must go back.
        """
        done, reported = int(state.step), dict(metrics)
        if self._is_due(self.session.config.eval.every, done):
            reported |= self.pipeline.run_exclusive(lambda: self._evaluate(state))
        nonfinite = by_agent(learned["nonfinite"], self.session.team)
        numbers, verdict = self.guard.look(done, collected.played, reported, nonfinite)
        lr = learning_rate(self.session.learning, state)
        reported |= numbers | {"guard/lr_scale": float(state.lr_scale), "lr": lr}
        known = {*reported, *self.evaluation.metric_names}
        check_best_metric(self.session.config.run.best_metric, known)
        self.reporter.log(done, reported)
        return reported, verdict

    def _evaluate(self, state: TrainState) -> dict[str, float]:
        self.session.sampler.load(state.adapters, int(state.step))
        return self.evaluation.evaluate(self.session, self.threads, int(state.step), self.reporter)

    def _is_due(self, every: int, done: int) -> bool:
        """True every so many steps, after the first and the last; never if ``every`` is 0."""
        last = self.session.config.run.steps
        return every > 0 and (done % every == 0 or done in (1, last))


def learning_rate(settings: LearnerSettings, state: TrainState) -> float:
    """Returns the learning rate of the step that led to this state."""
    factor = float(rate_factor(settings, int(state.step) - 1))
    return settings.lr * float(state.lr_scale) * factor
