"""Finds what tests that are Python statements require of a program, from their syntax.

Only calls with plain values pass between tests and program. So this module separates the program's
functions from the tests' own names and modules, and finds tests that need more than such calls.
"""

from __future__ import annotations

import ast
import builtins
import collections
import datetime
import decimal
import fractions
from collections.abc import Collection, Sequence
from typing import NamedTuple

IMPORTS = """from typing import *
from collections import *
from itertools import *
from functools import *
from heapq import *
from bisect import *
from math import *
from fractions import *
from decimal import *
from builtins import *
import bisect, collections, copy, datetime, decimal, fractions, functools, heapq, itertools, math
import operator, random, re, string, sys
"""
"""Imports that precede tests and called programs, as on the sites that publish the tasks."""
_IMPORTED: dict[str, object] = {}
exec(IMPORTS, _IMPORTED)
_BUILT_IN = frozenset(dir(builtins))
_PLAIN = (str, list, dict, set, tuple, bytearray, range, float, complex, collections.Counter,
          collections.deque, decimal.Decimal, fractions.Fraction, datetime.datetime,
          datetime.timedelta)  # fmt: skip
_ATTRIBUTES = frozenset(name for kind in _PLAIN for name in dir(kind))


class Requirements(NamedTuple):
    """Requirements of tests.

    Attributes:
        names: functions of the program that the tests call.
        objects: the tests use classes, attributes or constants of the program, or pass functions.
    """

    names: tuple[str, ...]
    objects: bool


def requirements(
    prelude: str,
    tests: Sequence[str],
    names: Collection[str] | None = None,
    classes: Collection[str] = (),
) -> Requirements:
    """Reads what tests require of a program.

    Args:
        prelude: code that runs before the tests.
        tests: statements, one text per test.
        names: functions of the program. None: the undefined names that a test calls or passes on,
            without those of ``IMPORTS`` (unless the test has no other).
        classes: which of the names are classes. Without names: the capitalised ones.
    """
    codes = [_Code(text) for text in (prelude, *tests)]
    defined = _BUILT_IN.union(*(code.functions | code.imports | code.variables for code in codes))
    used: set[str] = set()
    asked: set[str] = set(names or ())
    for code in codes:
        undefined = [node for node in code.names if node.id not in defined]
        used |= {node.id for node in undefined}
        free = {n.id for n in undefined if id(n) not in code.inner or n.id != n.id.lower()}
        if names is None:
            asked |= {name for name in free if name not in _IMPORTED} or free
    objects = any(name in classes or names is None and name[0].isupper() for name in asked & used)
    modules = (used - asked).union(*(code.imports for code in codes))
    functions = asked.union(
        (name for name in _BUILT_IN if callable(getattr(builtins, name))),
        *(code.functions for code in codes),
    )
    objects |= any(code.needs_objects(asked, functions, modules) for code in codes)
    return Requirements(tuple(sorted(asked)), objects)


class _Code:
    """Names in a piece of code, by their role."""

    def __init__(self, text: str) -> None:
        try:
            self.nodes = list(ast.walk(ast.parse(text)))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            self.nodes = []  # running the code shows the error
        self.names = [node for node in self.nodes if isinstance(node, ast.Name)]
        self.inner = {id(node.value) for node in self.nodes if isinstance(node, ast.Attribute)}
        self.functions, self.imports, self.variables = set[str](), set[str](), set[str]()
        for node in self.nodes:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                self.functions.add(node.name)
            elif isinstance(node, ast.alias):
                self.imports.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.arg):
                self.variables.add(node.arg)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                self.variables.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.variables.add(node.id)

    def needs_objects(self, asked: set[str], functions: set[str], modules: set[str]) -> bool:
        """Tells if the code needs more of the program than calls with plain values."""
        calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        named = asked | {"candidate"}
        theirs = {id(c) for c in calls if isinstance(c.func, ast.Name) and c.func.id in named}
        kept = {  # variables that hold results of the program
            id(target)
            for node in self.nodes
            if isinstance(node, ast.Assign) and id(node.value) in theirs
            for target in node.targets
        }
        given = {node.id for node in self.names if id(node) in kept}
        theirs |= {id(node) for node in self.names if node.id in given}
        fine = {id(call.func) for call in calls}  # callees, and arguments of the tests' functions
        for call in calls:
            arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
            if id(call) not in theirs:
                fine.update(map(id, arguments))
            elif any(_is_function(argument, functions, modules) for argument in arguments):
                return True
        return any(
            isinstance(node, ast.ClassDef)
            or isinstance(node, ast.Attribute) and id(node.value) in theirs
            and node.attr not in _ATTRIBUTES
            or isinstance(node, ast.Call) and id(node.func) in theirs
            or isinstance(node, ast.Name) and node.id in asked and id(node) not in fine
            for node in self.nodes
        )  # fmt: skip


def _is_function(node: ast.expr, functions: set[str], modules: set[str]) -> bool:
    """Tells if an expression is a function, or a list that has one."""
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return any(_is_function(item, functions, modules) for item in node.elts)
    if isinstance(node, ast.Attribute):  # a method, not a function of a module
        return not (isinstance(node.value, ast.Name) and node.value.id in modules)
    return isinstance(node, ast.Lambda) or isinstance(node, ast.Name) and node.id in functions
