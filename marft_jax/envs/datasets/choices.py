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
    found = structured(first(named, CHOICE_FIELDS))
    if found is None and first(named, ("label", *CHOSEN_FIELDS)) is not None:
        found = named["answers"] if isinstance(named.get("answers"), list) else None
    counted = [name for name in named if _COUNTED.fullmatch(name)]
    if found is None and len(counted) > 1:
        got = f"columns {', '.join(counted)}, which may count from 0 or 1"
        raise ValueError(f"expected a list `choices`, or columns A, B, ..., got {got}")
    if isinstance(found, str):
        found = [part.strip(" ,;\n") for part in _LISTED.split(found) if part.strip()]
        if not all(map(_CARRIED.fullmatch, found)):
            raise ValueError(f"expected a list of choices, got {shown(', '.join(found))}")
    if isinstance(found, list) and any(isinstance(item, Mapping) for item in found):
        pairs = [(None, None) if item is None else _labelled(item) for item in found]
        found = {"label": [label for label, _ in pairs], "text": [text for _, text in pairs]}
    elif isinstance(found, Mapping) and "text" not in found:
        labels = sorted(label for label in found if found[label] is not None)
        found = {"label": labels, "text": [found[label] for label in labels]}
    labels, texts = [], found
    if isinstance(found, Mapping):
        labels, texts = list(found.get("label") or ()), found["text"]
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


def _lined(labels: Sequence[Any], values: Sequence[Any]) -> list[Choice]:
    texts = ["" if is_blank(v) else v.strip() if isinstance(v, str) else as_text(v) for v in values]
    carried = [match for text in texts if (match := _CARRIED.fullmatch(text))]
    own, given = [match[1].upper() for match in carried], [x for x in labels if x is not None]
    if not given and own and own == [chr(65 + i) for i in range(len([*filter(None, texts)]))]:
        return [Choice(match[1].upper(), match[2], match[0]) for match in carried]
    if given and len(given) != len(texts):
        raise ValueError(f"expected a label for each choice, got {shown(labels)}")
    spelled = map(as_text, given) if given else (chr(65 + i) for i in range(len(texts)))
    letters = [text.upper() if re.fullmatch("[a-z]", text) else text for text in spelled]
    pairs = zip(letters, texts, strict=True)
    return [Choice(label, text, f"({label}) {text}", bool(given)) for label, text in pairs]


def chosen(value: Any, choices: Sequence[Choice]) -> str | OneOf:
    """Finds the choice that an answer means: by its label, its index from 0, or its text.

    A text that is a choice of a plain list is that choice, not an index.

    Raises:
        ValueError: the answer can mean several choices, or is the index or letter of none.
    """
    if isinstance(value, list):
        found = [chosen(item, choices) for item in value]
        several = ", ".join(answer if isinstance(answer, str) else answer[0] for answer in found)
        return found[0] if len(found) == 1 else several
    answer = as_text(value)
    carried = _CARRIED.fullmatch(answer)
    label, text = carried.groups() if carried else (answer.strip(" ().:"), answer)
    there = [choice for choice in choices if choice.text]
    named = [choice for choice in there if choice.label.casefold() == label.casefold()]
    told = [c for c in there if c.text.casefold() in (answer.casefold(), text.casefold())]
    is_text = told and isinstance(value, str) and not told[0].is_labelled
    is_index = re.fullmatch(r"[0-9]{1,9}", answer) and not named and not is_text
    counted = choices[int(answer) :][:1] if is_index else ()
    means = {*named, *told, *(choice for choice in counted if choice.text)}
    none = isinstance(value, bool) or re.fullmatch(r"-?[0-9]+|\W*[A-Za-z]\W*", answer)
    if len(means) > 1 or not means and none or len(told) > 1:
        labels = ", ".join(choice.label for choice in there)
        what = "it means several" if means else "it means none"
        raise ValueError(f"expected the label of a choice ({labels}), got {shown(value)}: {what}")
    for choice in means:
        both = dict.fromkeys((choice.label, choice.text))
        return OneOf(both) if told and len(both) > 1 else choice.label
    return answer


def wrong_answers(named: Row) -> list[str]:
    """Lists the wrong answers of a row that has them in columns of their own."""
    found = list[Any]()
    for name in filter(_WRONG.fullmatch, named):
        if isinstance(value := named[name], list) and not is_blank(value):
            found += value
        elif not name.endswith("s"):
            found.append(value)
    return [as_text(item) for item in found if not is_blank(item)]


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
    there = [choice for choice in choices if choice.text]
    if all(re.search(rf"{c.label}\W{{1,4}}{re.escape(c.text)}", question) for c in there):
        return question
    return "\n".join([question, *(choice.line for choice in there)])
