"""The built-in tool ``calculator``."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

from marft_jax.tools.tool import ToolError

_LONGEST = 500  # characters of an expression
_BITS = 4096  # of a whole number
_BINARY: dict[type[ast.operator], Callable[..., int | float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow,
}  # fmt: skip
_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression, such as 12*(3+4)."""
    if len(expression) > _LONGEST:
        raise ToolError(f"expected at most {_LONGEST} characters, got {len(expression)}")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        is_whole = isinstance(value, int) or value.is_integer() and abs(value) < 1e15
        return str(int(value)) if is_whole else f"{value:.12g}"
    except ArithmeticError as error:
        raise ToolError(str(error)) from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError(
            f"expected numbers, + - * / // % ** and parentheses, got {expression!r:.60}"
        ) from None


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left), _value(right)
            if isinstance(op, ast.Pow) and isinstance(a, int) and abs(b) * a.bit_length() > _BITS:
                raise OverflowError("the result is too large")
            return _bounded(_BINARY[type(op)](a, b))
    raise ValueError("another kind of expression")


def _bounded(value: int | float | complex) -> int | float:
    if isinstance(value, complex):
        raise ArithmeticError("the result is not a real number")
    too_large = value.bit_length() > _BITS if isinstance(value, int) else not math.isfinite(value)
    if too_large:
        raise OverflowError("the result is too large")
    return value
