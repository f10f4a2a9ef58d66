"""Answers of a team to the tasks of a benchmark: played where none is saved, saved as they come.

Evaluations while a run goes on keep no answers, but their scores.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import product
from pathlib import Path

import jax
import numpy as np

from marft_jax.config import Config
from marft_jax.envs.base import EnvSource
from marft_jax.evaluation.benchmarks import BenchmarkPlan, plans
from marft_jax.evaluation.scores import Record, score
from marft_jax.formats import jsonlines
from marft_jax.run import transcripts
from marft_jax.run.compatibility import identity_of
from marft_jax.run.inputs import inputs_of
from marft_jax.run.reporters import Reporter
from marft_jax.run.setup import Session, open_source, play_held_out

WITHOUT_EFFECT = {
    **dict.fromkeys(("algo", "critic", "guard"), "only learning reads them"),
    **dict.fromkeys(("run.steps", "rollout.lag", "model.remat"), "only learning reads them"),
    "run.dir": "the place of a run",
    **dict.fromkeys(("run.save_every", "run.save_minutes", "run.keep"), "what a run saves"),
    **dict.fromkeys(("run.best_metric", "run.transcripts_every", "run.loggers"), "what it saves"),
    "team.file": "the team itself is compared",
    "lora.init": "the adapters themselves are compared",
    "mesh": "answers are the same up to rounding; an evaluation may go on on other devices",
    **dict.fromkeys(("rollout.slots", "rollout.chunk", "rollout.reuse"), "same up to rounding"),
    "rollout.max_failed_fraction": "ends an evaluation, changes no answer",
    **dict.fromkeys(("eval.every", "eval.episodes"), "how many answers, not which"),
    **dict.fromkeys(("eval.benchmarks", "eval.data"), "env.eval_data is the file that is played"),
}
"""Settings, or whole sections, by which an answer does not change, each with the reason."""


class Answers:
    """Answers to every task of a benchmark, by its plan's settings.

    Args:
        source: its tasks.
        file: where answers are saved and found again; None keeps them in memory.

    Attributes:
        tasks, total: how many tasks and answers there are to be.
        found: records of the answers that there are, by sample and task.
    """

    def __init__(
        self, session: Session, plan: BenchmarkPlan, source: EnvSource, file: Path | None = None
    ) -> None:
        self._session, self._source = session._replace(config=plan.config), source
        self._plan, self._file = plan, file
        self.tasks = plan.count(source.size)
        self.total = plan.samples * self.tasks
        self._key = key_of(self._session, source.size) if file else ""
        self.found = _saved(file, self._key, plan.samples, self.tasks) if file else {}

    def play(
        self, threads: Executor, report: Callable[[int], None] | None = None, step: int = 0
    ) -> list[Record]:
        """Plays what is missing and returns all records.

        Args:
            report: gets how many answers there are, of ``total``.
            step: samples of another step differ.
        """
        decoders = self._session.team.decoders
        for sample, start, stop in self._missing():
            before = len(self.found)
            each = (lambda over: report(before + over)) if report else None  # noqa: B023
            played = play_held_out(
                self._session, self._source, threads, sample, stop, start, each, step
            )
            where = {"benchmark": self._plan.name, "sample": sample, "key": self._key}
            rows = [where | row for row in transcripts.records(played, decoders)]
            for row in self._save(rows):
                self.found[sample, row["index"]] = row
        return [self.found[place] for place in sorted(self.found)]

    def _missing(self) -> Iterator[tuple[int, int, int]]:
        """Stretches of tasks to play: sample, first and last plus one."""
        size = max(16, 4 * self._session.engine.shape.slots) if self._file else max(self.tasks, 1)
        for sample, start in product(range(self._plan.samples), range(0, self.tasks, size)):
            block = range(start, min(start + size, self.tasks))
            if missing := [index for index in block if (sample, index) not in self.found]:
                yield sample, missing[0], missing[-1] + 1

    def _save(self, rows: Sequence[Record]) -> list[Record]:
        """Appends rows to the file, if there is one; returns them as they will be read."""
        if self._file is None:
            return list(rows)
        lines = [jsonlines.dumps(row) for row in rows]
        jsonlines.append(self._file, lines)
        return [json.loads(line) for line in lines]


def key_of(session: Session, size: int | None) -> str:
    """Digest of all that decides the answers to a source of so many tasks: base, team, adapters,
    every setting that is not in ``WITHOUT_EFFECT``, rows and code that these name, and the
    versions of libraries."""
    identity = identity_of(session.config, session.base, session.team, session.workflow)
    for name in WITHOUT_EFFECT:
        section, _, setting = name.partition(".")
        (identity["config"][section] if setting else identity["config"]).pop(setting or section, 0)
    sha = hashlib.sha256()
    for leaf in jax.tree.leaves(session.engine.adapters):
        sha.update(np.asarray(leaf).tobytes())
    files = inputs_of(session.config, session.workflow, session.team.profiles).values()
    hashes = [file.sha256 for each in files for file in each]
    parts = [identity, session.team.opener, size, sha.hexdigest(), *hashes]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _saved(file: Path, key: str, samples: int, tasks: int) -> dict[tuple[int, int], Record]:
    """Records of the same settings; others, and a half-written line, leave the file."""
    found: dict[tuple[int, int], Record] = {}

    def keep(record: Record) -> bool:
        place = record["sample"], record["index"]
        fits = record["index"] < tasks and record["sample"] < samples
        if record["key"] != key or not fits or place in found:
            return False
        found[place] = record
        return True

    jsonlines.keep(file, keep)
    return found


class PeriodicEvaluation:
    """Evaluations of a run: on its benchmarks, or else on the tasks that it never trains on.

    Tasks are opened before a model is loaded and closed with the stack.

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
