"""Requirements of tests that are Python statements, read from their syntax.

Only calls with plain values pass between tests and program. So the program's functions are
separated from the tests' own names and modules here, and tests that need more than calls are found.
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
"""Goes before tests and before a program that is called, as on the sites where they come from."""
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
        names: functions of the program.
        objects: they use classes, attributes or constants of the program, or hand it functions.
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
        prelude: code that is run before the tests, with them.
        tests: statements, one text for each test.
        names: functions of the program; None: the undefined names that a test calls or passes on,
            less what ``IMPORTS`` define (unless the test has no other).
        classes: those of the names that are classes; without names, the capitalised ones are.

    Returns:
        The functions that the program must define, and whether that is enough.
    """
    codes = [_Code(text) for text in (prelude, *tests)]
    own = _BUILT_IN.union(*(code.functions | code.imports | code.variables for code in codes))
    used: set[str] = set()
    asked: set[str] = set(names or ())
    for code in codes:
        undefined = [node for node in code.names if node.id not in own]
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
    """Names in some code, by what they are there."""

    def __init__(self, text: str) -> None:
        try:
            self.nodes = list(ast.walk(ast.parse(text)))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            self.nodes = []  # running it shows what is wrong
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
        """True where plain values do not do."""
        calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        named = asked | {"candidate"}
        theirs = {id(c) for c in calls if isinstance(c.func, ast.Name) and c.func.id in named}
        kept = {  # variables with what a function of the program gave
            id(target)
            for node in self.nodes
            if isinstance(node, ast.Assign) and id(node.value) in theirs
            for target in node.targets
        }
        given = {node.id for node in self.names if id(node) in kept}
        theirs |= {id(node) for node in self.names if node.id in given}
        fine = {id(call.func) for call in calls}  # calls, and what is passed to tests' own code
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
    """True for a function, or a list with one."""
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return any(_is_function(item, functions, modules) for item in node.elts)
    if isinstance(node, ast.Attribute):  # a method
        return not (isinstance(node.value, ast.Name) and node.value.id in modules)
    return isinstance(node, ast.Lambda) or isinstance(node, ast.Name) and node.id in functions
