"""Reads the choices of a row, and finds the choice that its answer means."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from marft_jax.envs.base import OneOf
from marft_jax.envs.datasets.fields import Row, as_text, first, is_blank
from marft_jax.envs.datasets.rows import structured
from marft_jax.plugins import shown

CHOICE_FIELDS = ("choices", "options", "answer_choices", "endings")
CHOSEN_FIELDS = ("correct", "correct_option", "correct_choice", "answer_idx", "answer_index")
"""Further fields of the answer, of rows with choices."""
_CARRIED = re.compile(r"\(?([A-Za-z])\s?[).:]+\s*(\S.*)", re.DOTALL)  # (A) 4
_LISTED = re.compile(r"(?:^|[,;\n])\s*(?=\(?[A-Za-z]\s?[).:])")  # a) 4, b) 6
_WRONG = re.compile(r"(?:incorrect|wrong|false)(?:answer|option|choice)s?\d*|distractors?\d*")
_COUNTED = re.compile(r"(?:option|choice|answer|ending|sol|op|opt)(?:\d|[a-j])")
_LABEL, _TEXT = ("label", "id", "key", "letter"), ("text", "value", "content", "option", "choice")


class Choice(NamedTuple):
    """Choice of a row: its label, its text, the line that shows both, and if the row gives the
    label. The text of a choice that is missing is ""."""

    label: str
    text: str
    line: str
    is_labelled: bool = True


def choices_of(named: Row) -> list[Choice]:
    """Reads choices: a list, labels to texts, ``{"label": [...], "text": [...]}``, or one text.

    >>> choices_of({"choices": {"label": ["1", "2"], "text": ["x", "y"]}})[1].line
    '(2) y'
    >>> choices_of({"options": ["A. x", "B. y"]})[1].line
    'B. y'
    >>> choices_of({"options": "a ) 38 , b ) 27.5"})[1].text
    '27.5'

    Raises:
        ValueError: they have another form.
    """
    choices = structured(first(named, CHOICE_FIELDS))
    if choices is None and first(named, ("label", *CHOSEN_FIELDS)) is not None:
        choices = named["answers"] if isinstance(named.get("answers"), list) else None
    counted = [name for name in named if _COUNTED.fullmatch(name)]
    if choices is None and len(counted) > 1:
        got = f"columns {', '.join(counted)}, which may count from 0 or 1"
        raise ValueError(f"expected a list `choices`, or columns A, B, ..., got {got}")
    if isinstance(choices, str):
        choices = [part.strip(" ,;\n") for part in _LISTED.split(choices) if part.strip()]
        if not all(map(_CARRIED.fullmatch, choices)):
            raise ValueError(f"expected a list of choices, got {shown(', '.join(choices))}")
    labels, texts = [], choices
    if isinstance(choices, list) and any(isinstance(item, Mapping) for item in choices):
        pairs = [(None, None) if item is None else _labelled(item) for item in choices]
        labels, texts = map(list, zip(*pairs, strict=True))
    elif isinstance(choices, Mapping) and "text" in choices:
        labels, texts = choices.get("label") or (), choices["text"]
    elif isinstance(choices, Mapping):
        labels = sorted(label for label in choices if choices[label] is not None)
        texts = [choices[label] for label in labels]
    return _lined(labels, texts) if isinstance(texts, list) else []


def _labelled(item: Any) -> tuple[Any, Any]:
    """Reads label and text of a choice: ``{"label": "A", "text": "x"}``, or ``{"A": "x"}``."""
    fields = item if isinstance(item, Mapping) else {}
    text = next((key for key in _TEXT if key in fields), None)
    if text is not None:
        return next((fields[key] for key in _LABEL if key in fields), None), fields[text]
    if len(fields) == 1 and re.fullmatch(r"[A-Za-z]|\d{1,2}", label := str(*fields)):
        return label, fields[label]
    raise ValueError(f"expected choices with `label` and `text`, got {shown(item)}")


def _lined(row_labels: Sequence[Any], values: Sequence[Any]) -> list[Choice]:
    """Makes choices of their labels, as far as the row has them, and of their texts."""
    texts = ["" if is_blank(v) else v.strip() if isinstance(v, str) else as_text(v) for v in values]
    letters = [chr(65 + i) for i in range(len(texts))]
    carried = [match for text in texts if (match := _CARRIED.fullmatch(text))]
    labels = [as_text(label) for label in row_labels if label is not None]
    carried_labels = [match[1].upper() for match in carried]
    if carried and not labels and carried_labels == letters[: len([*filter(None, texts)])]:
        return [Choice(match[1].upper(), match[2], match[0]) for match in carried]
    if labels and len(labels) != len(texts):
        raise ValueError(f"expected a label for each choice, got {shown(row_labels)}")
    labels = [label.upper() if re.fullmatch("[a-z]", label) else label for label in labels]
    pairs = zip(labels or letters, texts, strict=True)
    return [Choice(label, text, f"({label}) {text}", bool(labels)) for label, text in pairs]


def chosen(value: Any, choices: Sequence[Choice]) -> str | OneOf:
    """Finds the choice that an answer means: by its label, its index from 0, or its text.

    A text that is a choice of a plain list is that choice, not an index.

    Raises:
        ValueError: the answer can mean several choices, or is the index or letter of none.
    """
    if isinstance(value, list):
        answers = [chosen(item, choices) for item in value]
        texts = [answer if isinstance(answer, str) else answer[0] for answer in answers]
        return answers[0] if len(answers) == 1 else ", ".join(texts)
    answer = as_text(value)
    carried = _CARRIED.fullmatch(answer)
    label, text = carried.groups() if carried else (answer.strip(" ().:"), answer)
    present = [choice for choice in choices if choice.text]
    by_label = [choice for choice in present if choice.label.casefold() == label.casefold()]
    by_text = [c for c in present if c.text.casefold() in (answer.casefold(), text.casefold())]
    is_text = by_text and isinstance(value, str) and not by_text[0].is_labelled
    is_index = re.fullmatch(r"[0-9]{1,9}", answer) and not by_label and not is_text
    by_index = [c for c in choices[int(answer) :][:1] if c.text] if is_index else []
    means = {*by_label, *by_text, *by_index}
    none = isinstance(value, bool) or re.fullmatch(r"-?[0-9]+|\W*[A-Za-z]\W*", answer)
    if len(means) > 1 or not means and none or len(by_text) > 1:
        labels = ", ".join(choice.label for choice in present)
        what = "it means several" if means else "it means none"
        raise ValueError(f"expected the label of a choice ({labels}), got {shown(value)}: {what}")
    for choice in means:
        both = dict.fromkeys((choice.label, choice.text))
        return OneOf(both) if by_text and len(both) > 1 else choice.label
    return answer


def wrong_answers(named: Row) -> list[str]:
    """Lists the wrong answers of a row that has them in columns of their own."""
    answers = list[Any]()
    for name in filter(_WRONG.fullmatch, named):
        if isinstance(value := named[name], list) and not is_blank(value):
            answers += value
        elif not name.endswith("s"):
            answers.append(value)
    return [as_text(answer) for answer in answers if not is_blank(answer)]


def mixed(right: str, wrong: Sequence[str], question: str) -> tuple[list[Choice], str | OneOf]:
    """Makes choices of texts, in an order that follows from a hash of each with the question, and
    the answer: the label and the text of the right one, or where this text is a label too, its
    label alone. Raises ``ValueError`` where the right text is a wrong one too."""
    if right in wrong:
        raise ValueError(f"expected different choices, got {shown(right)} as right and as wrong")
    texts = [right, *wrong]
    order = sorted(texts, key=lambda text: hashlib.sha256(f"{question}{text}".encode()).digest())
    choices = _lined([], order)
    label = choices[order.index(right)].label
    is_label = right.casefold() in {choice.label.casefold() for choice in choices}
    return choices, label if is_label else OneOf((label, right))


def with_choices(question: str, choices: Sequence[Choice]) -> str:
    """Puts the choices below a question, unless the question shows them."""
    present = [choice for choice in choices if choice.text]
    if all(re.search(rf"{c.label}\W{{1,4}}{re.escape(c.text)}", question) for c in present):
        return question
    return "\n".join([question, *(choice.line for choice in present)])
