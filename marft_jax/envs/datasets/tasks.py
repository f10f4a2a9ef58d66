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
| question, correct and incorrect answers  | GPQA, SciQ: shown as choices         |
| question, answer: {value, aliases}       | TriviaQA; a list of names is as good |
| question, answers: {text: [...]}         | SQuAD                                |
| Body or context or passage, question     | SVAMP, reading: shown before it      |
| instruction, input                       | Alpaca: shown below it               |
| prompt, reward_model: {ground_truth}     | verl; also verification_info         |
| responses_create_params, expected_answer | NeMo-Gym                             |
| prompt, solution (boxed, or $...$ alone) | TRL, Open-R1                         |
| messages, prompt + completion            | chats whose last turn has the answer |

Names count in any case, with or without spaces and ``_``, and a chat is as good as a text: see
``rows.spelled``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from marft_jax.envs.base import OneOf, Task
from marft_jax.envs.datasets.choices import (
    CHOSEN_FIELDS,
    Choice,
    choices_of,
    chosen,
    mixed,
    with_choices,
    wrong_answers,
)
from marft_jax.envs.datasets.fields import WORD, Row, as_text, first, is_blank, names, squashed
from marft_jax.envs.datasets.rows import LeftOut, structured
from marft_jax.envs.grading.extract import boxed_answer
from marft_jax.plugins import shown

QUESTION_FIELDS = (
    "problem", "question", "query", "prompt", "instruction", "messages", "conversations",
    "question_stem", "input",
)  # fmt: skip
ANSWER_FIELDS = (
    "final_answer", "answer", "expected_answer", "reference_answer", "gt_answer", "correct_answer",
    "gold_answer", "golden", "label", "target", "ground_truth", "golden_answers", "answer_key",
    "gold", "best_answer", "answers", "correct_answers",
)  # fmt: skip
WORKED_FIELDS = ("solution", "completion")  # texts with an answer in them
CONTEXT_FIELDS = (
    "body", "context", "contexts", "passage", "passages", "paragraph", "paragraphs", "article",
    "story", "document", "documents", "theory", "premises", "pre_text", "table", "post_text",
)  # fmt: skip
_ALONE = re.compile(r"\$[^$]+\$|\S+")  # an answer without a word beside it
_NO_ANSWER = re.compile(  # the words of data sets for a row without an answer
    r"\W*(?:\\text\W*)?(?:proof|(?:answer )?not[ _-]?(?:found|available|provided)|no[ _-]answer|"
    r"null|nan|N/?A|None|tbd|omitted|see (?:the )?(?:solution|proof|above|below|explanation))\W*",
    re.I,
)
_MOST_WORDS = 30  # of an answer that is no choice; a longer text explains one
_PREFERENCE = re.compile(
    r".*(?:rejected|chosen|preferred|preference|better|worse|winner|loser|margin).*"
    r"|(?:response|completion|output|conversation|reply|generation|humanref)s?(?:\d|[abjk])"
)
_IMAGES = re.compile(r"images?\d*")
_PASSAGE = re.compile(
    r"titles?|(?:.*_)?(?:texts?|sentences?|paragraphs?|passages?|contexts?|contents?)|body|abstract"
)


