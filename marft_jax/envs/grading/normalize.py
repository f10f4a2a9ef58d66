"""One spelling for the many ways to write the same answer, and plain numbers as fractions.

Nothing here decides more than spelling: two answers with the same normal form mean the same.
"""

from __future__ import annotations

import re
from fractions import Fraction

_SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "×": "\\times ", "·": "\\cdot ", "÷": "/", "π": "\\pi ",
    "∞": "\\infty ", "°": "^\\circ ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "±": "\\pm ",
    "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "，": ",", "（": "(", "）": ")", "：": ":",
    "；": ";", "％": "%", "、": ",", "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}",
    "²": "^2", "³": "^3", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "$": "",
}  # fmt: skip
_WRAPS = (("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"))
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|bigg?|Bigg?|displaystyle|limits|mathstrut)(?![A-Za-z])\s*\.?", ""),
        (r",?\\!\s*|\{,\}(?=\d{3})|(?<=\d)\\,(?=\d{3}(?!\d))", ","),  # 5,\!866, 5{,}866, 5\,866
        (r"^(-?\d{1,3}) (?=\d{3}(?: \d{3})*$)|(?<=\d{3}) (?=\d{3}(?: \d{3})*$)", r"\1"),  # 10 000
        (r",,", ","),
        (r"\\[,;:> ]|\\q?quad(?![A-Za-z])|~", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\sqrt\s*(\w|\\pi(?![A-Za-z]))", r"\\sqrt{\1}"),
        (r"\\frac\s*(\\[A-Za-z]+|\w)", r"\\frac{\1}"),
        (r"(\\frac\s*\{(?:[^{}]|\{[^{}]*\})*\})\s*(\\[A-Za-z]+|\w)", r"\1{\2}"),
        (r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
        (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"√\s*(\w+)", r"\\sqrt{\1}"),
        (r"\*\*", "^"),
        (r"\^\s*\{?\s*\\(?:circ|degree)(?![A-Za-z])\s*\}?|\\degree(?![A-Za-z])", " "),
        (r"\\(?:text|mbox|textrm|mathrm|textbf|mathbf|mathit|textit|operatorname)\s*\{([^{}]*)\}",
         r"\\text{\1}"),
        (r"\\text\{\s*(?:and|or|,)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", ","),
        (r"\\(?:leq|leqslant)(?![A-Za-z])|<=", r"\\le "),
        (r"\\(?:geq|geqslant)(?![A-Za-z])|>=", r"\\ge "),
        (r"\\neq(?![A-Za-z])|!=", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:lbrace|\{)", r"\\{"),
        (r"\\(?:rbrace|\})", r"\\}"),
        (r"\\mathbb\{?R\}?|ℝ", r"\\mathbb{R}"),
        (r"\\varnothing(?![A-Za-z])|∅|\\\{\s*\\\}", r"\\emptyset"),
        (r"\\([%#&])", r"\1"),
        (r",(?:\s*,)+", ","),
        (r"\s+", " "),
    )
]  # fmt: skip
_TEXT_AFTER_VALUE = re.compile(r"(?<=[\w})\]%])\s*\\text\{[^{}]*\}(?:\s*\^\s*\{?\d\}?)?$")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_REPEATING = re.compile(
    r"(?<![\d.,])(\d{1,20})\.(\d{0,20})\\(?:overline|bar|dot)\s*(?:\{(\d{1,20})\}|(\d))"
)
_WORDY = re.compile(r"[A-Za-z]{2}|[A-Za-z]\.|[^\x00-\x7f]|^[A-Z](?:, ?[A-Z])+$")
_METRES = re.compile(r"(?<=\d)\s*([kcdm]?m)([²³])")  # so typed it is a unit, not a variable
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_LETTER = re.compile(r"\W*(?:\\text\{)?\W*([A-J])(?:\W*\}?\W*)", re.A)
_LEADING_LETTER = re.compile(r"\W*(?:text\{)?\W*([A-J])[).:}、．]")

_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
_DECIMAL = re.compile(rf"{_NUMBER}")
_SCIENTIFIC = re.compile(
    rf"({_NUMBER})\s*(?:[eE]|(?:\\times|\\cdot|\*|x)\s*10\s*\^)\s*\{{?([-+]?\d{{1,3}})\}}?"
)
_FRACTION = re.compile(rf"(?:(\d+)\s*)?\\frac\{{\s*(-?{_NUMBER})\s*\}}\{{\s*({_NUMBER})\s*\}}")
_SLASHED = re.compile(rf"(?:(\d+) )?\(?({_NUMBER})\)?\s*/\s*\(?({_NUMBER})\)?")
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_SCALED = re.compile(rf"(.*[\d}}])\s*({'|'.join(_SCALES)})")
_UNIT = re.compile(r"(.*[\d}%.])(\s*)([A-Za-z][A-Za-z./ ]*(?:\^?\{?[23]\}?)?)", re.S)
_CURRENCY = re.compile(r"^([-+]?)\s*(?:[€£¥￥]|USD|US|RM|Rs\.?)\s*(?=[\d.])")
_UNITS = frozenset(
    "in ft yd mi cm mm km nm kg mg lb lbs oz ml mL kL L l hr hrs h s sec min am pm mph kph "
    "sq cu cc pts gal qt pt tsp tbsp g m K F C W V A J N Hz".split()
)
_PER = re.compile(r"\bper (?!cent\b|hundred\b|thousand\b)")  # per cent is not per hour
_NOT_UNITS = frozenset(
    "pi sqrt root sin cos tan cot sec csc arcsin arccos arctan log ln exp mod times plus minus "
    "over half halves third thirds quarter quarters infinity inf squared cubed and or to of x "
    "dozen hundred thousand million billion e i base choose factorial per cent".split()
)


def normalize(answer: str) -> str:
    """One spelling of an answer: LaTeX without decoration, digits without separators.

    >>> normalize("$\\\\dfrac12\\\\text{ cm}$.")
    '\\\\frac{1}{2}'
    >>> normalize("1,234,567"), normalize("1, 234")
    ('1234567', '1, 234')
    """
    text = answer.strip().rstrip("。")
    text = text[:-1] if text.endswith(".") else text
    for opening, closing in _WRAPS:
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening):
            text = text[len(opening) : -len(closing)]
    text = _METRES.sub(r"\\text{ \1}\2", text)
    text = text.replace("\\$", "").replace("\\\\", "\0")  # the row break of a matrix stays
    for symbol, replacement in _SYMBOLS.items():
        text = text.replace(symbol, replacement)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _REPEATING.sub(_as_fraction, text.replace("\0", "\\\\")).strip()
    text = _TEXT_AFTER_VALUE.sub("", text).strip()
    whole = re.fullmatch(r"\\text\{([^{}]*)\}", text)
    text = whole[1].strip() if whole else text
    return _GROUPED.sub(lambda match: match[0].replace(",", ""), text).rstrip(".,; ")


def _as_fraction(repeating: re.Match[str]) -> str:
    """``0.1\\overline{6}`` is 16 - 1 of 90."""
    whole, fixed, period, digit = repeating.groups()
    period = period or digit
    value = Fraction(int(whole + fixed + period) - int(whole + fixed), 10 ** len(fixed))
    value /= 10 ** len(period) - 1
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def squeeze(normal: str) -> str:
    """A normal form without the spaces that mean nothing (``2 3`` keeps its one)."""
    return re.sub(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])", "", normal)


