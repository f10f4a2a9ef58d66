"""Reads programming tasks from rows of published data sets.

| fields                                              | as in                                    |
|-----------------------------------------------------|------------------------------------------|
| problem, tests (list, or JSON text), starter_code   | DeepCoder: all its subsets               |
| question_content, public_/private_test_cases        | LiveCodeBench                            |
| question, input_output: {inputs, outputs, fn_name}  | TACO, APPS                               |
| description, official_tests or public_/private_tests| Codeforces, CodeContests                 |
| prompt, test, entry_point                           | HumanEval                                |
| the same, and problem_description or query           | LeetCodeDataset                          |
| text or prompt, test_list, test_setup_code, code    | MBPP                                     |
| prompt, reward_model: {ground_truth: {inputs, ...}} | verl                                     |

Tests are scripts (standard input to output), calls (arguments to a value) or Python statements.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from marft_jax.envs.base import Task
from marft_jax.envs.datasets.rows import LeftOut
from marft_jax.extras.code import statements
from marft_jax.formats import foreign

_QUESTIONS = (
    "problem", "problem_description", "question_content", "question", "description", "query",
    "prompt", "text",
)  # fmt: skip
_TESTS = (
    "tests", "official_tests", "input_output", "public_test_cases", "public_tests",
    "private_test_cases", "private_tests", "generated_tests", "ground_truth",
)  # fmt: skip
_UNPACKED = 256 << 20  # largest size in bytes of decompressed tests

Row = Mapping[str, Any]


class ScriptTest(NamedTuple):
    """A run of the program with ``text`` as standard input; it must print ``output``."""

    text: str
    output: str


class FunctionTest(NamedTuple):
    """A call of the function ``name``, which must return the JSON value ``expected``.

    Arguments are positional (a list) or named (a mapping).
    """

    name: str
    arguments: Sequence[Any] | Mapping[str, Any]
    expected: Any


class WrappedTest(FunctionTest):
    """Call whose row has a list of one item: it wraps the result, or is the result itself."""


class Suite(NamedTuple):
    """Tests of a program.

    Attributes:
        cases: scripts and calls, in order.
        statements: Python statements; each is one test and must not raise.
        prelude: trusted code that runs before the statements.
        names: functions of the program that the statements call.
        starter: code that precedes the program, unless the program repeats it.
    """

    cases: tuple[ScriptTest | FunctionTest, ...] = ()
    statements: tuple[str, ...] = ()
    prelude: str = ""
    names: tuple[str, ...] = ()
    starter: str = ""

    def __str__(self) -> str:
        return f"{len(self.cases) + len(self.statements)} tests"


def as_task(row: Any) -> Task | LeftOut | str:
    """Converts a row to a task whose answer is a ``Suite``, or says what is wrong with the row."""
    if not isinstance(row, Mapping):
        return f"expected an object with a problem and tests, got {type(row).__name__}"
    texts = (row.get(field) for field in _QUESTIONS)
    question = next((text for text in texts if isinstance(text, str) and text.strip()), None)
    if question is None:
        return f"expected a problem in one of the fields {', '.join(_QUESTIONS)}"
    read = next(read for fields, read in _READERS if all(row.get(field) for field in fields))
    try:
        task = read(row, question)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"its tests cannot be read: {' '.join(str(error).split())[:200]}"
    if isinstance(task, Task) and not (task.answer.cases or task.answer.statements):
        return f"no tests: got fields {', '.join(map(str, row))}"
    return task


def _human_eval(row: Row, question: str) -> Task | LeftOut:
    name, prompt = _method(row["entry_point"]), row.get("prompt") or ""
    if question == prompt:
        question = f"Complete this function.\n```python\n{question.strip()}\n```"
    else:
        header = prompt if name in prompt else ""
        question = _asked(question, row.get("starter_code") or header, name)
    return _judged(question, prompt, (f"{row['test']}\ncheck({name})",), [name], starter=prompt)


def _mbpp(row: Row, question: str) -> Task | LeftOut:
    prelude = "\n".join([*(row.get("test_imports") or []), row.get("test_setup_code") or ""])
    tests = tuple(row["test_list"])
    asked = f"{question.strip()}\nYour code should pass this test:\n{tests[0]}"
    return _judged(asked, prelude, tests, *_defined(row.get("code")))


def _judged(
    question: str,
    prelude: str,
    tests: tuple[str, ...],
    names: Sequence[str] | None,
    classes: Sequence[str] = (),
    starter: str = "",
) -> Task | LeftOut:
    """Makes a task with statements as tests; leaves out tests that need more than plain values."""
    wanted = statements.requirements(prelude, tests, names, classes)
    if wanted.objects:
        return LeftOut("their tests need functions or objects of the program")
    return Task(question, Suite((), tests, statements.IMPORTS + prelude, wanted.names, starter))


def _cases(row: Row, question: str) -> Task:
    starter = row.get("starter_code") or ""
    name = _json(row.get("metadata") or {}).get("func_name") or row.get("fn_name")
    items = [item for field in _TESTS if row.get(field) for item in _listed(_unpacked(row[field]))]
    cases = tuple(_case(item, name) for item in items)
    names = {case.name for case in cases if isinstance(case, FunctionTest)}
    question = _asked(question, starter, names.pop() if len(names) == 1 else "")
    return Task(question, Suite(cases, starter=starter))


def _asked(question: str, starter: str, name: str) -> str:
    """Adds the starter code, or the name to define, to a question that lacks it."""
    if starter.strip() and starter.strip() not in question:
        return f"{question.strip()}\nBegin with this code:\n```python\n{starter}\n```"
    if not starter and name not in question:
        return f"{question.strip()}\nWrite a function named `{name}`."
    return question


def _method(name: str) -> str:
    """Returns the name of the function: ``f`` for ``Solution().f``."""
    return name.rpartition(".")[2]


_READERS: Sequence[tuple[Sequence[str], Callable[[Row, str], Task | LeftOut]]] = (
    (("entry_point", "test"), _human_eval),
    (("test_list",), _mbpp),
    ((), _cases),
)
"""Fields that a row must have, and its reader; the first match counts."""


def _defined(solution: Any) -> tuple[list[str] | None, list[str]]:
    """Lists the functions and classes of a reference solution, and which of them are classes.

    The program must define exactly these. The first value is None without a reference.
    """
    try:
        nodes = ast.parse(solution).body
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None, []
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    return [n.name for n in nodes if isinstance(n, ast.FunctionDef)] + classes or None, classes


def _json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _unpacked(value: Any) -> Any:
    """Parses JSON, or LiveCodeBench's hidden tests: JSON, pickled, compressed, in base 64."""
    if not isinstance(value, str) or value.lstrip().startswith(("[", "{")):
        return _json(value)
    try:
        packed = base64.b64decode(value, validate=True)
        unpacked = zlib.decompressobj().decompress(packed, _UNPACKED)
        foreign.check_memo(unpacked)
        return _json(_OnlyText(io.BytesIO(unpacked)).load())
    except (zlib.error, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"hidden tests: {error}") from error


