"""The tool ``python``: runs programs that an agent writes, in the sandbox.

Each call is a program of its own; nothing is kept between calls.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from marft_jax.errors import BadInput
from marft_jax.extras.code.sandbox import Sandbox, Unusable
from marft_jax.tools import Options, Source, ToolError, function_source, parse_options

_UNBOUNDED = 1e9  # seconds; the sandbox ends programs, and a call may wait for a worker


def source(given: Mapping[str, Any], where: str) -> Source:
    """Makes the tool; ``seconds`` is the time limit of a program.

    Raises:
        BadInput: an option does not fit, or this machine cannot isolate programs.
    """
    options: Options = parse_options(Options, given, where)
    try:
        sandbox = Sandbox("bubblewrap", os.cpu_count() or 1)
    except Unusable as reason:
        raise BadInput(f"{where}: it needs a sandbox for programs, and there is none: {reason}; "
                       "take the tool out") from reason  # fmt: skip

    def python(code: str) -> str:
        """Runs a Python program and returns what it prints."""
        outcome = sandbox.run(code, "", options.seconds)
        if outcome.verdict == "ok":
            return outcome.output.rstrip() or "(nothing was printed)"
        if outcome.verdict == "lost":
            raise RuntimeError(outcome.detail)
        last = outcome.detail.strip().rpartition("\n")[2]
        reasons = {"timeout": f"not done after {options.seconds:g} s", "output": "too much output"}
        raise ToolError(reasons.get(outcome.verdict, last or "it ended with an error"))

    return function_source(python, dataclasses.replace(options, seconds=_UNBOUNDED), where)
