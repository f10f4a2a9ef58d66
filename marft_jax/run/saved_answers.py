"""Plays benchmarks and saves each answer at once, so that an evaluation can be continued.

Evaluations during a training keep only scores.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from marft_jax.envs.base import EnvSource, open_source
from marft_jax.errors import BadInput
from marft_jax.evaluation.benchmarks import BenchmarkPlan, plans
from marft_jax.evaluation.scores import Record, score
from marft_jax.formats import jsonlines
from marft_jax.models.lora import Adapters
from marft_jax.models.weights.load import BaseModel
from marft_jax.run import transcripts
from marft_jax.run.compatibility import identity_of, inputs_of
from marft_jax.run.directory import numbered_folder
from marft_jax.run.playing import PlaySetup, play_held_out
from marft_jax.run.reporters import Reporter
from marft_jax.settings.config import Config
from marft_jax.settings.setting import that_decide
from marft_jax.team.prompts import Team
from marft_jax.team.workflows import NEED_ENV

LOGGER = logging.getLogger("marft_jax")


class Answers:
    """Answers of a team to the tasks of a benchmark.

    Args:
        source: the tasks.
        file: saves answers, and may hold answers of an earlier start; None keeps them in memory.
        key: see ``key_of``; needed with ``file`` only.

    Attributes:
        tasks, total: number of tasks, and of answers when all are played.
        records: records of the answers so far, by (sample, task).
    """

    def __init__(
        self,
        playing: PlaySetup,
        plan: BenchmarkPlan,
        source: EnvSource,
        file: Path | None = None,
        key: str = "",
    ) -> None:
        self._playing, self._source = playing._replace(config=plan.config), source
        self._plan, self._file, self._key = plan, file, key
        self.tasks = plan.count(source.size)
        self.total = plan.samples * self.tasks
        self.records = _saved(file, key, plan.samples, self.tasks) if file else {}

    def play(self, report: Callable[[int], None] | None = None, step: int = 0) -> list[Record]:
        """Plays the missing answers and returns all records.

        Args:
            report: is called with the number of answers so far.
            step: part of the random keys, so that evaluations of other steps sample anew.
        """
        decoders = self._playing.team.decoders
        for sample, start, stop in self._missing():
            before = len(self.records)
            each = (lambda over: report(before + over)) if report else None  # noqa: B023
            played = play_held_out(self._playing, self._source, sample, stop, start, each, step)
            where = {"benchmark": self._plan.name, "sample": sample, "key": self._key}
            lines = [jsonlines.dumps(where | row) for row in transcripts.records(played, decoders)]
            if self._file is not None:
                jsonlines.append(self._file, lines)
            for row in map(json.loads, lines):  # as a reader of the file gets them
                self.records[sample, row["index"]] = row
        return [record for _, record in sorted(self.records.items())]

    def _missing(self) -> Iterator[tuple[int, int, int]]:
        """Yields blocks of tasks to play, as (sample, first task, last task + 1)."""
        at_once = self._playing.sampler.capabilities.at_once
        size = max(16, 4 * at_once) if self._file else max(self.tasks, 1)
        for sample, start in product(range(self._plan.samples), range(0, self.tasks, size)):
            block = range(start, min(start + size, self.tasks))
            if missing := [index for index in block if (sample, index) not in self.records]:
                yield sample, missing[0], missing[-1] + 1


def key_of(
    config: Config,
    bases: Mapping[str, BaseModel],
    team: Team,
    adapters: Mapping[str, Adapters],
    size: int | None,
) -> str:
    """Hashes everything that decides the answers: base, team, adapters, number of tasks, settings,
    the data and code that these name, and library versions."""
    identity, deciding = identity_of(config, bases, team), that_decide("answers", config)
    sections = {
        section: {name: v for name, v in settings.items() if f"{section}.{name}" in deciding}
        for section, settings in identity["config"].items()
    }
    identity["config"] = {section: settings for section, settings in sections.items() if settings}
    sha = hashlib.sha256()
    for leaf in jax.tree.leaves(adapters):
        sha.update(np.asarray(leaf).tobytes())
    files = inputs_of(config, team.workflow, team.profiles).values()
    hashes = [file.sha256 for each in files for file in each]
    parts = [identity, team.opener, size, sha.hexdigest(), *hashes]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _saved(file: Path, key: str, samples: int, tasks: int) -> dict[tuple[int, int], Record]:
    """Reads the records with this key. Moves those of other keys to ``earlier-N/`` beside the file,
    and deletes torn lines; answers to more tasks or samples than these stay in the file."""
    records, others = dict[tuple[int, int], Record](), list[Record]()

    def keep(record: Record) -> bool:
        if record["key"] != key:
            others.append(record)
            return False
        return records.setdefault((record["sample"], record["index"]), record) is record

    def move() -> None:
        if others:
            aside = numbered_folder(file.parent, "earlier") / file.name
            jsonlines.append(aside, map(jsonlines.dumps, others))
            LOGGER.warning("%d responses of other settings are now in %s", len(others), aside)

    jsonlines.keep(file, keep, move)
    return {at: record for at, record in records.items() if at[0] < samples and at[1] < tasks}


@contextlib.contextmanager
def open_evaluation(config: Config, workflow: str) -> Iterator[PeriodicEvaluation]:
    """Opens what a training is evaluated on: its benchmarks, or without any its held-out tasks;
    nothing without ``eval.every``.

    Raises:
        BadInput: a benchmark that is not found, or that the workflow cannot play.
    """
    settings, benchmarks = config.eval, list[tuple[BenchmarkPlan, EnvSource]]()
    with contextlib.ExitStack() as stack:
        planned = plans(settings.benchmarks, config, settings.data, 1, settings.episodes)
        for plan in planned if settings.every else ():
            benchmarks.append((plan, stack.enter_context(open_source(plan.config.env, "eval"))))
            if workflow in NEED_ENV and plan.config.env.name != config.env.name:
                raise BadInput(
                    f"--eval.benchmarks {plan.name}: expected none, as --team.workflow {workflow} "
                    f"plays --env.name {config.env.name} alone; leave it out"
                )
        yield PeriodicEvaluation(benchmarks)


class PeriodicEvaluation(NamedTuple):
    """Evaluates a training on benchmarks, each with the source of its tasks."""

    benchmarks: Sequence[tuple[BenchmarkPlan, EnvSource]]

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics that ``evaluate`` returns."""
        return [name for plan, _ in self.benchmarks for name in plan.metric_names]

    def evaluate(self, playing: PlaySetup, step: int, reporter: Reporter) -> dict[str, float]:
        """Returns the metrics of all benchmarks: see ``Score.metrics``."""
        metrics: dict[str, float] = {}
        for plan, source in self.benchmarks:
            answers = Answers(playing, plan, source)
            reporter.doing(what := f"evaluating {plan.name}")
            doing = functools.partial(reporter.doing, what, total=answers.total)
            scored = score(answers.play(doing, step))
            reporter.event(f"step {step}: {plan.name}: {scored}")
            metrics |= scored.metrics(plan.name)
        return metrics
