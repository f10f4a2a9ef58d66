"""Evaluations while a run goes on: its benchmarks, or else the tasks that it never trains on."""

from __future__ import annotations

import contextlib
import functools
from concurrent.futures import Executor

from marft_jax.config import Config
from marft_jax.evaluation.benchmarks import plans
from marft_jax.evaluation.scores import score
from marft_jax.run.answers import Answers
from marft_jax.run.reporters import Reporter
from marft_jax.run.setup import Session, open_source


class PeriodicEvaluation:
    """Tasks of evaluations, opened before a model is loaded and closed with the stack.

    Attributes:
        plans: of each benchmark; none without ``eval.every``.
    """

    def __init__(self, stack: contextlib.ExitStack, config: Config):
        settings = config.eval
        wanted = (settings.benchmarks, config, settings.data, 1, settings.episodes)
        self.plans = plans(*wanted) if settings.every else []
        self._sources = [open_source(stack, plan.config, "eval") for plan in self.plans]

    @property
    def metric_names(self) -> list[str]:
        """Metrics that an evaluation gives."""
        return [name for plan in self.plans for name in plan.metric_names]

    def evaluate(
        self, session: Session, threads: Executor, step: int, reporter: Reporter
    ) -> dict[str, float]:
        """Returns the team's accuracy, and pass@k where tasks are played several times, as
        metrics."""
        metrics: dict[str, float] = {}
        for plan, source in zip(self.plans, self._sources, strict=True):
            answers = Answers(session, plan, source)
            what = f"evaluating {plan.name}"
            reporter.doing(what)
            doing = functools.partial(reporter.doing, what, total=answers.total)
            found = score(answers.play(threads, doing, step))
            reporter.event(f"step {step}: {plan.name}: {found}")
            metrics |= found.metrics(plan.name)
        return metrics
