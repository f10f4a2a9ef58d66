"""Rewrites answers in one spelling, and reads units and plain numbers.

Answers that get the same value and unit here mean the same. LaTeX that math-verify reads in every
spelling stays unchanged, unless it is a plain number.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from fractions import Fraction

from marft_jax.envs.grading import units

_SYMBOLS = str.maketrans({
    "−": "-", "–": "-", "—": "-", "‒": "-", "‑": "-", "‐": "-", "×": "\\times ", "⋅": "\\cdot ",
    "∙": "\\cdot ", "·": "\\cdot ", "÷": "/", "⁄": "/", "∕": "/", "∶": ":", "π": "\\pi ",
    "∞": "\\infty ", "°": "^\\circ ", "≤": "\\le ", "⩽": "\\le ", "≦": "\\le ",
    "≥": "\\ge ", "⩾": "\\ge ", "≧": "\\ge ", "≠": "\\ne ", "±": "\\pm ", "∪": "\\cup ",
    "≡": "\\equiv ", "∩": "\\cap ", "∈": "\\in ", "∨": "\\lor ", "∅": "\\emptyset ", "、": ",",
    "⌊": "\\lfloor ", "⌋": "\\rfloor ", "⌈": "\\lceil ", "⌉": "\\rceil ", "∛": "√[3]",
    "∜": "√[4]", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ",
})  # fmt: skip
_RAISED = re.compile(r"([⁰¹²³⁴-⁹]+)[⁄/]([₀-₉]+)|([⁰¹²³⁴-⁹⁺⁻⁼⁽⁾ⁿⁱ]+)|([₀-₎ₐ-ₜ]+)|([¼-¾⅐-⅞])")
_CONTROL = re.compile(r"[\f\x08](?=[a-z])|\t(?=ext|imes|heta|frac)")
_SINGLE = re.compile(r"(?<!\\)(?:\\\\)*\\(?!\\)")
_DOUBLED = re.compile(r"(\\+)\1(?=[A-Za-z%$#&{}()\[\]|,;:!])|(\\\\)\2")
_FUNCTION = "(ln|log|exp|max|min|(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?)"
_FORMATS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:(?:text|math)(?:rm|it|up|normal)?|operatorname)"
         r"(?:\{([ei]|d(?=\}\s*[A-Za-z]))\}|\s+([ei])(?![A-Za-z]))", r"\1\2"),
        (rf"\\(?:text|mathrm|operatorname)\*?\s*\{{\s*{_FUNCTION}\s*\}}(?=\s*[\w(^\\])", r"\\\1 "),
        (r"\\(?:SI|qty)\{([^{}]*)\}\{([^{}]*)\}", r"\1\\text{ \2}"),
        (r"\\(?:left|right|displaystyle|[lL]arge|therefore|square|blacksquare|[bB]igg?[lrm]?)"
         r"(?![A-Za-z])\s*|(?<!\\)\\\s*$", ""),
        (r"\\(?:text)?color\s*(?:\[\w*\])?\{[^{}]*\}|\\(?:rm|bf|it|sf|tt|sl)(?![A-Za-z])\s*", ""),
        (r"\\(?:[mf]box|(?:text|math)(?:rm|bf|it|sf|tt|sl|up|normal)|operatorname|emph|underline|"
         r"boldsymbol|bm|bold)\s*\{((?:\^\{[^{}]*\}|[^{}])*+)\}", r"\\text{\1}"),
    )
]  # fmt: skip
_METRES = re.compile(r"(?<=\d)\s*([kcdm]?m)(?=[²³])")  # so typed it is a unit, not a variable
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^(?:\\[(\[]|\*\*|[`\"“])(.+)(?:\\[)\]]|\*\*|[`\"”])$", r"\1"),
        (r"^(-?)\s*\\?\$\s*(-?[\d.,\\!]+)$", r"\1\2\\text{ dollars}"),
        (r"\\?\$", ""),
        (r"^\s*=\s*|^\\text\{\s*(?:[Tt]he )?(?:[Ff]inal )?[Aa]nswer(?: is)?\s*:?\s*\}\s*:?", ""),
        (r"^(?:\\(?:math|text)(?:bf|rm|it|sf)?)?\{\s*((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*+\})*+)\}"
         r"[\s.,;]*$", r"\1"),
        (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"(?<=[)\]])\s*(?:U|\\bigcup)\s*(?=[(\[])", r"\\cup "),
        (r"\s*(?:\\[!,;> ]\s*)*(?::|\\colon(?![A-Za-z]))\s*(?:\\[!,;> ]\s*)*", ":"),
        (r",?\\!\s*|\{,\}(?=\d{3})|(?<=\d)\\,(?=\d{3}(?!\d))", ","),  # 5,\!866, 5{,}866, 5\,866
        (r"^(-?\d{1,3}) (?=\d{3}(?: \d{3})*$)|(?<=\d{3}) (?=\d{3}(?: \d{3})*$)", r"\1"),  # 10 000
        (r"\\[,;:> ]|\\q?quad(?![A-Za-z])|~", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\frac\s*(\\[A-Za-z]+|\w)", r"\\frac{\1}"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\\[A-Za-z]+|\w)", r"\1{\2}"),
        (r"(?<![\\A-Za-z])sqrt\s*(\d+)", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])(sqrt|pi|theta)(?![A-Za-z])", r"\\\1 "),
        (r"(?:(?<![\\A-Za-z])|(?<=(?<![\\A-Za-z])[xyzt]))"
         rf"{_FUNCTION}"
         r"(?=\s*\(|(?<!max)(?<!min)\s*(?:[\d|^_\\{]|[A-Za-z](?![A-Za-z])))", r"\\\1 "),
        (r"(?:√|\\sqrt)(\[\d\])?\s*\(((?:[^()]|\([^()]*\))*+)\)|√(\[\d\])?\s*(\w+|\\pi(?![A-Za-z]))|\\sqrt\s*(\w)",
         r"\\sqrt\1\3{\2\4\5}"),
        (r"\*\*", "^"),
        (r"\\frac" + r"\{\s*(\\text\{[^{}]*\}(?:\^\{?\d\}?)?)\s*\}" * 2, r"\1/\2"),  # m/s
        (r"\^\s*\(((?:[^()]|\([^()]*\))*+)\)", r"^{\1}"),
        (r"\^\s*([-+])\s*(\d+|[A-Za-z]|\\[A-Za-z]+)", r"^{\1\2}"),  # 10^-6
        (r"\^\s*\{\s*\\(?:circ|degree)\s*\}|(?:\^\s*\\circ|\^?\s*\\degree)(?![A-Za-z])", "°"),
        (r"(\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])\s*(?:\^\s*\{?\d\}?)?[\s({]*)(\d[\d.]*)\s*°",
         r"\1\\frac{\2\\pi}{180}"),
        (r"(?:\\text\{\s*)?°\s*(?:\\text\{\s*)?([CF])(?:elsius|ahrenheit)?(?![A-Za-z])\s*\}?",
         r"\\text{ deg \1}"),
        (r"°\s*$", r"\\text{ degrees}"),
        (r"°", " "),
        (r"(?<![\\A-Za-z])D\.?N\.?E(?![A-Za-z])", "does not exist"),
        (r"\\text\{\s*(?:and|or|,)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\lor(?![A-Za-z])",
         ","),
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset"),
        (r"\\([%#&])", r"\1"),
        (r"\\[lcd]?dots[bcmio]?(?![A-Za-z])|\.{3}", r"\\dots "),
        (r",(?:\s*,)+", ","),
        (r"\(\s*\\?(?:mod|text\{\s*mod\s*\})\s*(\d+)\s*\)|\\pmod\s*(\d)", r"\\pmod{\1\2}"),
        (r"^\\\{\s*[A-Za-z]\s*(?:\\in[^:|<>]*)?(?::|\||\\mid(?![A-Za-z]))"
         r"(?=.*(?:[<>]|\\[lg]e))([^{}]*)\\\}$", r"\1"),  # {x : x > 2}
        (r"^\s*(?:[A-Za-z]|\\[a-z]+)\s*(?:\\(?:in|equiv)(?![A-Za-z])|=\s*(?=\d+_))\s*", ""),
        (r"(?i)^(?:\\text\{)?\s*(?:the )?(?:set of )?all real numbers\s*\}?$", r"\\mathbb{R}"),
        (r"(?i)^(?:\\text\{)?\s*(?:there (?:is|are) )?no (?:real )?solutions?\s*\}?$",
         r"\\emptyset"),
        (r"\s+", " "),
    )
]  # fmt: skip
_REPEATING = re.compile(
    r"(?<![\d.,])(\d{1,20})\.(\d{0,20})\\(?:overline|bar|dot)\s*(?:\{(\d{1,20})\}|(\d))"
)
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")

_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
_DECIMAL = re.compile(rf"{_NUMBER}")
_SCIENTIFIC = re.compile(
    rf"({_NUMBER})\s*(?:[eE]|(?:\\times|\\cdot|\*|x)\s*10\s*\^)\s*\{{?([-+]?\d{{1,3}})\}}?"
)
_FRACTION = re.compile(
    rf"(?:(\d+)\s*)?\\d?frac\{{\s*(-?{_NUMBER})\s*\}}\{{\s*({_NUMBER})\s*\}}"
    rf"|(?:(\d+) )?\(?({_NUMBER})\)?\s*/\s*\(?({_NUMBER})\)?"
)
_SCALES = {
    "%": Fraction(1, 100), "percent": Fraction(1, 100), "per cent": Fraction(1, 100),
    "dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9,
    "百": 100, "千": 1000, "万": 10**4, "亿": 10**8,
}  # fmt: skip
_SCALED = re.compile(rf"(.*[\d.}}])\s*({'|'.join(_SCALES)})")
_CURRENCY = re.compile(r"^([-+]?)\s*(?:[€£¥￥]|USD|US|RM|Rs\.?)\s*(?=[\d.])")

_TAIL = re.compile(
    r"(?:\\text\{(?:\^\{[^{}]*\}|[^{}])*+\}|\\(?:Omega|mu|cdot)(?![A-Za-z])|\^\s*\{?\s*-?\d\s*\}?"
    r"|(?<=[A-Za-z])-?\d(?![\d.])|[^\W\d_]|[\s/*.()¢°-])++\Z"
)
_START = re.compile(r"\\text|\\Omega|\\mu|¢|°|(?<![^\W\d_\\])[^\W\d_]|[\u4e00-\u9fff]")
_MARKED = re.compile(r"\\|[^\x00-\x7f]")  # no variable begins so
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?!\s*=)")
_COMMA = re.compile(r",(?![^{(\[]*[})\]])")  # outside of brackets
_TEXT = re.compile(r"(.*[\w})\]%])\s*\\text\{([^{}]*)\}")
_PLAIN = re.compile(r"(.*(?:[\d}%]|\\pi))(\s*)([^\W\d_](?:[^\W\d_]|[./ ])*)")
_NO_UNITS = frozenset(
    "sqrt root sin cos tan cot sec csc arcsin arccos arctan log exp mod times plus minus over half "
    "halves third thirds quarter quarters fifth fifths sixth sixths eighth eighths tenth tenths "
    "infinity squared cubed dozen hundred thousand million billion base choose factorial percent "
    "cent".split()
)
_COUNTS = re.compile("[万亿百千]")
_FILLERS = frozenset("a an the of per each every".split())
_PLURAL = re.compile(r"(?<=[xzh])es$|(?<=ss)es$|(?<!s)s$")


@functools.lru_cache(maxsize=1024)
def split(answer: str, is_measured: bool = False) -> tuple[str, str]:
    """Splits an answer into its value in one spelling, and the unit or other words behind it.

    Args:
        answer: the answer.
        is_measured: a single letter directly behind a number is a unit, not a variable.

    >>> split("$\\\\dfrac12\\\\text{ square inches}$."), split("16 eggs"), split("3x")
    (('\\\\frac{1}{2}', 'in^2'), ('16', 'egg'), ('3x', ''))
    """
    text = _spelled(answer)
    if len(parts := _COMMA.split(text)) > 1:
        values, names = zip(*(split(part, is_measured) for part in parts), strict=True)
        if len(named := set(names) - {""}) == 1:
            return ", ".join(values), named.pop()
    tail = _TAIL.search(text, max(len(text) - 60, 0))
    for start in _START.finditer(text, tail.start()) if tail else ():
        before, words = text[: start.start()], text[start.start() :]
        if _may_have_unit(before, words, is_measured) and (unit := units.read(words)):
            return before.strip(), unit.name
    if match := _TEXT.fullmatch(text):
        value, words = match.groups()
        if _NO_UNITS.isdisjoint(words.lower().split()):
            return value.strip(), _words(words)
        text = f"{value} {words.strip()}"
    if match := _PLAIN.fullmatch(text):
        value, space, words = match.groups()
        parts = re.split(r"[./ ]+", words.strip(" ."))
        if (space or not words.isascii()) and all(map(_is_word, parts)):
            return value.strip(), _words(words)
    return text, ""


def _may_have_unit(before: str, words: str, is_measured: bool) -> bool:
    """Tells if words behind a value can be its unit: in ``3m`` and ``x m``, m is a variable."""
    value = before.rstrip()
    if _MARKED.match(words):
        return re.search(r"[\w})\]%]$", value) is not None
    if not re.search(r"(?:[\d})\]%]|\\pi)$", value):
        return False
    if len(words.rstrip()) > 1 and words[1].isalpha():
        return True
    if value == before and not is_measured:
        return "/" in words or "\\cdot" in words
    return number(value) is not None or not _LETTER.search(value)


def normalize(answer: str) -> str:
    """Rewrites an answer in LaTeX, without decoration, unit and separators of digits.

    >>> normalize("1,234,567 m"), normalize("1, 234")
    ('1234567', '1, 234')
    """
    return split(answer)[0]


def _spelled(answer: str) -> str:
    text = _METRES.sub(r"\\text{ \1}", _unescaped(answer).strip())
    text = without_format(plain(text).replace("\\\\", "\0"))  # a row break of a matrix is \0
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _REPEATING.sub(_as_fraction, text.replace("\0", "\\\\"))
    return _GROUPED.sub(lambda match: match[0].replace(",", ""), text.strip()).rstrip(".,; ")


def plain(text: str) -> str:
    """Rewrites Unicode characters in LaTeX and ASCII.

    >>> plain("3⅔ x⁻¹² ⩽ ５")
    '3\\\\frac{2}{3} x^{-12} \\\\le  5'
    """
    text = _RAISED.sub(_lowered, text.replace("º", "°"))
    return unicodedata.normalize("NFKC", text).translate(_SYMBOLS)


def _lowered(match: re.Match[str]) -> str:
    above, below, power, index, fraction = match.groups()
    if fraction:
        above, _, below = unicodedata.normalize("NFKC", fraction).partition("⁄")
    if above:
        return f"\\frac{{{above}}}{{{below}}}"
    return f"^{{{power}}}" if power else f"_{{{index}}}"


def _unescaped(text: str) -> str:
    """Removes backslashes that were doubled, and restores commands that JSON read as characters.

    >>> _unescaped("\\\\\\\\frac{1}{2}"), _unescaped("\\x0crac{1}{2}")
    ('\\\\frac{1}{2}', '\\\\frac{1}{2}')
    """
    text = _CONTROL.sub(lambda match: "\\" + "fbt"["\f\b\t".index(match[0])], text)
    count = 1
    while count and "\\\\" in text and not _SINGLE.search(text):
        text, count = _DOUBLED.subn(r"\1\2", text)
    return text


def without_format(text: str) -> str:
    """Removes fonts and colours; text in a font of its own becomes ``\\text{...}``.

    >>> without_format("\\\\textbf{(A)}"), without_format("\\\\color{red}{42}")
    ('\\\\text{(A)}', '42')
    """
    text = _unescaped(text)
    for pattern, replacement in _FORMATS:
        text = pattern.sub(replacement, text)
    return re.sub(r"^\{([^{}]*)\}$", r"\1", text.strip())


def _as_fraction(repeating: re.Match[str]) -> str:
    """``0.1\\overline{6}`` is 16 - 1 of 90."""
    whole, fixed, period, digit = repeating.groups()
    period = period or digit
    value = Fraction(int(whole + fixed + period) - int(whole + fixed), 10 ** len(fixed))
    value /= 10 ** len(period) - 1
    return f"\\dfrac{{{value.numerator}}}{{{value.denominator}}}"  # nothing else is spelled so


def _words(text: str) -> str:
    """``eggs per day`` is ``egg day``: units by their names, plurals as singulars."""
    words = [word for word in re.findall(r"[^\W\d_]+", text.lower()) if word not in _FILLERS]
    known = ((word, units.read(word)) for word in words)
    return " ".join(unit.name if unit else _PLURAL.sub("", word) for word, unit in known)


def _is_word(part: str) -> bool:
    """True for a word that does not change the value of the number before it."""
    if not part.isascii():
        return _COUNTS.search(part) is None
    return part.lower() not in _NO_UNITS and (len(part) >= 3 or units.read(part) is not None)


def number(value: str) -> Fraction | None:
    """Reads a plain number in the spelling of ``normalize``; a percentage is divided by 100.

    Understands integers, decimals, fractions, mixed numbers, powers of ten, ``3 million``, and
    currencies in front.

    >>> number("12\\\\frac{3}{5}"), number("-0.50"), number("3 million"), number("3x")
    (Fraction(63, 5), Fraction(-1, 2), Fraction(3000000, 1), None)
    """
    text = value.strip()
    sign = -1 if text.startswith("-") else 1
    text = _CURRENCY.sub("", text.lstrip("+") if sign > 0 else text[1:].strip())
    scale = 1
    if scaled := _SCALED.fullmatch(text):
        text, scale = scaled[1], _SCALES[scaled[2]]
    unsigned = _unsigned(text)
    return None if unsigned is None else sign * scale * unsigned


def _unsigned(text: str) -> Fraction | None:
    if _DECIMAL.fullmatch(text):
        return Fraction(text)
    if match := _SCIENTIFIC.fullmatch(text):
        return Fraction(match[1]) * Fraction(10) ** int(match[2])
    if match := _FRACTION.fullmatch(text):
        whole, above, below = match.groups()[:3] if match[2] else match.groups()[3:]
        if Fraction(below) != 0 and not (whole and above.startswith("-")):
            return Fraction(whole or 0) + Fraction(above) / Fraction(below)
    return None