def is_letter(reference: str) -> bool:
    """Whether the reference is a choice letter: ``B``, ``(B)``, ``\\text{(B)}``."""
    return len(reference) <= 40 and _LETTER.fullmatch(reference.strip()) is not None


def letter(answer: str) -> str | None:
    """The choice letter that an answer names: of ``(B)``, ``B.`` or ``B) 42``."""
    answer = answer.strip()[:40]
    match = _LETTER.fullmatch(answer) or _LEADING_LETTER.match(answer)
    return match[1] if match else None


def words(normal: str) -> str | None:
    """Bare lower-case words of an answer in words (``4:30 p.m.`` is ``4:30pm``), else None."""
    text = _TEXT.sub(r"\1", normal)
    if re.search(r"[\\^_{}=<>+*/]", text) or not _WORDY.search(text):
        return None
    return re.sub(r"[\s.\"'“”()-]+", "", text).casefold()


def number(normal: str) -> Fraction | None:
    """The value of a plain number in normal form, else None. A percentage is its hundredth.

    Understands integers, decimals, fractions, mixed numbers, powers of ten, ``3 million``,
    currencies in front and units in words behind.

    >>> number("12\\\\frac{3}{5}"), number("-0.50"), number("5 km"), number("3x")
    (Fraction(63, 5), Fraction(-1, 2), Fraction(5, 1), None)
    """
    text = normal.strip()
    if len(text) > 200:
        return None
    if text.startswith("(") and text.endswith(")") and text.count("(") == 1 and "," not in text:
        text = text[1:-1].strip()
    text = _CURRENCY.sub(r"\1", text)
    sign = -1 if text.startswith("-") else 1
    text = text[1:].strip() if text[:1] in ("-", "+") else text
    text = _CURRENCY.sub(r"\1", text)
    percent = re.fullmatch(r"(.*\S)\s*(?:%|per ?cent)", text, re.S)
    if percent:
        value = number(percent[1])
        return None if value is None or value < 0 else sign * value / 100
    if scaled := _SCALED.fullmatch(text):
        value = number(scaled[1])
        return None if value is None or value < 0 else sign * value * _SCALES[scaled[2]]
    value = _unsigned(text)
    if value is None and (unit := _UNIT.fullmatch(text)) and _is_unit(unit[3], unit[2]):
        value = _unsigned(unit[1].strip())
    return None if value is None else sign * value


def _unsigned(text: str) -> Fraction | None:
    if _DECIMAL.fullmatch(text):
        return Fraction(text)
    if match := _SCIENTIFIC.fullmatch(text):
        return Fraction(match[1]) * Fraction(10) ** int(match[2])
    if (match := _FRACTION.fullmatch(text)) or (match := _SLASHED.fullmatch(text)):
        if Fraction(match[3]) == 0 or (match[1] and match[2].startswith("-")):
            return None
        return Fraction(match[1] or 0) + Fraction(match[2]) / Fraction(match[3])
    return None


def _is_unit(text: str, space: str) -> bool:
    """Words that can stand behind a number without changing its value. A letter needs a space."""
    parts = re.findall(r"[A-Za-z]+", _PER.sub(" ", text))
    if len(parts) == 1 and len(parts[0]) == 1:
        return bool(space) and parts[0] in _UNITS and text.strip(". ") == parts[0]
    return all(
        part in _UNITS or (len(part) >= 3 and part.lower() not in _NOT_UNITS) for part in parts
    )
