"""Loads tasks from rows, splits them for evaluation, and orders them for training."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from marft_jax.envs.base import QuestionSettings, Split, Task, held_out
from marft_jax.envs.datasets.rows import SUFFIXES, LeftOut, rows_of, spelled
from marft_jax.envs.datasets.tasks import Row, as_task
from marft_jax.errors import BadInput, printable
from marft_jax.settings.setting import Count, Fraction, PathText, Positive, setting

_ROUND = 10_000  # positions after which the sources take turns as before
_FILTER = re.compile(r"([^=!<>]+?)\s*(!=|<=|>=|=)\s*(.*)")
_COMPARE = {"<=": operator.le, ">=": operator.ge}


@dataclasses.dataclass(frozen=True)
class RowSettings(QuestionSettings):
    """Settings of an environment whose tasks are rows of data."""

    data: tuple[PathText, ...] = setting((), path=os.path.isfile)
    """Tasks to train on: .json, .jsonl, .parquet or .csv files, or hub ids as
    owner/name[/subset][:split]."""
    weights: tuple[Positive, ...] = setting((), needs="env.data")
    """Share of the training tasks for each source in `data`; none: every task is equally likely."""
    eval_data: tuple[PathText, ...] = setting((), path=os.path.isfile)
    """Tasks to evaluate on, as in `data`; none: the fraction `holdout` of `data`."""
    holdout: Fraction = setting(0.1, needs="env.eval_data none")
    filters: tuple[str, ...] = ()
    """Conditions on fields that a row must fit: `level=Level 4|Level 5`, `source!=x`,
    `grade<=3`."""
    max_bad_rows: Fraction = 0.001
    """Largest fraction of rows without a question or an answer. Such rows are left out and
    reported."""
    workers: Count = 2
    """Answers that are graded at the same time."""

    def task_of(self, row: Any) -> Task | LeftOut | str:
        """Makes a task of a row, or says why the row is left out or what is wrong with it."""
        return as_task(row)

    def answer_of(self, task: Task, row: Any) -> Any:
        """Returns the answer as the grader gets it, of a task and its row as it was read."""
        return task.answer

    def tried(self, task: Task) -> list[str]:
        """Returns lines about how the task is paid, for ``check``."""
        return []


class Sifted(NamedTuple):
    """Rows of a source, sorted.

    Attributes:
        rows: number of rows.
        tasks: the tasks.
        bad: places of faulty rows, each with its fault.
        left_out: reasons why sound rows are no tasks here.
        instructed: number of tasks whose row has a system message, which stands above the question.
    """

    rows: int
    tasks: list[Task]
    bad: list[str]
    left_out: list[str]
    instructed: int = 0


def sift(source: str, env: RowSettings) -> Sifted:
    """Reads all rows of a file or a hub data set that match ``env.filters``. For the source see
    ``rows_of``, which raises ``BadInput``."""
    keeps = [_filter(text) for text in env.filters]
    sifted, number, instructed = Sifted(0, [], [], []), 0, 0
    for number, (place, source_row) in enumerate(rows_of(source), 1):  # noqa: B007
        row, system = source_row, ""
        if isinstance(row, Mapping):
            try:
                row = spelled(row)
            except ValueError as error:
                sifted.bad.append(f"{place}: {error}")
                continue
            if not all(keep(row) for keep in keeps):
                continue
            system = str(row.get("system") or "").strip()
        task = str(row) if isinstance(row, ValueError) else env.task_of(row)
        if isinstance(task, Task):
            instructed += bool(system)
            question = f"{system}\n{task.question}" if system else task.question
            sifted.tasks.append(Task(question, env.answer_of(task, source_row)))
        elif isinstance(task, LeftOut):
            sifted.left_out.append(task.why)
        else:
            sifted.bad.append(f"{place}: {task}")
    return sifted._replace(rows=number, instructed=instructed)


def load(source: str, env: RowSettings | None = None) -> list[Task]:
    """Loads all tasks of a file or a hub data set, in its order.

    Faulty rows are reported; a fraction ``env.max_bad_rows`` of them is accepted.

    Raises:
        BadInput: the file is missing or broken, more rows than accepted are faulty, no row is left,
            or the hub cannot be reached. The line names the file and the row.
    """
    env = env or RowSettings()
    rows, tasks, bad, left_out, _ = sift(source, env)
    if len(bad) > env.max_bad_rows * rows:
        raise BadInput(
            f"{bad[0]} ({len(bad)} of {rows} rows are bad); mend or remove them, or raise "
            "--env.max_bad_rows"
        )
    reasons = [f"{len(bad)} of {rows} rows; the first: {bad[0]}"] if bad else []
    reasons += [f"{n} of {rows} tasks: {why}" for why, n in Counter(left_out).items()]
    for reason in reasons:
        print(printable(f"marft_jax: {source}: left out {reason}"), file=sys.stderr)
    if not tasks:
        what = f" that fits {' and '.join(env.filters)}" if rows and env.filters else ""
        raise BadInput(f"{source}: expected at least one row{what}, got none")
    return tasks


def split_tasks(env: RowSettings, split: Split) -> list[list[Task]]:
    """Loads the tasks of one side of the split, for each source.

    Without ``env.eval_data`` a hash of the question decides the side (see ``base.held_out``). With
    it, its questions are removed from training.

    Raises:
        BadInput: as ``load``; or no task is left on this side.
    """
    evaluated = [load(source, env) for source in env.eval_data]
    if split == "eval" and evaluated:
        return evaluated
    if not env.data:
        raise BadInput(f"--env.data: expected {', '.join(SUFFIXES)} or a hub id, got nothing")
    seen = {task.question.strip() for tasks in evaluated for task in tasks}

    def is_wanted(task: Task) -> bool:
        if evaluated:
            return task.question.strip() not in seen
        return held_out(task.question, env.holdout) == (split == "eval")

    sides = [[*filter(is_wanted, load(source, env))] for source in env.data]
    for source, side in zip(env.data, sides, strict=True):
        if not side:
            purpose = "train on" if split == "train" else "evaluate on"
            raise BadInput(
                f"{source}: expected tasks to {purpose}, got none; change --env.holdout "
                f"{env.holdout}, or name other tasks as --env.eval_data"
            )
    return sides


def chooser(env: RowSettings, split: Split) -> tuple[Callable[[int], Task], int]:
    """Loads the data that the settings name.

    Returns:
        A function from a position in the order of tasks to the task, and the number of tasks.

    Raises:
        BadInput: as ``split_tasks``; or the numbers of weights and sources differ.
    """
    check_weights(env)
    groups = split_tasks(env, split)
    tasks = [task for group in groups for task in group]
    if split == "eval":
        return lambda seed: tasks[seed % len(tasks)], len(tasks)
    if len({task.question for task in tasks}) == 1:
        print("marft_jax: --env.data: one task, which every episode repeats", file=sys.stderr)
    pick = training_order(groups, env.weights) if env.weights else training_order([tasks])
    return pick, len(tasks)


def check_weights(env: RowSettings) -> None:
    """Raises ``BadInput`` where the numbers of weights and sources differ."""
    if env.weights and len(env.weights) != len(env.data):
        raise BadInput(
            f"--env.weights: expected a positive weight for each of the {len(env.data)} sources "
            f"in --env.data, got {len(env.weights)}: {env.weights}"
        )


def training_order(
    groups: Sequence[Sequence[Task]], weights: Sequence[float] = (1.0,)
) -> Callable[[int], Task]:
    """Orders the training tasks without end.

    Each source has its share of any range of positions. Each epoch of a source has each of its
    tasks once, in an order of its own.

    Returns:
        A pure function from a position to its task.
    """
    times = [(np.arange(_ROUND) + 0.5) / weight for weight in weights]  # at which each is due
    sources = np.argsort(np.concatenate(times), kind="stable")[:_ROUND] // _ROUND
    counts = np.bincount(sources, minlength=len(groups))
    before = [np.cumsum(sources == source) - 1 for source in range(len(groups))]

    @functools.lru_cache(maxsize=4 * len(groups))
    def order(source: int, epoch: int) -> np.ndarray:
        drawn = np.random.PCG64([source, epoch]).random_raw(len(groups[source]))
        return np.argsort(drawn, kind="stable")

    def pick(position: int) -> Task:
        rounds, place = divmod(position, _ROUND)
        source = int(sources[place])
        index = rounds * int(counts[source]) + int(before[source][place])
        epoch, index = divmod(index, len(groups[source]))
        return groups[source][order(source, epoch)[index]]

    return pick


def _filter(text: str) -> Callable[[Row], bool]:
    match = _FILTER.fullmatch(text.strip())
    field, comparison, values = match.groups() if match else ("", "", "")
    compare, bound = _COMPARE.get(comparison), _number(values)
    if match is None or compare and math.isnan(bound):
        raise BadInput(
            f"--env.filters: expected field=value|value, field!=value, field<=number or "
            f"field>=number, got {text!r}"
        )
    field = field.strip().lower()
    if compare:
        return lambda row: compare(_number(row.get(field)), bound)
    return lambda row: (str(row.get(field)) in values.split("|")) == (comparison == "=")


def _number(value: Any) -> float:
    """Converts a value to a number, or to NaN, which is outside every bound."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
