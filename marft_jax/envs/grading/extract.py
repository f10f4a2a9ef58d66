"""Finds the final answer in an agent's text.

Forms of an answer, in the order in which ``auto`` looks for them:

    tagged   what stands in the last <answer>...</answer>: a form below, or all of it
    boxed    the last \\boxed{...}, unless a later "final answer is" takes it back
    hashes   what follows the last ####
    letter   the last choice letter, where the reference is one: "so (B)"
    truth    where the reference is true or false: "Yes, because", "it is not true"
    number   where the reference is one: the number that directly follows the last "answer is", else
             the last number; with its unit
    phrase   what follows the last "answer is" or "answer:"; else the last formula; else the last
             line
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Literal

from marft_jax.envs.grading import units
from marft_jax.envs.grading.compare import is_letter, named_letter
from marft_jax.envs.grading.normalize import normalize, number
from marft_jax.envs.grading.truth import is_boolean, truth

AnswerForm = Literal["auto", "boxed", "hashes", "letter", "number", "phrase"]

LONGEST = 1000
"""Characters of an answer; a longer one is not an answer."""
_READ = 20_000  # characters at the end of a text in which the answer is looked for
# ``The answer is``, ``**Answer:**``, ``The answer to the question is``, ``答案是``
_PHRASE = re.compile(
    r"(?:\banswer[*_]*\s*(?:\b(?:to|of|for)\b[^.:\n]{1,60}?\b)?(?:is|are|must be|would be|:|=|：)"
    r"|答案\s*(?:是|为|：|:)|答[：:])[*_\s]*[：:]?",
    re.I,
)


def extract(text: str, reference: str, form: AnswerForm = "auto") -> str | None:
    """Finds the answer in a text, as it is written there, or returns None.

    Args:
        text: the agent's text; only its last 20,000 characters are read.
        reference: the right answer; it only decides which kind of answer to look for.
        form: the form of an answer that counts; ``auto`` takes the first form that is found.

    >>> extract("So we get \\\\boxed{\\\\frac{1}{2}}.", "0.5")
    '\\\\frac{1}{2}'
    >>> extract("16 - 3 - 4 = 9 eggs at $2 make $18 a day.", "18")
    '$18'
    >>> extract("it must be (B), not A-like", "B")
    'B'
    """
    text = text[-_READ:]
    readers = [_READERS[form]] if form != "auto" else []
    if form == "auto":
        kind = _letter if is_letter(reference) else _truth if is_boolean(reference) else _phrase
        kind = _number if number(normalize(reference)) is not None else kind
        tagged = functools.partial(_tagged, kind=kind)
        readers = [tagged, lambda text: kind(_last_word(text)), boxed_answer, _hashes, kind]
    for read in readers:
        answer = (read(text) or "").strip()
        if answer:
            return answer if len(answer) <= LONGEST else None
    return None


# ---- tagged: <answer>7</answer>

_TAG = re.compile(r"<(/?)(?:final[_ ]?)?answer\s*>", re.I)
# two words beside each other, so more than a value
_SENTENCE = re.compile(r"[^\W\d_]{2,}\s+[^\W\d_]{2,}")


def _tagged(text: str, kind: Callable[[str], str | None]) -> str | None:
    """Reads the last pair of tags, or else a last tag that is not closed."""
    start, inside = -1, ""
    for tag in _TAG.finditer(text):
        if not tag[1]:
            start = tag.end()
        elif start >= 0:
            inside, start = (text[start : tag.start()].strip() or inside), -1
    inside = inside or (text[start:].strip() if start >= 0 else "")
    if not re.search(r"\w", inside):
        return None
    is_value = kind is _number and not _SENTENCE.search(inside)
    read = None if is_value else kind(inside)
    return boxed_answer(inside) or _hashes(inside) or read or inside.strip("*` ")


# ---- boxed: \\boxed{7}, and a later "final answer is"

# a box, or a brace that opens or closes
_BRACE = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*\{?|\\[\\{}]|[{}]")
# between boxes of one answer: ``and``, a comma
_JOINT = re.compile(
    r"(?:[\s,;$&]|\\q?quad(?![a-z])|\\[,;: ()\[\]]|\\text\{[^{}]{0,40}\}|\b(?:and|or)\b){1,12}"
)
_FINAL = re.compile(r"\bfinal answer\s*(?:is|are|:|=)|最终答案\s*(?:是|为|：|:)", re.I)


def boxed_answer(text: str) -> str | None:
    """Returns the content of the last complete ``\\boxed{...}``, with matched braces.

    Boxes that only "and" or a comma separates belong to the same answer.

    >>> boxed_answer("\\\\boxed{1}, then \\\\boxed{\\\\frac{1}{2}} or \\\\boxed{3}")
    '\\\\frac{1}{2}, 3'
    """
    boxes = _grouped(text, _boxes(text))
    return boxes[-1] if boxes else None


def _grouped(text: str, parts: Sequence[tuple[int, int, str]]) -> list[str]:
    """Joins contents that only "and" or a comma separates; each has its start and end."""
    groups, last = list[list[str]](), 0
    for start, end, content in parts:
        if groups and _JOINT.fullmatch(text[last:start]):
            groups[-1].append(content)
        else:
            groups.append([content])
        last = end
    return [", ".join(dict.fromkeys(group)) for group in groups]


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Finds start, end and content of every complete box, sorted by start."""
    boxes = []
    open_braces: list[tuple[int, int, bool]] = []  # start, start of the content, whether a box
    for match in _BRACE.finditer(text):
        token = match[0]
        if token.startswith("\\"):
            if token.endswith("{") and len(token) > 2:
                open_braces.append((match.start(), match.end(), True))
        elif token == "{":
            open_braces.append((match.start(), match.end(), False))
        elif open_braces:
            start, inner, is_box = open_braces.pop()
            if is_box:
                boxes.append((start, match.end(), text[inner : match.start()]))
    return sorted(boxes)


