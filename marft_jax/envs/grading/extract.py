"""Finds the final answer in an agent's text.

Forms of an answer, in the order in which ``auto`` looks for them:

    boxed    the last \\boxed{...}, unless a later "final answer is" takes it back
    hashes   what follows the last ####
    letter   the last choice letter, where the reference is one: "so (B)"
    number   where the reference is one: the number that directly follows the last "answer is", else
             the last number
    phrase   what follows the last "answer is" or "answer:"; else the last formula; else the last
             line
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Literal

from marft_jax.envs.grading.compare import is_letter
from marft_jax.envs.grading.normalize import normalize, number

How = Literal["auto", "boxed", "hashes", "letter", "number", "phrase"]

LONGEST = 1000
"""Characters of an answer; a longer one is not an answer."""
_READ = 20_000  # characters at the end of a text in which the answer is looked for

_BRACE = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*\{?|\\[\\{}]|[{}]")
_JOINT = re.compile(
    r"(?:[\s,;$&]|\\q?quad(?![a-z])|\\[,;: ()\[\]]|\\text\{[^{}]{0,40}\}|\b(?:and|or)\b){1,12}"
)
_PHRASE = re.compile(
    r"(?:\banswer[*_]*\s*(?:\b(?:to|of|for)\b[^.:\n]{1,60}?\b)?(?:is|are|must be|would be|:|=|：)"
    r"|答案\s*(?:是|为|：|:)|答[：:])[*_\s]*:?",
    re.I,
)
_FINAL = re.compile(r"\bfinal answer\s*(?:is|are|:|=)|最终答案\s*(?:是|为|：|:)", re.I)
_FORMULA = re.compile(
    r"\$\$(.{1,600}?)\$\$|\$(.{1,600}?)(?<!\\)\$|\\\((.{1,600}?)\\\)|\\\[(.{1,600}?)\\\]", re.S
)
_DIGIT = re.compile(r"[\d¼-¾⅐-⅞]|(?<=⁄)[₀-₉]")
_PART = re.compile(r"\d+[/⁄]\d|[¼-¾⅐-⅞]|\\[dtc]?frac")
_LEAD = re.compile(  # words that say nothing, and the name of what is given
    r"(?:[\s:*_`\"“'$]|\\[(\[$]|"
    r"(?:about|just|therefore|thus|hence|then|now|indeed|equal to|[a-z]+ly)"
    r"\b)*(?:[A-Za-z]\w*(?:\([^()]{0,20}\))?\s*=\s*)?[$\s]*",
    re.I,
)
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*+\})*+\}"
_CALL = r"\((?![^()]*[A-Za-z]{3})(?:[^()\n]|\([^()]*\))*+\)"
_PIECE = (
    rf"(?:\\[dtc]?frac\s*(?:\w|{_GROUP})\s*(?=[\w{{])|{_GROUP}|{_CALL}|(?<=\d),(?:\s*\\!\s*)?(?=\d)"
    r"|[^\s,;(){}—。，；！？\u4e00-\u9fff])++"
)
_FIRST = r"(?=[-+−–$\\(√∛∜⌊⌈]*(?:[\d¼-¾⅐-⅞]|\.\d|\\[a-z]|[a-z]\())"
_SIGN = r"(?:[-+*/^=×·⋅÷−–:]|\\(?:times|cdot|div|pm)(?![A-Za-z]))\s*"
_NEXT = rf"{_SIGN}{_FIRST}|(?=\\[a-z])|(?:\band\s+)?(?=\d+[/⁄]\d|\\frac|[¼-¾⅐-⅞])"
_DIRECT = re.compile(rf"(?:[-−]\s)?{_FIRST}{_PIECE}(?:\s*(?:\$\s*)?(?:{_NEXT}){_PIECE})*+")
_LISTED = re.compile(
    r"(?:\s*(?:,|;|\band\b|\bor\b){1,2}\s*[-−]?\d[\d.,]*(?<![.,]))+(?=\s*(?:[.;:!?)*$]|\Z))"
)
_ARITHMETIC = re.compile(
    r"\s*(?:(?<=%)\s*of|percent\s+of|times|plus|minus|more|less|fewer|divided|multiplied)\b", re.I
)
_EXPLAINED = re.compile(
    r"[,;]?\s*\(?\b(?:since|because|as|that is|which|so that)\s|"
    r"[,;]?\s*\(?\bi\.e\.|\s\((?=[a-z]{3})"
)
_RUN = re.compile(r"[^\s。，；！？\u4e00-\u9fff]+")
_OPERANDS = re.compile(
    r"(?<![A-Za-z0-9.])[0-9(][0-9.()]*(?:\s+[-+*/^]\s+[0-9.()]+)*\s+[-+*/^]\s+$|-?\d+\s(?:and\s)?$(?=\Z)"
)
_BOUND_BEFORE = re.compile(
    r"[{^_√∛∜]\s*$|\\(?:sqrt|[dt]?frac|log|ln|sin|cos|tan|times|cdot|div|pm)\s*$"
)
_BOUND_AFTER = re.compile(
    r"\s*(?:\\pi|π|pi\b|\\sqrt|√|sqrt\b|\\[dt]?frac|\\times|\\cdot|[*/^]\s*[\w(])"
)
_SCALE = re.compile(r"\s*(?:\\?%|percent\b|hundred\b|thousand\b|million\b|billion\b|dozen\b)")
_CHOICE = re.compile(r"(?<![A-Za-z\\])([A-J])(?![A-Za-z'’])")
_BRACKETED_CHOICE = re.compile(r"(?<![\w)])[(（]\s*([A-Ja-j])\s*[)）]")
_DIRECT_CHOICE = re.compile(
    r"(?:[\s:*_`\"“'$({（]|\\text\w*|\b(?:the|option|choice|letter)\b)*"
    r"([A-J](?![A-Za-z'’])|[b-hj](?![\w'’*/+^-])|[ai](?=\s*(?:[)）.,:;!?*_$}]|\n|\Z)(?!\w)))"
)
_SENTENCE_END = re.compile(r"(?<!\.\.)\.(?=\s|$)|[。\n]")


def extract(text: str, reference: str, how: How = "auto") -> str | None:
    """Finds the answer in a text, as it is written there, or returns None.

    Args:
        text: the agent's text; only its last 20,000 characters are read.
        reference: the right answer; it only decides which kind of answer to look for.
        how: the form of an answer that counts; ``auto`` takes the first form that is found.

    >>> extract("So we get \\\\boxed{\\\\frac{1}{2}}.", "0.5")
    '\\\\frac{1}{2}'
    >>> extract("16 - 3 - 4 = 9 eggs at $2 make $18 a day.", "18")
    '$18'
    >>> extract("it must be (B), not A-like", "B")
    'B'
    """
    text = text[-_READ:]
    readers = [_READERS[how]] if how != "auto" else []
    if how == "auto":
        kind = _letter if is_letter(reference) else _phrase
        kind = _number if number(normalize(reference)) is not None else kind
        readers = [lambda text: kind(_last_word(text)), boxed_answer, _hashes, kind]
    for read in readers:
        answer = (read(text) or "").strip()
        if answer:
            return answer if len(answer) <= LONGEST else None
    return None


def boxed_answer(text: str) -> str | None:
    """Returns the content of the last complete ``\\boxed{...}``, with matched braces.

    Boxes that only "and" or a comma separates belong to the same answer.

    >>> boxed_answer("\\\\boxed{1}, then \\\\boxed{\\\\frac{1}{2}} or \\\\boxed{3}")
    '\\\\frac{1}{2}, 3'
    """
    boxes = _boxes(text)
    if not boxes:
        return None
    first = len(boxes) - 1
    while first > 0 and _JOINT.fullmatch(text[boxes[first - 1][1] : boxes[first][0]]):
        first -= 1
    return ", ".join(dict.fromkeys(content for _, _, content in boxes[first:]))


def _last_word(text: str) -> str:
    """Cuts the text to a "final answer is" that is behind all boxes; else returns ""."""
    boxes, phrases = _boxes(text), list(_FINAL.finditer(text))
    if not boxes or not phrases or phrases[-1].start() < boxes[-1][1]:
        return ""
    tail = text[phrases[-1].start() :]
    return tail if _DIGIT.search(tail) or _CHOICE.search(tail) else ""


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


def _hashes(text: str) -> str | None:
    _, found, tail = text.rpartition("####")
    return tail.strip().partition("\n")[0] if found else None


def _letter(text: str) -> str | None:
    phrase = list(_PHRASE.finditer(text))
    if phrase:
        end = phrase[-1].end()
        found = _DIRECT_CHOICE.match(text, end) or _CHOICE.search(text, end, end + 40)
        if found:
            return found[1].upper()
    last_line = text.strip().rpartition("\n")[2]
    letters = _BRACKETED_CHOICE.findall(text) or _CHOICE.findall(last_line)
    return letters[-1].upper() if letters else None


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
    for formula in _FORMULA.finditer(text):
        content = formula[formula.lastindex or 0]
        if formula.start() <= start < formula.end() and _looks_like_formula(content):
            return content if _DIGIT.search(content) else None
    found = _DIRECT.match(text, start)
    if not found or not _DIGIT.search(found[0]) or _ARITHMETIC.match(text, found.end()):
        return None
    end = found.end()
    for more in (_LISTED, _SCALE):
        end = after.end() if (after := more.match(text, end)) else end
    return _trimmed(text[start:end])


def _trimmed(run: str) -> str:
    """Drops decoration and punctuation around a run of characters."""
    run = run.strip("*_`\"'“”‘’ ").rstrip(".,;:!?。，；！？*_`\"'”’")
    return run.strip("()") if run.count("(") != run.count(")") else run


def _last_number(text: str) -> str | None:
    """Finds the expression around the last digit: a whole formula, or a run without spaces."""
    digits = list(_DIGIT.finditer(text))
    if not digits:
        return None
    at = digits[-1].start()
    for match in _FORMULA.finditer(text):
        if match.start() <= at < match.end() and _looks_like_formula(match[match.lastindex or 0]):
            return match[match.lastindex or 0]
    start = max(text.rfind(space, 0, at) for space in " \n\t") + 1
    end = at + len(_RUN.match(text, at).group())  # type: ignore[union-attr]
    before, after = text[max(start - 80, 0) : start], text[end : end + 20]
    if _BOUND_BEFORE.search(before) or _BOUND_AFTER.match(after):
        return None  # part of a larger expression, such as 3 \pi: its number alone means nothing
    operands = _OPERANDS.search(before)
    if operands and (operands[0][-4:] != "and " or _PART.match(text, start)):
        start -= len(before) - operands.start()  # 12 3/5, 3 + 4
    if scale := _SCALE.match(after):
        end += scale.end()
    return _trimmed(text[start:end])


def _looks_like_formula(content: str) -> bool:
    """False for text between two prices, such as ``$5 and I have $6``."""
    return not re.search(
        r"\b[A-Za-z]{3,}\s+[A-Za-z]{2,}\b", re.sub(r"\\[a-z]+\{[^}]*\}", "", content)
    )


def _phrase(text: str) -> str | None:
    phrases = list(_PHRASE.finditer(text))
    if not phrases:
        formulas = _formulas(text)
        last = text.strip().rpartition("\n")[2].strip("*_` ")
        return formulas[-1] if formulas else last.rstrip(".。")
    rest = text[phrases[-1].end() :].strip()
    sentence = _SENTENCE_END.split(rest, maxsplit=1)[0].strip()
    sentence = _EXPLAINED.split(sentence, maxsplit=1)[0] or sentence
    formulas = _formulas(sentence) or _formulas(rest)
    if formulas and rest.find("$") <= len(sentence):
        return ", ".join(_together(sentence, formulas))
    return sentence.strip("*_` ")


def _together(sentence: str, formulas: list[str]) -> list[str]:
    """Keeps the formulas that form one list, if the sentence begins with the first formula."""
    found = list(_FORMULA.finditer(sentence))
    if found and found[0].start() == 0:
        for number, (one, other) in enumerate(itertools.pairwise(found), 1):
            if not _JOINT.fullmatch(sentence[one.end() : other.start()]):
                return formulas[:number]
    return formulas


def _formulas(text: str) -> list[str]:
    return [match[match.lastindex or 0] for match in _FORMULA.finditer(text)]


_READERS: dict[How, Callable[[str], str | None]] = {
    "boxed": boxed_answer,
    "hashes": _hashes,
    "letter": _letter,
    "number": _number,
    "phrase": _phrase,
}
