"""Makes tasks of rows: finds question and answer, splits for evaluation, orders for training.

| fields                                   | as in                                |
|------------------------------------------|--------------------------------------|
| question, answer ("... #### 18")         | GSM8K                                |
| problem, final_answer                    | MATH, AIME, CMATH, OlympiadBench     |
| problem, answer, solution                | MATH-500, DeepScaleR                 |
| problem, solution (the boxed part of it) | MATH as published, Minerva           |
| question, options or choices, gold/label | multiple choice: AGIEval, GAOKAO     |
| question, A, B, C, D, answer             | multiple choice in a table           |
| question, choices, answerKey             | ARC, CommonsenseQA                   |
| question, answer: {value, aliases}       | TriviaQA; a list of names is as good |
| Body or context or passage, question     | SVAMP, reading: shown before it      |
| instruction, input                       | Alpaca: shown below it               |
| prompt, reward_model: {ground_truth}     | verl                                 |
| prompt, solution (boxed, or $...$ alone) | TRL, Open-R1                         |
| messages, prompt + completion            | chats whose last turn has the answer |

Names count in any case, and a chat is as good as a text: see ``rows.spelled``.
"""

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

from marft_jax.envs.base import OneOf, QuestionSettings, Split, Task, held_out
from marft_jax.envs.datasets.rows import SUFFIXES, LeftOut, rows_of, spelled
from marft_jax.envs.grading.extract import boxed_answer
from marft_jax.envs.grading.normalize import number, split
from marft_jax.errors import BadInput, printable
from marft_jax.plugins import shown
from marft_jax.setting import Count, Fraction, Positive, setting

QUESTION_FIELDS = ("problem", "question", "query", "prompt", "instruction", "messages")
ANSWER_FIELDS = (
    "final_answer", "answer", "expected_answer", "golden", "label", "target", "ground_truth",
    "golden_answers", "answerkey", "gold",
)  # fmt: skip
WORKED_FIELDS = ("solution", "completion")  # texts with an answer in them
CHOICE_FIELDS = ("choices", "options")
CONTEXT_FIELDS = ("body", "context", "passage", "paragraph", "article", "story")
_ROUND = 10_000  # positions after which the sources take turns as before
_ALONE = re.compile(r"\$[^$]+\$|\S+")  # an answer without a word beside it
_CARRIED = re.compile(r"\(?([A-Za-z])\s?[).:]+\s*(\S.*)", re.DOTALL)  # (A) 4
_WORD = re.compile(r"(?<![\\\w])[^\W\d_]{2}")  # no command of LaTeX
_NO_ANSWER = re.compile(  # the words of data sets for a row without an answer
    r"\W*(?:\\text\W*)?(?:proof|(?:answer )?not[ _-]?(?:found|available|provided)|no[ _-]answer|"
    r"null|nan|N/?A|None|tbd|omitted|see (?:the )?(?:solution|proof|above|below|explanation))\W*",
    re.I,
)
_FILTER = re.compile(r"([^=!<>]+?)\s*(!=|<=|>=|=)\s*(.*)")
_COMPARE = {"<=": operator.le, ">=": operator.ge}

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Rows(QuestionSettings):
    """Settings of an environment whose tasks are rows of data."""

    data: tuple[str, ...] = setting((), path=os.path.isfile)
    """Tasks to train on: .json, .jsonl, .parquet or .csv files, or hub ids as
    owner/name[/subset][:split]."""
    weights: tuple[Positive, ...] = setting((), needs="env.data")
    """Share of the training tasks for each source in `data`; none: every task is equally likely."""
    eval_data: tuple[str, ...] = setting((), path=os.path.isfile)
    """Tasks to evaluate on, as in `data`; none: the fraction `holdout` of `data`."""
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


class Sifted(NamedTuple):
    """Rows of a source, sorted.

    Attributes:
        rows: number of rows.
        tasks: the tasks.
        bad: places of faulty rows, each with its fault.
        left_out: reasons why sound rows are no tasks here.
    """

    rows: int
    tasks: list[Task]
    bad: list[str]
    left_out: list[str]