def _listed(value: Any) -> list[Any]:
    """Lists tests, also from ``{"inputs": [...], "outputs": [...]}``."""
    if isinstance(value, list):
        return value
    inputs = value.get("inputs", value.get("input", []))
    outputs = value.get("outputs", value.get("output", []))
    return [
        {"input": given, "output": wanted, "fn_name": value.get("fn_name")}
        for given, wanted in zip(inputs, outputs, strict=True)
    ]


def _case(item: Row, name: str | None) -> ScriptTest | FunctionTest:
    name = item.get("fn_name") or _json(item.get("metadata") or {}).get("func_name") or name
    kind = item.get("testtype") or item.get("type") or ""
    given, wanted = item["input"], item["output"]
    if kind in ("stdin", "stdin_stdout") or not name:
        return ScriptTest(_text(given), _text(wanted))
    name = _method(name)
    if isinstance(given, str):  # LiveCodeBench: one JSON value on each line
        arguments = [json.loads(line) for line in given.splitlines() if line.strip()]
        return FunctionTest(
            name, arguments, json.loads(wanted) if isinstance(wanted, str) else wanted
        )
    arguments = given if isinstance(given, (list, Mapping)) else [given]
    if isinstance(wanted, list) and len(wanted) == 1:  # TACO and APPS wrap the value in a list
        return WrappedTest(name, arguments, wanted[0])
    return FunctionTest(name, arguments, wanted)


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


class _OnlyText(pickle.Unpickler):
    """Unpickles plain text only; refuses any class or function."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"expected plain text, got {module}.{name}")
