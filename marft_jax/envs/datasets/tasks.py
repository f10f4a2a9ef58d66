"""Makes a task of a row: finds its question, what the question is about, choices and the answer.

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

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from marft_jax.envs.base import OneOf, Task
from marft_jax.envs.datasets.rows import LeftOut
from marft_jax.envs.grading.extract import boxed_answer
from marft_jax.envs.grading.normalize import number, split
from marft_jax.plugins import shown

QUESTION_FIELDS = ("problem", "question", "query", "prompt", "instruction", "messages")
ANSWER_FIELDS = (
    "final_answer", "answer", "expected_answer", "golden", "label", "target", "ground_truth",
    "golden_answers", "answerkey", "gold",
)  # fmt: skip
WORKED_FIELDS = ("solution", "completion")  # texts with an answer in them
CHOICE_FIELDS = ("choices", "options")
CONTEXT_FIELDS = ("body", "context", "passage", "paragraph", "article", "story")
_ALONE = re.compile(r"\$[^$]+\$|\S+")  # an answer without a word beside it
_CARRIED = re.compile(r"\(?([A-Za-z])\s?[).:]+\s*(\S.*)", re.DOTALL)  # (A) 4
_WORD = re.compile(r"(?<![\\\w])[^\W\d_]{2}")  # no command of LaTeX
_NO_ANSWER = re.compile(  # the words of data sets for a row without an answer
    r"\W*(?:\\text\W*)?(?:proof|(?:answer )?not[ _-]?(?:found|available|provided)|no[ _-]answer|"
    r"null|nan|N/?A|None|tbd|omitted|see (?:the )?(?:solution|proof|above|below|explanation))\W*",
    re.I,
)

Row = Mapping[str, Any]


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