def sift(source: str, env: Rows) -> Sifted:
    """Reads all rows of a file or a hub data set that match ``env.filters``. For the source see
    ``rows_of``, which raises ``BadInput``."""
    keeps = [_filter(text) for text in env.filters]
    found, rows = Sifted(0, [], [], []), 0
    for rows, (place, row) in enumerate(rows_of(source), 1):  # noqa: B007
        if isinstance(row, Mapping):
            row = spelled(row)
            if not all(keep(row) for keep in keeps):
                continue
        task = str(row) if isinstance(row, ValueError) else env.task_of(row)
        if isinstance(task, Task):
            found.tasks.append(task)
        elif isinstance(task, LeftOut):
            found.left_out.append(task.why)
        else:
            found.bad.append(f"{place}: {task}")
    return found._replace(rows=rows)


def load(source: str, env: Rows | None = None) -> list[Task]:
    """Loads all tasks of a file or a hub data set, in its order.

    Faulty rows are reported; a fraction ``env.max_bad_rows`` of them is accepted.

    Raises:
        BadInput: the file is missing or broken, more rows than accepted are faulty, no row is left,
            or the hub cannot be reached. The line names the file and the row.
    """
    env = env or Rows()
    rows, tasks, bad, left_out = sift(source, env)
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


def split_tasks(env: Rows, split: Split) -> list[list[Task]]:
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


def chooser(env: Rows, split: Split) -> tuple[Callable[[int], Task], int]:
    """Loads the data that the settings name.

    Returns:
        A function from a position in the order of tasks to the task, and the number of tasks.

    Raises:
        BadInput: as ``split_tasks``; or the numbers of weights and sources differ.
    """
    if env.weights and len(env.weights) != len(env.data):
        raise BadInput(
            f"--env.weights: expected a positive weight for each of the {len(env.data)} sources "
            f"in --env.data, got {len(env.weights)}: {env.weights}"
        )
    groups = split_tasks(env, split)
    tasks = [task for group in groups for task in group]
    if split == "eval":
        return lambda seed: tasks[seed % len(tasks)], len(tasks)
    pick = training_order(groups, env.weights) if env.weights else training_order([tasks])
    return pick, len(tasks)


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


def as_task(
    row: Any,
    question_field: str | None = None,
    answer_field: str | None = None,
    *,
    needs_answer: bool = True,
) -> Task | LeftOut | str:
    """Makes a task of a row, or says why it is left out or what is wrong with it.

    Args:
        row: field names to values.
        question_field: field of the question; None takes the first of ``QUESTION_FIELDS``.
        answer_field: field of the answer; None takes the first of ``ANSWER_FIELDS``, or the boxed
            or only answer in one of ``WORKED_FIELDS``.
        needs_answer: False accepts a row without an answer, which becomes "".
    """
    if not isinstance(row, Mapping):
        return f"expected an object with a question and an answer, got {shown(row)}"
    got = f"got fields {', '.join(map(str, row)) or 'none'}"
    fields = (question_field,) if question_field else QUESTION_FIELDS
    question = _first(row, fields)
    if _is_preference(row):
        got += " (of a preference, `chosen` can be demonstrations of python -m marft_jax.imitate)"
    if not isinstance(question, str):
        wanted = f"expected a question in one of the fields {', '.join(fields)}"
        return f"{wanted}, {got}; --env.question_field names another"
    try:
        choices = _choices(row)
        answer = _answer(row, answer_field, choices)
        question = _with_choices(_with_context(row, question), choices)
        f"{question}{answer}".encode()
    except ValueError as error:  # a UnicodeEncodeError too: half a surrogate pair
        return str(error)
    if not answer and needs_answer:
        known = f"{', '.join(ANSWER_FIELDS)} or boxed in a solution"
        wanted = f"no answer: expected one in {answer_field or known}"
        return f"{wanted}, {got}; --env.answer_field names another"
    if not choices and isinstance(answer, str) and _NO_ANSWER.fullmatch(answer):
        if needs_answer:
            return LeftOut("their answer is a word for none, such as proof or notfound")
        answer = ""
    return Task(question, answer)


