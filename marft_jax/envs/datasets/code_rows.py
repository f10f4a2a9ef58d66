"""Programming tasks out of rows, in the fields found in the wild.

| fields                                              | as in                                    |
|-----------------------------------------------------|------------------------------------------|
| problem, tests (list, or JSON text), starter_code   | DeepCoder: all its subsets               |
| question_content, public_/private_test_cases        | LiveCodeBench                            |
| question, input_output: {inputs, outputs, fn_name}  | TACO, APPS                               |
| description, official_tests or public_/private_tests| Codeforces, CodeContests                 |
| prompt, test, entry_point                           | HumanEval                                |
| text or prompt, test_list, test_setup_code, code    | MBPP                                     |

Tests are scripts (input to output), calls (arguments to a value) or Python statements.
"""

from __future__ import annotations

import ast
import base64
import binascii
import io
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from marft_jax.envs.base import Task
from marft_jax.formats import foreign

_QUESTIONS = ("problem", "question_content", "question", "description", "prompt", "text")
_UNPACKED = 256 << 20  # bytes of the largest compressed tests


class Script(NamedTuple):
    """The program is run with ``text`` as its input and must print ``output``."""

    text: str
    output: str


class Call(NamedTuple):
    """The function ``name`` is called and must return ``expected``, as a JSON value."""

    name: str
    arguments: Sequence[Any]
    expected: Any


class Suite(NamedTuple):
    """What decides about a program.

    Attributes:
        cases: scripts and calls, in order.
        statements: Python statements, each one test, that must not raise.
        prelude: trusted code that goes before the statements.
        names: what the statements get from the program; None where nothing says so.
        starter: code that the program begins with, if it does not repeat it.
    """

    cases: tuple[Script | Call, ...] = ()
    statements: tuple[str, ...] = ()
    prelude: str = ""
    names: tuple[str, ...] | None = None
    starter: str = ""

    def __str__(self) -> str:
        return f"{len(self.cases) + len(self.statements)} tests"


def as_task(row: Any) -> Task | str:
    """A row as a task whose answer is its ``Suite``, or what is wrong with it."""
    if not isinstance(row, Mapping):
        return f"expected an object with a problem and tests, got {type(row).__name__}"
    try:
        question, tests = _question(row), _tests(row)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"its tests cannot be read: {' '.join(str(error).split())[:200]}"
    if not question:
        return f"expected a problem in one of the fields {', '.join(_QUESTIONS)}"
    if not (tests.cases or tests.statements):
        return f"no tests: got fields {', '.join(map(str, row))}"
    return Task(_shown(question, row, tests), tests)


def _question(row: Mapping[str, Any]) -> str:
    return next((row[k] for k in _QUESTIONS if isinstance(row.get(k), str) and row[k].strip()), "")


def _tests(row: Mapping[str, Any]) -> Suite:
    if row.get("entry_point") and row.get("test"):
        entry = row["entry_point"]
        statement = f"{row['test']}\ncheck({entry})"
        return Suite((), (statement,), row["prompt"], (entry,), row["prompt"])
    if row.get("test_list"):
        imports = row.get("test_imports") or []
        prelude = "\n".join([*imports, row.get("test_setup_code") or ""])
        return Suite((), tuple(row["test_list"]), prelude, _defined(row.get("code")))
    starter = row.get("starter_code") or ""
    name = _json(row.get("metadata") or {}).get("func_name") or row.get("fn_name")
    found: list[Any] = []
    for field in ("tests", "official_tests", "input_output", "public_test_cases", "public_tests"):
        if row.get(field):
            found += _listed(_json(row[field]))
    for field in ("private_test_cases", "private_tests", "generated_tests"):
        if row.get(field):
            found += _listed(_unpacked(row[field]))
    return Suite(tuple(_case(item, name) for item in found), starter=starter)


def _defined(solution: Any) -> tuple[str, ...] | None:
    """The names that a reference solution defines: these a program must define, and no others."""
    try:
        nodes = ast.parse(solution).body
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    kinds = (ast.FunctionDef, ast.ClassDef)
    return tuple(sorted({node.name for node in nodes if isinstance(node, kinds)})) or None


def _json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _listed(value: Any) -> list[Any]:
    """One test each: of ``{"inputs": [...], "outputs": [...]}`` too."""
    if isinstance(value, list):
        return value
    inputs = value.get("inputs", value.get("input", []))
    outputs = value.get("outputs", value.get("output", []))
    return [
        {"input": given, "output": wanted, "fn_name": value.get("fn_name")}
        for given, wanted in zip(inputs, outputs, strict=True)
    ]


def _case(item: Mapping[str, Any], name: str | None) -> Script | Call:
    name = item.get("fn_name") or _json(item.get("metadata") or {}).get("func_name") or name
    kind = item.get("testtype") or item.get("type") or ""
    given, wanted = item["input"], item["output"]
    if kind in ("stdin", "stdin_stdout") or not name:
        return Script(_text(given), _text(wanted))
    if isinstance(given, str):  # LiveCodeBench: one JSON value on each line
        arguments = [json.loads(line) for line in given.splitlines() if line.strip()]
        return Call(name, arguments, json.loads(wanted) if isinstance(wanted, str) else wanted)
    if isinstance(wanted, list) and len(wanted) == 1:  # TACO and APPS: a list around the value
        wanted = wanted[0]
    return Call(name, given, wanted)


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _unpacked(value: Any) -> Any:
    """LiveCodeBench's hidden tests: JSON, or JSON in a pickled text, compressed, in base 64."""
    try:
        return _json(value)
    except ValueError:
        pass
    try:
        packed = base64.b64decode(value, validate=True)
        unpacked = zlib.decompressobj().decompress(packed, _UNPACKED)
        foreign.check_memo(unpacked)
        return _json(_OnlyText(io.BytesIO(unpacked)).load())
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"hidden tests: {error}") from error


class _OnlyText(pickle.Unpickler):
    """Loads plain text; a pickle that names any class or function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"expected a plain text, got {module}.{name}")


def _shown(question: str, row: Mapping[str, Any], tests: Suite) -> str:
    """The question with what a solver must know: the function to write, and an example of use."""
    if row.get("entry_point") and tests.statements:
        return f"Complete this function.\n```python\n{question.strip()}\n```"
    if tests.statements:
        return f"{question.strip()}\nYour code should pass this test:\n{tests.statements[0]}"
    if tests.starter:
        return f"{question.strip()}\nBegin with this code:\n```python\n{tests.starter}\n```"
    names = {case.name for case in tests.cases if isinstance(case, Call)}
    if len(names) == 1 and (name := names.pop()) not in question:
        return f"{question.strip()}\nWrite a function named `{name}`."
    return question
