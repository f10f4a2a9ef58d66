"""Process that grades answers: JSON lines in, JSON lines out, until the pipe closes.

    {"reference": "1/2", "answer": "\\\\frac{2}{4}", "seconds": 10}  ->  {"equal": true}

(null where the comparison fails.)

Its memory is limited. The parent waits a little less long than ``seconds``, kills it and starts
another one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
from collections.abc import Sequence
from typing import Any

from marft_jax.envs.grading.normalize import normalize
from marft_jax.envs.worker_side.serving import Answer, Line, serve

_OR = re.compile(r"\\lor|\\vee|∨|(?<![A-Za-z\\])or(?![A-Za-z])")
_D, _V = r"(?:d|\\partial)(?:\^\{?\d\}?)?", r"(?:\s*[A-Za-z](?:\^\{?\d\}?)?)?"
_CALLED = r"(?:\s*\([^()=]*\))?"
_NAME = re.compile(
    r"\([A-Za-z](?:,\s*[A-Za-z])+\)"
    rf"|(?:[A-Za-z]|[A-Z]{{2,}}|\\[a-z]+)(?:_(?:\{{\w+\}}|\w+))?(?:'|\^\{{?\\prime\}}?)*{_CALLED}"
    rf"|\\frac\s*\{{{_D}{_V}\}}\{{{_D}{_V}\}}(?:\s*{_V}{_CALLED})?|{_D}{_V}/{_D}{_V}"
)
"""Left side of an equation that defines a variable, a function or a derivative."""
_DERIVED = re.compile(r"'|prime|/")
_LETTERS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
_BRACKETS = re.compile(r"^(?:\\\{|[(\[])(.*)(?:\\\}|[)\]])$")
MEMORY = 4 << 30
"""Most bytes of address space; an answer that needs more crashes its worker."""


def equal(reference: str, answer: str) -> bool:
    """Compares the meanings of two answers, by computer algebra."""
    either, other_either = bool(_OR.search(reference)), bool(_OR.search(answer))
    return _equal(normalize(reference), normalize(answer), either, other_either)


def _equal(right: str, given: str, either: bool, other_either: bool) -> bool:
    (name, side), (other_name, other_side) = _sides(right), _sides(given)
    derived = [bool(_DERIVED.search(text)) for text in (name, other_name)]
    if name and other_name and any(derived):
        if name != other_name and not (all(derived) and "'" in name + other_name):
            return False
        right, given = side, other_side
    elif (
        name == other_name != ""
        or bool(name) != bool(other_name)
        and "=" not in (side if other_name else other_side)
    ):
        right, given = side, other_side
    elif right.count("=") == 1 and "=" not in given and _LETTERS.search(right.partition("=")[0]):
        return False  # 4 is no line x + y = 4
    kind, other = (re.match(r"\((?=[^()]*\)$)|\[|\\\{|", text)[0] for text in (right, given))  # type: ignore[index]
    if {kind, other} == {"(", "\\{"}:
        return False  # a point is not a set
    if max(right.count(":"), given.count(":")) > 1:
        return _same_parts(right, given, ":")
    if "\\dots" in right + given:
        return _same_parts(right, given, ",")
    gold, target = _parse(right, either), _parse(given, other_either)
    if not _verified(gold, target):
        apart, other = _roots_apart(gold[0]), _roots_apart(target[0])
        return (apart, other) != (gold[0], target[0]) and _verified([apart], [other])
    return _same_size(gold[0], target[0])


def _verified(gold: Sequence[Any], target: Sequence[Any]) -> bool:
    from math_verify import verify

    return verify(gold, target, timeout_seconds=None, allow_set_relation_comp=True)  # type: ignore[arg-type]


def _roots_apart(item: Any) -> Any:
    """Writes roots of products and quotients as products and quotients of roots, which is right for
    positive numbers. But a root of a square stays: it is no x."""
    import sympy

    def is_root(part: Any) -> bool:
        return part.is_Pow and part.exp.is_Rational and part.exp.q > 1 and not part.is_number

    def apart(part: Any) -> Any:
        above, below = map(sympy.Mul.make_args, sympy.fraction(sympy.together(part.base)))
        roots = [factor**part.exp for factor in above] + [factor**-part.exp for factor in below]
        return sympy.Mul(*roots)

    has_root = isinstance(item, sympy.Basic) and any(map(is_root, item.atoms(sympy.Pow)))
    return item.doit().replace(is_root, apart) if has_root else item


def _sides(value: str) -> tuple[str, str]:
    """Splits ``y = 2x`` into name and value; a derivative is rewritten in one spelling."""
    left, equals, side = value.partition("=")
    if not equals or "=" in side or not _NAME.fullmatch(left.strip()):
        return "", value
    name = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", left).replace("\\partial", "d")
    return re.sub(r"[\s{}]", "", name), side.strip()


def _same_parts(right: str, given: str, between: str) -> bool:
    """Compares the parts of ratios, and of lists with dots, in their order."""
    parts, others = (_BRACKETS.sub(r"\1", text).split(between) for text in (right, given))
    return len(parts) == len(others) and all(map(_same_part, parts, others))


def _same_part(right: str, given: str) -> bool:
    one, other = (text.strip().replace("\\dots", "\\Xi") for text in (right, given))
    alone = "\\Xi" in (one, other)
    return one == other or not alone and bool(one and other) and _equal(one, other, False, False)


@functools.lru_cache(maxsize=256)
def _parse(value: str, alternatives: bool) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    normal = LatexExtractionConfig().normalization_config
    config = LatexExtractionConfig(normalization_config=dataclasses.replace(normal, units=False))
    parsed = parse(f"${value}$", [config, ExprExtractionConfig()], parsing_timeout=None)  # type: ignore[arg-type]
    return [_meant(item, alternatives) for item in parsed]


def _meant(item: Any, alternatives: bool) -> Any:
    """Reads i as the imaginary unit if it is the only letter, and ``x < 2 or x > 3``, which the
    parser returns as a set of relations, as a union of intervals."""
    import sympy

    names = getattr(item, "free_symbols", set())
    if [*map(str, names)] == ["i"]:
        return item.subs(names.pop(), sympy.I)
    relations: tuple[Any, ...] = (
        item.args if alternatives and isinstance(item, sympy.FiniteSet) else ()
    )
    kinds = sympy.core.relational.Relational, sympy.And
    if relations and len(names) == 1 and all(isinstance(relation, kinds) for relation in relations):
        return sympy.Or(*relations).as_set()
    return item


def _same_size(gold: Any, target: Any) -> bool:
    """False for two different exact numbers, or two tiny ones, such as 1/2004! and 1/2005!; also
    where they are parts of a list."""
    import sympy

    kinds = sympy.FiniteSet, sympy.Tuple
    if isinstance(gold, kinds) and isinstance(target, kinds):
        return all(any(_same_size(item, other) for other in target.args) for item in gold.args)
    try:
        if gold.is_number and target.is_number:
            gold, target = gold.doit(), target.doit()
            most = 1e-5 if (gold - target).has(sympy.Float) else 1e-30
            return gold == target or bool(abs((gold - target) / gold).evalf(40) < most)
    except (AttributeError, TypeError):  # sets, relations, words
        pass
    return True


def _prepare(_: Line) -> Answer:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable(logging.CRITICAL)
    equal("x+1", "1+x")  # imports sympy and builds the parser

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"equal": equal(request["reference"], request["answer"])}
        except Exception:  # says so: a new process would take seconds to start
            return {"equal": None}

    return answer


if __name__ == "__main__":
    serve(_prepare)