def _answer(row: Row, field: str | None, choices: Sequence[Choice]) -> str | OneOf:
    judged = not field and _is_preference(row)
    fields = (name for name in ANSWER_FIELDS if not (judged and name == "label"))
    values = ((name, _first(row, (name,))) for name in ((field,) if field else fields))
    name, value = next((found for found in values if found[1] is not None), ("", None))
    if value is not None:
        if choices:
            return _chosen(value, choices)
        return _as_text(value) if name == "final_answer" else _names(value)
    worked = None if field or judged else _first(row, WORKED_FIELDS)
    worked = worked[-1] if isinstance(worked, list) else worked
    if not isinstance(worked, str):
        return ""
    if "####" in worked:
        return _as_text(worked)
    alone = _ALONE.fullmatch(worked.strip())
    return (boxed_answer(worked) or (alone[0] if alone else "")).strip()


def _is_preference(row: Row) -> bool:
    """True for rows of preferences, and for completions that are labelled right or wrong."""
    label, right = (str(row.get(name)).strip().lower() for name in ("label", "is_correct"))
    labelled = "completion" in row and label in ("true", "false", "0", "1")
    return labelled or right in ("false", "0") or any(str(k).startswith("rejected") for k in row)


def _names(value: Any) -> str | OneOf:
    """Reads an answer that may have several names; a list of different numbers is one answer."""
    is_thing = isinstance(value, Mapping) and isinstance(value.get("aliases"), list)
    found = [value.get("value"), *value["aliases"]] if is_thing else value
    if not isinstance(found, list):
        return _as_text(value)
    texts = list(dict.fromkeys(_as_text(item) for item in found if not (is_thing and item is None)))
    numbers = {number(split(text)[0]) for text in texts} - {None}
    if is_thing or len(numbers) < 2 and any(map(_WORD.search, texts)):
        return OneOf(texts) if len(texts) > 1 else "".join(texts)
    return _as_text(found)


def _first(row: Row, fields: Sequence[str]) -> Any:
    """Finds the first of these fields with a value that is not blank, empty or NaN."""
    for value in (row.get(field, row.get(field.strip().lower())) for field in fields):
        empty = isinstance(value, (str, list, Mapping)) and not value
        blank = isinstance(value, str) and not value.strip()
        unknown = isinstance(value, float) and not math.isfinite(value)  # missing in a table
        if not (value is None or empty or blank or unknown):
            return value
    return None


def _as_text(value: Any) -> str:
    """Reads an answer as text: ``"... #### 18"`` is ``18``, ``142.0`` ``142``, a list ``a, b``."""
    if isinstance(value, list):
        return ", ".join(map(_as_text, value))
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if value is None or isinstance(value, Mapping | bytes):
        raise ValueError(f"expected an answer of text or numbers, got {shown(value)}")
    text = str(value)
    if "####" in text:
        return text.rpartition("####")[2].strip()
    return (boxed_answer(text) or text).strip()


class Choice(NamedTuple):
    """Choice of a row: its label, its text, and the line that shows both."""

    label: str
    text: str
    line: str