def _last_word(text: str) -> str:
    """Cuts the text to a "final answer is" that is behind all boxes; else returns ""."""
    boxes, phrases = _boxes(text), list(_FINAL.finditer(text))
    if not boxes or not phrases or phrases[-1].start() < boxes[-1][1]:
        return ""
    tail = text[phrases[-1].start() :]
    return tail if _DIGIT.search(tail) or _CHOICE.search(tail) else ""


# ---- hashes: #### 7


def _hashes(text: str) -> str | None:
    _, hashes, tail = text.rpartition("####")
    return tail.strip().partition("\n")[0] if hashes else None


# ---- letter: so (B)

# ``I choose``, ``the correct option is``
_CHOSEN = re.compile(
    r"\b(?:(?:correct|right|best)\s+(?:option|choice|letter)\s+is|it\s+is|must\s+be|ans|choose|pick|select)\b[*_:\s]*",
    re.I,
)
# a capital by itself
_CHOICE = re.compile(r"(?<![A-Za-z\\])([A-J])(?![A-Za-z'’])")
# (b)
_BRACKETED_CHOICE = re.compile(r"(?<![\w)])[(（]\s*([A-Ja-j])\s*[)）]")
# ``option b``, ``**c**``, right behind a phrase; ``a`` and ``i`` only if they are no words
_DIRECT_CHOICE = re.compile(
    r"(?:[\s:*_`\"“'$({（]|\\text\w*|\b(?:the|option|choice|letter)\b)*"
    r"([A-J](?![A-Za-z'’])|[b-hj](?:(?=\*\*)|(?![\w'’*/+^-]))|[ai](?=\s*(?:[)）.,:;!?*_$}]|\n|\Z)(?!\w)))"
)


