"""Programming tasks: an agent's program is run against tests, in a sandbox.

reward = tests passed / tests run, or 1 if all pass and else 0 (``env.reward``). Expected outputs
never enter the sandbox; they are compared here.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from marft_jax.envs.base import EnvSource, Grade, QuestionEnv, Split, Task
from marft_jax.envs.datasets import load
from marft_jax.envs.datasets.rows import LeftOut
from marft_jax.errors import BadInput
from marft_jax.extras.code.rows import FunctionTest, ScriptTest, Suite, WrappedTest, as_task
from marft_jax.extras.code.sandbox import Limits, Outcome, Sandbox, Unusable
from marft_jax.extras.code.statements import IMPORTS
from marft_jax.settings.setting import LARGEST, Natural, Seconds

_OPENING = re.compile(
    r"(?<!`)(?:`{3,}+[^`\n]+`{3,}|(`{3,}+)[ \t]*((?:[A-Za-z][\w+#-]*)?)([^`\n]*)\n)"
)
_CODE = re.compile(  # strings, triple-quoted first; comments; fences
    r"""(?P<long>\"{3}|'{3})(?:\\(?:.|\Z)|[^\\])*?(?:(?P=long)|\Z)|\#[^\n]*|(?P<fence>`{3,}+)"""
    r"""|(?P<quote>["'])(?:\\(?:.|\Z)|(?!(?P=quote))[^\\\n])*+(?P=quote)?""",
    re.S,
)
_CLOSING = re.compile(r"^[ \t]*(?P<fence>`{3,}+)", re.M)
_PYTHON = ("python", "python3", "py")
_RELATIVE, _ABSOLUTE = 1e-6, 1e-9  # tolerances, unless both numbers are integers
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_ENDLESS = 8  # unclosed strings to look for in a text: each search may scan all of it
_LONGEST = 100_000  # characters of a program
_NOT_RUN = Outcome("timeout", "", "not run")


@dataclasses.dataclass(frozen=True)
class Settings(load.RowSettings):
    """Settings of programming."""

    name: str = "code"
    reward: Literal["fraction", "all"] = "fraction"
    """fraction: the fraction of tests that a program passes. all: 1 for all tests, else 0."""
    tests: Natural = 10
    """Tests that are run of each task, the first ones; 0: all."""
    test_seconds: Seconds = 5.0
    """Time limit of one test, in seconds of wall time."""
    code_seconds: Seconds = 60.0
    """Time limit of all tests of a program, in seconds of wall time."""
    memory_mb: Annotated[int, Field(ge=64, le=LARGEST)] = 1024
    """Address space of a program, in MiB."""
    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    """bubblewrap: isolates programs. none: runs what the model writes as you, with access to your
    files and network."""

    def task_of(self, row: Any) -> Task | LeftOut | str:
        """See ``RowSettings``."""
        return as_task(row)


def source(env: Settings, split: Split) -> EnvSource:
    """Makes tasks from ``env.data``; for evaluation from ``env.eval_data``.

    Raises:
        BadInput: data is missing or wrong (see ``load.chooser``), or this machine cannot isolate
            programs and ``env.sandbox`` is not ``none``.
    """
    pick, size = load.chooser(env, split)
    danger = "as you, with your files and network in their reach"
    try:
        sandbox = Sandbox(env.sandbox, env.workers, Limits(memory=env.memory_mb << 20))
    except Unusable as reason:
        raise BadInput(
            f"--env.name code needs a sandbox for generated programs, and there is none: {reason}; "
            f"--env.sandbox none would run them {danger}"
        ) from reason
    if env.sandbox == "none":
        print(f"marft_jax: --env.sandbox none: generated programs run {danger}", file=sys.stderr)
    grade = Grader(sandbox, env).grade
    return EnvSource(lambda: QuestionEnv(pick, grade, env.horizon), size, sandbox.close)