def _chosen(value: Any, choices: Sequence[Choice]) -> str | OneOf:
    """Finds the choice that an answer means: by its label, its index from 0, or its text.

    Raises:
        ValueError: the answer can mean several choices, or is the index or letter of none.
    """
    if isinstance(value, list):
        found = [_chosen(item, choices) for item in value]
        several = ", ".join(answer if isinstance(answer, str) else answer[0] for answer in found)
        return found[0] if len(found) == 1 else several
    answer = _as_text(value)
    carried = _CARRIED.fullmatch(answer)
    label, text = carried.groups() if carried else (answer.strip(" ().:"), answer)
    named = [choice for choice in choices if choice.label.casefold() == label.casefold()]
    told = [c for c in choices if c.text.casefold() in (answer.casefold(), text.casefold())]
    is_index = re.fullmatch(r"[0-9]{1,9}", answer) and not named
    means = {*named, *told, *(choices[int(answer) :][:1] if is_index else ())}
    if len(means) > 1 or not means and re.fullmatch(r"-?[0-9]+|\W*[A-Za-z]\W*", answer):
        labels = ", ".join(choice.label for choice in choices)
        what = "it means several" if means else "it means none"
        raise ValueError(f"expected the label of a choice ({labels}), got {shown(value)}: {what}")
    for choice in means:
        both = dict.fromkeys((choice.label, choice.text))
        return OneOf(both) if told and len(both) > 1 else choice.label
    return answer


def _choices(row: Row) -> list[Choice]:
    """Reads choices: a list, labels to texts, or ``{"label": [...], "text": [...]}``.

    >>> _choices({"choices": {"label": ["1", "2"], "text": ["x", "y"]}})[1]
    Choice(label='2', text='y', line='(2) y')
    >>> _choices({"options": ["A. x", "B. y"]})[1]
    Choice(label='B', text='y', line='B. y')
    """
    found = _first(row, CHOICE_FIELDS)
    if isinstance(found, Mapping) and "text" not in found:
        labels = sorted(label for label in found if found[label] is not None)
        found = {"label": labels, "text": [found[label] for label in labels]}
    labels = (found.get("label") or ()) if isinstance(found, Mapping) else ()
    found = found["text"] if isinstance(found, Mapping) else found
    if not isinstance(found, list):
        return []
    texts = [item if isinstance(item, str) else _as_text(item) for item in found]
    carried = [match for text in texts if (match := _CARRIED.fullmatch(text))]
    own = [match[1].upper() for match in carried]
    if not labels and len(set(own)) == len(texts) and min(own) == "A":
        return [Choice(match[1], match[2], match[0]) for match in carried]
    labels = [_as_text(label) for label in labels] or [chr(65 + i) for i in range(len(texts))]
    if len(labels) != len(texts):
        raise ValueError(f"expected a label for each choice, got {shown(labels)}")
    pairs = zip(labels, texts, strict=True)
    return [Choice(label, text, f"({label}) {text}") for label, text in pairs]


def _with_context(row: Row, question: str) -> str:
    """Puts the context above a question, and the input of an instruction below it."""
    below = row.get("input") if question == row.get("instruction") else None
    parts = [*(_shown(row.get(field)) for field in CONTEXT_FIELDS), question, _shown(below)]
    return "\n".join(part for part in parts if part is question or part not in question)


def _shown(value: Any) -> str:
    lines = value if isinstance(value, list) else [value]
    return "\n".join(str(line) for line in lines if isinstance(line, str | int | float)).strip()


def _with_choices(question: str, choices: Sequence[Choice]) -> str:
    """Puts the choices below a question, unless the question shows them."""
    if all(re.search(rf"{c.label}\W{{1,4}}{re.escape(c.text)}", question) for c in choices):
        return question
    return "\n".join([question, *(choice.line for choice in choices)])


def _filter(text: str) -> Callable[[Row], bool]:
    match = _FILTER.fullmatch(text.strip())
    field, how, values = match.groups() if match else ("", "", "")
    compare, bound = _COMPARE.get(how), _number(values)
    if match is None or compare and math.isnan(bound):
        raise BadInput(
            f"--env.filters: expected field=value|value, field!=value, field<=number or "
            f"field>=number, got {text!r}"
        )
    field = field.strip().lower()
    if compare:
        return lambda row: compare(_number(row.get(field)), bound)
    return lambda row: (str(row.get(field)) in values.split("|")) == (how == "=")


def _number(value: Any) -> float:
    """Converts a value to a number, or to NaN, which is outside every bound."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
