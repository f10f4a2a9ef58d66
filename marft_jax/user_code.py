"""The border to code that users bring: environments, workflows, tools, step rewards.

Behind it may be anything: an exception without a text, a number that is none, an object that
raises when it is looked at. What passes is a plain value of ours, or a ``Failure`` of one line that
names the user's own file and line.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import numpy as np

from marft_jax.errors import BadInput
from marft_jax.formats import jsonlines
from marft_jax.types import StepResult

_OURS = str(Path(__file__).resolve().parent) + os.sep
_LIBRARIES = tuple({p + os.sep for p in sysconfig.get_paths().values()} | {"<frozen", "<string"})
_LONGEST = 400  # characters of an error's text
_MOST_PARTS = 100_000  # of an info


class Failure(NamedTuple):
    """Why code of a user failed, on one line; ``is_bad_input`` where it broke a contract of ours
    rather than itself."""

    text: str
    is_bad_input: bool = False


def failure_of(error: BaseException) -> Failure:
    """Describes what a user's code raised. Its text may fail, or end the process, as well."""
    try:
        kind, text = type(error).__name__, str(error)
    except BaseException:
        kind, text = "an exception", "it cannot say what it is"
    if isinstance(error, BadInput):
        kind = ""
    where = place(error.__traceback__)
    return Failure(one_line(f"{kind}: {text}" if kind else text) + where, not kind)


def one_line(text: str) -> str:
    """A text that fits on a line and steers no terminal.

    >>> one_line("red:\\n\\x1b[31m")
    'red: \\\\x1b[31m'
    """
    short = " ".join(text[: 4 * _LONGEST].split())
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in short)
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 3] + "..."


def place(at: TracebackType | FrameType | Callable[..., Any] | None) -> str:
    """Where in the user's own files that is: `` (file:line)``, or nothing."""
    theirs = [spot for spot in _spots(at) if not spot[0].startswith(_OURS)]
    own = [spot for spot in theirs if not spot[0].startswith(_LIBRARIES)]
    found = own or theirs
    return f" ({found[-1][0]}:{found[-1][1]})" if found else ""


def _spots(at: Any) -> Iterator[tuple[str, int]]:
    """Files and lines, the innermost last."""
    if isinstance(at, TracebackType):
        yield from ((f.f_code.co_filename, line) for f, line in traceback.walk_tb(at))
    elif isinstance(at, FrameType):
        stack = list(traceback.walk_stack(at))
        yield from ((f.f_code.co_filename, line) for f, line in reversed(stack))
    elif (code := getattr(at, "__code__", None)) is not None:
        yield code.co_filename, code.co_firstlineno


def shown(value: Any) -> str:
    """A value as messages show it."""
    try:
        return f"{value!r:.60}"
    except BaseException:
        return f"a {type(value).__name__} that cannot be shown"


def text_of(what: str, value: Any) -> str:
    """A text as every tokenizer can take it: halves of surrogate pairs become U+FFFD.

    Raises:
        BadInput: it is none.
    """
    if not isinstance(value, str):
        raise BadInput(f"{what}: expected a text, got {shown(value)}")
    return str.encode(value, "utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def number_of(what: str, value: Any) -> float:
    """A number as a float. One that is not finite passes: the guard of a run looks for those.

    Raises:
        BadInput: it is none.
    """
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise BadInput(f"{what}: expected a number, got {shown(value)}")


def truth_of(what: str, value: Any) -> bool:
    """True or False.

    Raises:
        BadInput: it is neither.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise BadInput(f"{what}: expected True or False, got {shown(value)}")
    return bool(value)


def info_of(what: str, value: Any) -> dict[str, Any]:
    """What transcripts should keep, as plain values that JSON can hold.

    Raises:
        BadInput: it holds itself, or too much.
    """
    if not isinstance(value, Mapping):
        raise BadInput(f"{what}: expected a mapping, got {shown(value)}")
    try:
        return jsonlines.plain(dict(value), _MOST_PARTS)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{what}: expected what JSON can hold: {error}") from error


def result_of(result: Any, acted: Collection[str]) -> StepResult:
    """What an environment answers to a step.

    Args:
        result: what its ``step`` returned.
        acted: names of the agents that acted in the step.

    Raises:
        BadInput: expected, got, for the first field that is wrong.
    """
    if not isinstance(result, StepResult):
        raise BadInput(f"expected a marft_jax.types.StepResult, got {shown(result)}")
    paid = result.agent_rewards
    if not isinstance(paid, Mapping):
        raise BadInput(f"agent_rewards: expected names to numbers, got {shown(paid)}")
    for name in paid:
        if name not in acted:
            raise BadInput(
                f"agent_rewards: expected names of agents that acted in this step "
                f"({', '.join(dict.fromkeys(acted))}), got {shown(name)}"
            )
    return StepResult(
        observation=text_of("observation", result.observation),
        reward=number_of("reward", result.reward),
        done=truth_of("done", result.done),
        info=info_of("info", result.info),
        agent_rewards={
            str(name): number_of(f"agent_rewards[{name!r}]", value) for name, value in paid.items()
        },
        feedback=text_of("feedback", result.feedback),
    )