class Grader:
    """Grades programs by their tests. Safe to use from threads."""

    def __init__(self, sandbox: Sandbox, env: Settings) -> None:
        self._sandbox, self._env, self._most = sandbox, env, env.tests or sys.maxsize

    def grade(self, text: str, tests: Suite) -> Grade:
        """Extracts the program from a text and runs it against the tests."""
        program = extract(text)
        if not program or len(program) > _LONGEST:
            return Grade(0.0, "no answer", "", "There is no program.")
        try:
            failures = self._failures(program, tests)
        except (Unusable, OSError):  # a fault of this machine, not of the program
            raise
        except Exception as error:  # no program may make grading fail
            return Grade(0.0, "crashed", program, f"It cannot be graded: {type(error).__name__}.")
        passed = failures.count(None)
        if passed == len(failures):
            return Grade(1.0, "right", program)
        score = passed / len(failures) if self._env.reward == "fraction" else 0.0
        number, outcome = next((i, o) for i, o in enumerate(failures, 1) if o is not None)
        feedback = f"{passed} of {len(failures)} tests passed. Test {number}: {_reason(outcome)}"
        lost = any(outcome is not None and outcome.verdict == "lost" for outcome in failures)
        return Grade(score, "crashed" if lost else "wrong", program, feedback)

    def _failures(self, program: str, tests: Suite) -> list[Outcome | None]:
        """Runs the tests; returns None for each that passed, else its outcome."""
        sources = alternatives(program, tests.starter)
        if tests.statements:
            few = tests.statements[: self._most]
            seconds = min(self._env.test_seconds * len(few), self._env.code_seconds)
            outcomes = self._sandbox.check(sources, tests.prelude, few, tests.names, seconds)
            return [None if outcome.verdict == "ok" else outcome for outcome in outcomes]
        deadline = time.monotonic() + self._env.code_seconds
        failures: list[Outcome | None] = []
        for case in tests.cases[: self._most]:
            left = min(self._env.test_seconds, deadline - time.monotonic())
            run = left > 0 and not (self._env.reward == "all" and any(failures))
            failures.append(self._failure(sources, case, left) if run else _NOT_RUN)
        return failures

    def _failure(
        self, sources: Sequence[str], case: ScriptTest | FunctionTest, seconds: float
    ) -> Outcome | None:
        if isinstance(case, ScriptTest):
            outcome = self._sandbox.run(sources, case.text, seconds)
            right = same_output(outcome.output, case.output)
            return None if right and outcome.verdict == "ok" else outcome
        sources = [IMPORTS + source for source in sources]
        outcomes = list[Outcome]()
        for arguments in _readings(case.arguments):
            outcomes.append(self._sandbox.call(sources, case.name, arguments, seconds))
            wanted = [case.expected, *([[case.expected]] if isinstance(case, WrappedTest) else [])]
            right = any(same_json(outcomes[-1].output, value) for value in wanted)
            if right and outcomes[-1].verdict == "ok":
                return None
        return outcomes[0]


def _readings(arguments: Any) -> list[Any]:
    """Lists arguments as JSON has them, and with keys that JSON made texts: 1, -2, 0.5, true."""
    restored = json.loads(json.dumps(arguments), object_pairs_hook=_with_keys)
    return [arguments] if restored == arguments else [arguments, restored]


def _with_keys(pairs: list[tuple[str, Any]]) -> dict[Any, Any]:
    try:
        keys = [json.loads(key) for key, _ in pairs]
    except ValueError:
        return dict(pairs)
    plain = not any(isinstance(key, (str, list, dict)) for key in keys)
    return dict(zip(keys, (value for _, value in pairs), strict=True)) if plain else dict(pairs)