def _letter(text: str) -> str | None:
    for pattern, near in (_PHRASE, 40), (_CHOSEN, 0):
        if phrases := list(pattern.finditer(text)):
            end = phrases[-1].end()
            choice = _DIRECT_CHOICE.match(text, end) or _CHOICE.search(text, end, end + near)
            if choice:
                return choice[1].upper()
    last_line = text.strip().rpartition("\n")[2]
    letters = _BRACKETED_CHOICE.findall(text) or _CHOICE.findall(last_line)
    return letters[-1].upper() if letters else named_letter(text)


# ---- truth: Yes, because


def _truth(text: str) -> str | None:
    phrases = list(_PHRASE.finditer(text))
    told = truth(text[phrases[-1].end() :]) if phrases else None
    told = truth(text) if told is None else told
    return None if told is None else str(told)


# ---- number: the answer is 30 km, that is 6 more than 24

_DIGIT = re.compile(r"[\d¼-¾⅐-⅞]|(?<=⁄)[₀-₉]")
# words that say nothing, and the name of what is given: ``therefore x =``
_LEAD = re.compile(
    r"(?:[\s:*_`\"“'$]|\\[(\[$]|"
    r"(?:about|just|therefore|thus|hence|then|now|indeed|equal to|[a-z]+ly)"
    r"\b)*(?:[A-Za-z]\w*(?:\([^()]{0,20}\))?\s*=\s*)?[$\s]*",
    re.I,
)
# braces in braces, to three levels
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*+\})*+\}"
# brackets that hold no word
_CALL = r"\((?![^()]*[A-Za-z]{3})(?:[^()\n]|\([^()]*\))*+\)"
# characters of an expression: groups, digits in groups, anything but punctuation
_PIECE = (
    rf"(?:\\(?:sqrt|[dtc]?frac\s*(?:\w|{_GROUP}))\s*(?=[\w{{])|{_GROUP}|{_CALL}"
    r"|(?<=\d),(?:\s*\\!\s*)?(?=\d)|(?<=\d) (?=\d{3}(?![\w/]))"
    r"|(?!\\(?:[\])]|(?:times|cdot|div|pm|end)(?![A-Za-z])))[^\s,;(){}—。，；！？\u4e00-\u9fff])++"
)
# how an expression begins
_FIRST = r"(?=[-+−–$\\(√∛∜⌊⌈]*(?:[\d¼-¾⅐-⅞]|\.\d|\\[a-z]|[a-z]\())"
_SIGN = r"(?:[-+*/^=×·⋅÷−–:]|\\(?:times|cdot|div|pm)(?![A-Za-z]))\s*"
# what continues it: a sign, a command, the fraction of a mixed number
_NEXT = rf"{_SIGN}{_FIRST}|(?=\\[a-z])|(?:\band\s+)?(?=\d+[/⁄]\d|\\frac|[¼-¾⅐-⅞])"
# an expression
_DIRECT = re.compile(rf"(?:[-−]\s)?{_FIRST}{_PIECE}(?:\s*(?:\$\s*)?(?:{_NEXT}){_PIECE})*+")
# further numbers of a list, which ends the sentence
_LISTED = re.compile(
    r"(?:\s*(?:,|;|\band\b|\bor\b){1,2}\s*[-−]?\d[\d.,]*(?<![.,]))+(?=\s*(?:[.;:!?)*$]|\Z))"
)
# ``5 more than 3``: the number is not the answer
_ARITHMETIC = re.compile(
    r"\s*(?:(?<=%)\s*of|percent\s+of|times|plus|minus|more|less|fewer|divided|multiplied)\b", re.I
)
_SCALE = re.compile(r"\s*(?:\\?%|percent\b|hundred\b|thousand\b|million\b|billion\b|dozen\b)")
# a word that may be a part of a unit
_UNIT = re.compile(r"\s*(?:\\text\{[^{}]{1,30}\}|[^\s,;:!?。，；！？\u4e00-\u9fff]{1,20})")


def _number(text: str) -> str | None:
    """Finds the number that directly follows the last "answer is", else the last number."""
    phrases = list(_PHRASE.finditer(text))
    direct = _direct(text[phrases[-1].end() :][:400]) if phrases else None
    return direct or _last_number(text)