def as_task(
    row: Any,
    question_field: str | None = None,
    answer_field: str | None = None,
    *,
    answers: Literal["needed", "optional", "unread"] = "needed",
) -> Task | LeftOut | str:
    """Makes a task of a row, or says why it is left out or what is wrong with it.

    Args:
        row: field names to values.
        question_field: field of the question; None takes the first of ``QUESTION_FIELDS``.
        answer_field: field of the answer; None takes the first of ``ANSWER_FIELDS``, or the boxed
            or only answer in one of ``WORKED_FIELDS``.
        answers: optional accepts a row without an answer, which becomes "", as all are if unread.
    """
    if not isinstance(row, Mapping):
        return f"expected an object with a question and an answer, got {shown(row)}"
    named = {squashed(str(name)): value for name, value in row.items()}
    if any(_IMAGES.fullmatch(name) and not is_blank(named[name]) for name in named):
        return LeftOut("they need images, which agents are not shown")
    got = f"got fields {', '.join(map(str, row)) or 'none'}"
    fields = (question_field,) if question_field else QUESTION_FIELDS
    question = first(named, fields)
    if _is_preference(named):
        got += " (of a preference, `chosen` can be demonstrations of python -m marft_jax.imitate)"
    if not isinstance(question, str):
        wanted = f"expected a question in one of the fields {', '.join(fields)}"
        return f"{wanted}, {got}; --env.question_field names another"
    try:
        choices = choices_of(named)
        answer = "" if answers == "unread" else _answer(named, answer_field, choices)
        if answers == "needed" and not choices and len(WORD.findall(str(answer))) > _MOST_WORDS:
            raise ValueError(f"expected a short answer, or one in \\boxed{{}}, got {shown(answer)}")
        wrong = wrong_answers(named)
        if wrong and answer and not choices and isinstance(answer, str):
            choices, answer = mixed(answer, wrong, question)
        question = with_choices(_with_context(named, question), choices)
        f"{question}{answer}".encode()
    except ValueError as error:  # a UnicodeEncodeError too: half a surrogate pair
        return str(error)
    if not answer and answers == "needed":
        known = f"{', '.join(ANSWER_FIELDS)} or boxed in a solution"
        wanted = f"no answer: expected one in {answer_field or known}"
        return f"{wanted}, {got}; --env.answer_field names another"
    if not choices and isinstance(answer, str) and _NO_ANSWER.fullmatch(answer):
        if answers == "needed":
            return LeftOut("their answer is a word for none, such as proof or notfound")
        answer = ""
    return Task(question, answer)


def _answer(named: Row, field: str | None, choices: Sequence[Choice]) -> str | OneOf:
    judged = not field and _is_preference(named)
    known = (*ANSWER_FIELDS, *(CHOSEN_FIELDS if choices else ()))
    fields = (field,) if field else [n for n in known if not (n == "label" and judged)]
    if (value := first(named, fields)) is not None:
        if choices:
            return chosen(value, choices)
        is_all = first(named, ("final_answer",)) is not None and not field
        return as_text(value) if is_all else names(value)
    worked = None if field or judged else first(named, WORKED_FIELDS)
    worked = worked[-1] if isinstance(worked, list) else worked
    if not isinstance(worked, str):
        return ""
    if "####" in worked:
        return as_text(worked)
    alone = _ALONE.fullmatch(worked.strip())
    return (boxed_answer(worked) or (alone[0] if alone else "")).strip()


def _is_preference(named: Row) -> bool:
    """True for rows of preferences, and for texts that are labelled right or wrong."""
    label = str(named.get("label")).strip().lower()
    labelled = "completion" in named and label in ("true", "false", "0", "1", "0.0", "1.0")
    rated = [named.get(name) for name in ("iscorrect", "correct", "reward", "score", "rating")]
    is_wrong = any(str(value).strip().lower() in ("false", "0", "0.0") for value in rated)
    return labelled or is_wrong or any(map(_PREFERENCE.fullmatch, named))


def _with_context(named: Row, question: str) -> str:
    """Puts the context above a question, and the input of an instruction below it."""
    below = named.get("input") if question == named.get("instruction") else None
    above = (_passages(named.get(squashed(field)), field == "table") for field in CONTEXT_FIELDS)
    parts = [*above, question, _passages(below)]
    return "\n".join(part for part in parts if part is question or part not in question)


def _passages(value: Any, is_table: bool = False) -> str:
    """Reads what a question is about: texts; objects with texts; titles with sentences."""
    passages = structured(value)
    if not isinstance(passages, list):
        return _passage(passages)
    between = " | " if is_table else " "
    return "\n".join(filter(None, (_passage(passage, between) for passage in passages)))


def _passage(value: Any, between: str = " ") -> str:
    if isinstance(value, Mapping):
        keys = [key for key in value if _PASSAGE.fullmatch(str(key).lower())]
        columns = [value[key] for key in sorted(keys, key=lambda key: "title" not in key.lower())]
        if len(columns) > 1 and all(isinstance(column, list) for column in columns):
            return "\n".join(_passage(list(each)) for each in zip(*columns, strict=False))
        return "\n".join(filter(None, map(_passage, columns)))
    if isinstance(value, list):
        is_flat = not any(isinstance(item, list | Mapping) for item in value)
        return (between if is_flat else "\n").join(filter(None, map(_passage, value)))
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return "" if not plain or is_blank(value) else str(value).strip()