def extract(text: str) -> str:
    """Finds the program in a text: the last Python block, else the last block, else all of it.

    >>> extract("Try\\n```python\\nx = 1\\n```\\nor\\n```\\ny\\n```")
    'x = 1\\n'
    """
    blocks = list(_blocks(text))
    python = [code for name, code in blocks if name in _PYTHON]
    programs = python or [code for _, code in blocks]
    if not programs:
        return text
    return textwrap.dedent(programs[-1]) if programs[-1].strip() else ""


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yields the language and the code of each fenced block.

    A fence may open after other words of its line. Inside a string or a comment of the code a
    fence does not close the block, unless the string never ends.
    """
    end, endless = 0, 0
    while opening := _OPENING.search(text, end):
        start = end = opening.end()
        fence, name, rest = opening.groups()
        line = text[text.rfind("\n", 0, opening.start()) + 1 : opening.start()]
        if not fence or line.strip() and rest.strip():
            continue  # ```x``` or ``` in a sentence
        closing = None
        if name.lower() in ("", *_PYTHON) and endless < _ENDLESS:
            closing = _closing(_CODE, text, start, fence)
            endless += closing is None
        closing = closing or _closing(_CLOSING, text, start, fence)
        yield name.lower(), text[start : closing.start("fence") if closing else None].rstrip(" \t")
        end = closing.end() if closing else len(text)


def _closing(pattern: re.Pattern[str], text: str, start: int, fence: str) -> re.Match[str] | None:
    matches = pattern.finditer(text, start)
    return next((match for match in matches if len(match["fence"] or "") >= len(fence)), None)


def alternatives(program: str, starter: str) -> list[str]:
    """Lists readings of a program, with the starter code and without; the first that compiles runs.

    A bare function body, whose first line may lack its indentation, goes below the starter code.
    """
    if not starter.strip():
        return [program]
    head = starter.rstrip() + "\n"
    last = head.splitlines()[-1]
    pad = last[: len(last) - len(last.lstrip())] + ("    " if last.endswith(":") else "")
    return [head + program, program, head + pad + program, head + textwrap.indent(program, pad)]


def same_output(printed: str, expected: str) -> bool:
    """Compares two outputs line by line and word by word.

    Lines end as in a text file that Python reads. White space at the end of a line and of the text
    is ignored. Numbers agree within 1e-6 relative or 1e-9 absolute, unless both are integers.

    >>> same_output("1.0000001 a \\n", "1 a"), same_output("10000001", "10000000")
    (True, False)
    """
    given, wanted = (
        [line.rstrip() for line in io.StringIO(text.rstrip(), newline=None)]
        for text in (printed, expected)
    )
    return len(given) == len(wanted) and all(map(_same_line, given, wanted))


def same_json(returned: str, expected: Any) -> bool:
    """Compares a JSON text with a value; floats agree within 1e-6 relative or 1e-9 absolute."""
    try:
        return _same_value(json.loads(returned), expected)
    except (ValueError, RecursionError, OverflowError):  # 10**400 is no float
        return False


def _same_line(given: str, wanted: str) -> bool:
    words, others = given.split(), wanted.split()
    return given == wanted or len(words) == len(others) and all(map(_same_word, words, others))


def _same_word(given: str, wanted: str) -> bool:
    if given == wanted or max(len(given), len(wanted)) > 400:
        return given == wanted
    are_numbers = _NUMBER.fullmatch(given) and _NUMBER.fullmatch(wanted)
    is_real = re.search(r"[.eE]", given + wanted)
    return bool(are_numbers and is_real) and _close(float(given), float(wanted))


def _close(given: float, wanted: float) -> bool:
    return math.isclose(given, wanted, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)


def _same_value(given: Any, wanted: Any) -> bool:
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, float) or isinstance(wanted, float):
        numbers = isinstance(given, (int, float)) and isinstance(wanted, (int, float))
        return numbers and _close(given, wanted)
    if isinstance(given, list) and isinstance(wanted, (list, tuple)):
        return len(given) == len(wanted) and all(map(_same_value, given, wanted))
    if isinstance(given, dict) and isinstance(wanted, dict):
        wanted = {str(key): value for key, value in wanted.items()}
        same = given.keys() == wanted.keys()
        return same and all(_same_value(given[key], wanted[key]) for key in given)
    return type(given) is type(wanted) and given == wanted


def _reason(outcome: Outcome) -> str:
    """Tells the team why a test failed, without the expected result."""
    last = outcome.detail.strip().rpartition("\n")[2][:200]
    last = last.encode("utf-8", "replace").decode()  # a tokenizer fails on a lone surrogate
    if outcome.verdict == "ok":
        return "wrong result."
    if outcome.verdict == "failed":
        return last if last.startswith("error:") else "wrong result."
    if outcome.verdict == "timeout":
        return "too slow."
    return last or {"output": "too much output."}.get(outcome.verdict, "it ended with an error.")