def _direct(text: str) -> str | None:
    """Reads the expression at the beginning of a text, without the explanation behind it.

    >>> _direct(" 30, that is 6 more than 24."), _direct(" 6 + 2 = 8"), _direct(" 5 more than 3")
    ('30', '6 + 2 = 8', None)
    """
    lead = _LEAD.match(text)
    start = lead.end() if lead else 0
    direct = _DIRECT.match(text, start)
    if not direct or not _DIGIT.search(direct[0]) or _ARITHMETIC.match(text, direct.end()):
        return None
    end = direct.end()
    for more in (_LISTED, _SCALE):
        end = after.end() if (after := more.match(text, end)) else end
    return _measured(text[start:end], text, end)


def _measured(run: str, text: str, start: int) -> str:
    """Adds to a number the unit that directly follows it, of at most four words."""
    number = _trimmed(run)
    ends = [start]
    while run.endswith(number) and len(ends) < 5 and (word := _UNIT.match(text, ends[-1])):
        ends.append(word.end())
    for end in reversed(ends):
        words = text[start:end].rstrip(".*_`$\"'”’)\\")
        if units.read(words) and words.split() != ["in"]:
            return number + words
    return number


def _trimmed(run: str) -> str:
    """Drops decoration and punctuation around a run of characters."""
    run = run.strip("*_`\"'“”‘’ ").rstrip(".,;:!?。，；！？*_`\"'”’$")
    return run.strip("()") if run.count("(") != run.count(")") else run


def _last_number(text: str) -> str | None:
    """Reads the last expression with a digit; of an equation, its right side."""
    digits = [match.start() for match in _DIGIT.finditer(text)]
    if not digits:
        return None
    text = text[max(digits[-1] - 300, 0) :]  # a longer expression is no answer
    expressions = [match for match in _DIRECT.finditer(text) if _DIGIT.search(match[0])]
    if not expressions:
        return None
    start, end = expressions[-1].span()
    end = scale.end() if (scale := _SCALE.match(text, end)) else end
    return _measured(text[start:end].rpartition("=")[2], text, end)


# ---- phrase: the answer is x+1

_FORMULA = re.compile(
    r"\$\$(.{1,600}?)\$\$|\$(.{1,600}?)(?<!\\)\$|\\\((.{1,600}?)\\\)|\\\[(.{1,600}?)\\\]", re.S
)
# ``, because``: the answer ends before it
_EXPLAINED = re.compile(
    r"[,;]?\s*\(?\b(?:since|because|as|that is|which|so that)\s|"
    r"[,;]?\s*\(?\bi\.e\.|\s\((?=[a-z]{3})"
)
_SENTENCE_END = re.compile(r"(?<!\.\.)\.(?=\s|$)|[。\n]")


def _phrase(text: str) -> str | None:
    phrases = list(_PHRASE.finditer(text))
    if not phrases:
        formulas = _formulas(text)
        last = text.strip().rpartition("\n")[2].strip("*_` ")
        return formulas[-1][2] if formulas else last.rstrip(".。")
    rest = text[phrases[-1].end() :].strip()
    sentence = _SENTENCE_END.split(rest, maxsplit=1)[0].strip()
    sentence = _EXPLAINED.split(sentence, maxsplit=1)[0] or sentence
    formulas = [formula for formula in _formulas(rest) if formula[0] <= len(sentence)]
    return _grouped(rest, formulas)[0] if formulas else sentence.strip("*_` ")


def _formulas(text: str) -> list[tuple[int, int, str]]:
    """Finds start, end and content of every formula."""
    matches = _FORMULA.finditer(text)
    return [(match.start(), match.end(), match[match.lastindex or 0]) for match in matches]


_READERS: dict[AnswerForm, Callable[[str], str | None]] = {
    "boxed": boxed_answer,
    "hashes": _hashes,
    "letter": _letter,
    "number": _number,
    "phrase": _phrase,
}
