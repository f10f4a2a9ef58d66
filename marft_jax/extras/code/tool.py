"""The tool ``python``: runs programs that an agent writes, in the sandbox.

Each call is a program of its own. With ``state: episode`` it begins with the programs of the
episode's earlier calls, whose output is dropped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from marft_jax.errors import BadInput
from marft_jax.extras.code.sandbox import Sandbox, Unusable
from marft_jax.tools import Options, Source, ToolError, function_source, parse_options

_DOCS = {
    "call": "Runs a Python program and returns what it prints.",
    "episode": "Runs a Python program and returns what it prints. Variables of earlier calls are "
    "kept.",
}
_AFTER = """\
import contextlib, io, random
random.seed(0)
for _before in {before!r}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(BaseException):
        exec(_before)
exec({code!r})
"""
"""Runs the programs of earlier calls again, each up to its error if it has one, then a new one."""
_UNBOUNDED = 1e9  # seconds; the sandbox ends programs, and a call may wait for a worker


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class PythonOptions(Options):
    """Options of the tool."""

    state: Literal["call", "episode"] = "call"  # how long variables are kept


def source(given: Mapping[str, Any], where: str) -> Source:
    """Makes the tool; ``seconds`` is the time limit of a program.

    Raises:
        BadInput: an option does not fit, or this machine cannot isolate programs.
    """
    options: PythonOptions = parse_options(PythonOptions, given, where)
    try:
        sandbox = Sandbox("bubblewrap", os.cpu_count() or 1)
    except Unusable as reason:
        raise BadInput(f"{where}: it needs a sandbox for programs, and there is none: {reason}; "
                       "take the tool out") from reason  # fmt: skip

    limits = Options(_UNBOUNDED, options.characters, options.cost)

    def make() -> Source:
        """Makes the tool of an episode."""
        before = list[str]()

        def python(code: str) -> str:
            keeps = options.state == "episode"
            program = _AFTER.format(before=before, code=code) if keeps else code
            outcome = sandbox.run(program, "", options.seconds)
            if keeps and outcome.verdict in ("ok", "error"):
                before.append(code)
            if outcome.verdict == "ok":
                return outcome.output.rstrip() or "(nothing was printed)"
            if outcome.verdict == "lost":
                raise RuntimeError(outcome.detail)
            last = outcome.detail.strip().rpartition("\n")[2]
            late = f"not done after {options.seconds:g} s"
            reasons = {"timeout": late, "output": "too much output"}
            raise ToolError(reasons.get(outcome.verdict, last or "it ended with an error"))

        python.__doc__ = _DOCS[options.state]
        return function_source(python, limits, where)

    return make()._replace(open=lambda: make().open(), keeps_state=options.state == "episode")
