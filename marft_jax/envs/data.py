"""Rows of question and answer: from files and from the hub, in the field names found in the wild.

| fields                                   | as in                                |
|------------------------------------------|--------------------------------------|
| question, answer ("... #### 18")         | GSM8K                                |
| problem, final_answer                    | MATH, AIME, CMATH, OlympiadBench     |
| problem, answer, solution                | MATH-500, DeepScaleR                 |
| problem, solution (the boxed part of it) | MATH as published, Minerva           |
| question, options or choices, gold/label | multiple choice: AGIEval, GAOKAO     |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from marft_jax.envs.base import Split, Task, bad_input, held_out
from marft_jax.envs.grading.extract import last_boxed

QUESTION_FIELDS = ("problem", "question", "query", "prompt", "instruction")
ANSWER_FIELDS = ("final_answer", "answer", "expected_answer", "golden", "label", "target")
CHOICE_FIELDS = ("choices", "options")
SUFFIXES = (".json", ".jsonl", ".parquet")
_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:/(?P<subset>[\w.-]+))?(?::(?P<split>.+))?")

Row = Mapping[str, Any]


def load(source: str) -> list[Task]:
    """All tasks of a file or a hub data set, in its order.

    Args:
        source: a ``.json`` (a list, or ``{"data": [...]}``), ``.jsonl`` or ``.parquet`` file, or
            ``owner/name[/subset][:split]`` on the hub; the split is ``train`` if not said.

    Raises:
        BadInput: one line that names the file and the line or row: the file is missing or broken,
            a row has no question or no answer, there is no row, or the hub cannot be reached.
    """
    tasks = []
    for place, row in _rows(source):
        task = as_task(row)
        if isinstance(task, str):
            raise bad_input(f"{place}: {task}; mend or remove the row")
        tasks.append(task)
    if not tasks:
        raise bad_input(f"{source}: expected at least one row, got none")
    return tasks


def split_tasks(
    source: str | None, eval_source: str | None, holdout: float, split: Split
) -> list[Task]:
    """The tasks of one side: what training sees, or what it never sees.

    Without ``eval_source`` a hash of the question decides (see ``base.held_out``); with it, the
    questions in it are removed from training.

    Raises:
        BadInput: as ``load``; or nothing is left on the wanted side.
    """
    if split == "eval" and eval_source is not None:
        return load(eval_source)
    if source is None:
        raise bad_input(
            f"--env.data: expected a file ({', '.join(SUFFIXES)}) or a hub id, got nothing"
        )
    tasks = load(source)
    if eval_source is not None:
        seen = {task.question.strip() for task in load(eval_source)}
        chosen = [task for task in tasks if task.question.strip() not in seen]
        remedy = f"all of its questions are also in --env.eval_data {eval_source}"
    else:
        wanted = split == "eval"
        chosen = [task for task in tasks if held_out(task.question, holdout) == wanted]
        remedy = f"--env.holdout is {holdout}; change it, or name a file as --env.eval_data"
    if not chosen:
        purpose = "train on" if split == "train" else "evaluate on"
        raise bad_input(f"{source}: none of its {len(tasks)} tasks is left to {purpose}: {remedy}")
    return chosen


def shuffled(tasks: Sequence[Task]) -> Callable[[int], Task]:
    """Random access into the endless order of training tasks: position to task.

    Each epoch (``len(tasks)`` positions from a multiple of it) holds every task once, in its own
    order, which is a pure function of the position.
    """
    import grain  # takes over a second to import, mostly JAX

    dataset = grain.MapDataset.source(tasks).shuffle(seed=0).repeat()  # type: ignore[arg-type]
    return lambda position: dataset[position % len(dataset)]  # type: ignore[return-value]


def as_task(row: Any) -> Task | str:
    """A row as a task, or what is wrong with it."""
    if not isinstance(row, Mapping):
        return f"expected an object with a question and an answer, got {_short(row)}"
    question = next((row[key] for key in QUESTION_FIELDS if _filled(row.get(key))), None)
    if not isinstance(question, str):
        return (
            f"expected a question in one of the fields {', '.join(QUESTION_FIELDS)}, "
            f"got fields {', '.join(map(str, row)) or 'none'}"
        )
    answer = _answer(row)
    if not answer:
        return (
            f"no answer: expected one in {', '.join(ANSWER_FIELDS)}, gold (with choices) or boxed "
            f"in solution, got fields {', '.join(map(str, row))}"
        )
    return Task(_with_choices(question, row), answer)


def _answer(row: Row) -> str:
    for key in ANSWER_FIELDS:
        if _filled(row.get(key)):
            return _as_text(row[key])
    if _filled(row.get("gold")):
        return _as_letters(row["gold"])
    solution = row.get("solution")
    solution = solution[-1] if isinstance(solution, list) and solution else solution
    return (last_boxed(solution) or "").strip() if isinstance(solution, str) else ""


def _filled(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    return value is not None and not (isinstance(value, (list, Mapping)) and not value)


def _as_text(value: Any) -> str:
    """``"... #### 18"`` to ``18``, ``142.0`` to ``142``, a list of answers to ``a, b``."""
    if isinstance(value, list):
        return ", ".join(_as_text(item) for item in value)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value).strip()
    if "####" in text:
        return text.rpartition("####")[2].strip()
    boxed = last_boxed(text) if "\\boxed" in text else None
    return boxed.strip() if boxed else text


def _as_letters(gold: Any) -> str:
    """Indices of the right choices to their letters."""
    items = gold if isinstance(gold, list) else [gold]
    letters = [chr(65 + item) if isinstance(item, int) else _as_text(item) for item in items]
    return ", ".join(letters)


def _with_choices(question: str, row: Row) -> str:
    """The question, with its choices below where it does not already show them."""
    choices = next((row[key] for key in CHOICE_FIELDS if _filled(row.get(key))), None)
    if not isinstance(choices, list) or all(str(choice) in question for choice in choices):
        return question
    lines = [
        text if re.match(r"\(?[A-Z][).:]", text) else f"({chr(65 + index)}) {text}"
        for index, text in enumerate(map(str, choices))
    ]
    return "\n".join([question, *lines])


def _rows(source: str) -> Iterator[tuple[str, Any]]:
    """Every row with its place, as error messages name it."""
    path = Path(source).expanduser()
    if path.suffix in SUFFIXES or path.exists():
        reader = {".json": _json, ".jsonl": _jsonl, ".parquet": _parquet}.get(path.suffix)
        if reader is None or path.is_dir():
            raise bad_input(f"{source}: expected a file {', '.join(SUFFIXES)}, or a hub id")
        try:
            yield from reader(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise bad_input(f"{source}: cannot be read ({reason})") from error
    elif match := _HUB.fullmatch(source):
        yield from _hub(source, match["name"], match["subset"], match["split"] or "train")
    else:
        raise bad_input(
            f"{source}: no such file; expected {', '.join(SUFFIXES)} or owner/name[:split]"
        )


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                place = f"{path} line {number}"
                try:
                    yield place, json.loads(line)
                except json.JSONDecodeError as error:
                    raise bad_input(f"{place}: not JSON: {error.msg}") from error


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise bad_input(f"{path} line {error.lineno}: not JSON: {error.msg}") from error
    if isinstance(rows, Mapping):
        rows = rows.get("data")
    if not isinstance(rows, list):
        raise bad_input(f'{path}: expected a list of rows, or {{"data": [...]}}')
    for number, row in enumerate(rows, 1):
        yield f"{path} row {number}", row


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise bad_input(f"{path}: reading it needs pyarrow: pip install pyarrow") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", row
    except pyarrow.ArrowException as error:
        raise bad_input(f"{path}: not a Parquet file: {_first_line(error)}") from error


def _hub(source: str, name: str, subset: str | None, split: str) -> Iterator[tuple[str, Any]]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise bad_input(f"{source}: the hub needs datasets: pip install datasets") from error
    try:
        rows = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # offline, unknown name, missing subset, unknown split, ...
        raise bad_input(
            f"{source}: no such file, and as a hub id it cannot be loaded: "
            f"{type(error).__name__}: {_first_line(error)}"
        ) from error
    for number, row in enumerate(rows, 1):
        yield f"{source} row {number}", row


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
