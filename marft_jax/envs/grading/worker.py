"""A grading process: JSON lines in, JSON lines out, until the pipe closes.

    {"reference": "1/2", "answer": "\\\\frac{2}{4}", "seconds": 10}  ->  {"equal": true}

(null where it cannot be said.)

Its memory is limited. Every grading is under an alarm that kills the whole process, so that one
which never ends does not outlive its parent either; the parent itself waits a little less long,
kills it and starts another one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import signal
import sys
from typing import Any

from marft_jax.envs.grading.compare import brackets
from marft_jax.envs.grading.intervals import intervals
from marft_jax.envs.grading.normalize import normalize

_NAMED_POINT = re.compile(r"^\([A-Za-z](?:, ?[A-Za-z])+\) ?= ?(?=\()")
MEMORY = 4 << 30
"""Bytes of address space; an answer that needs more crashes its worker."""


def equal(reference: str, answer: str) -> bool:
    """Whether the answer means the same as the reference, by computer algebra."""
    right, given = normalize(intervals(reference)), normalize(intervals(answer))
    if "=" not in right:
        given = _NAMED_POINT.sub("", given)
    kind, other = brackets(right), brackets(given)
    if kind and other and kind != other:
        return False  # a point is not a set, (1, 2) is not [1, 2]
    if kind == "(" and not other and "," in given:
        given = f"({given})"
    from math_verify import verify

    gold, target = _complex(_parse(right)), _complex(_parse(given))
    if not verify(gold, target, timeout_seconds=None, allow_set_relation_comp=True):
        return False
    return _same_size(gold[0], target[0])


def _complex(parsed: tuple) -> list:
    """Where i is the only letter, it is the imaginary unit and not a variable."""
    import sympy

    def unit(item: Any) -> Any:
        names = getattr(item, "free_symbols", set())
        return (
            item.subs({name: sympy.I for name in names}) if list(map(str, names)) == ["i"] else item
        )

    return [unit(item) for item in parsed]


def _same_size(gold: Any, target: Any) -> bool:
    """False for two numbers that only agree in being tiny: 1/2004! and 1/2005!."""
    try:
        if gold.is_number and target.is_number:
            gold, target = gold.doit(), target.doit()
            return gold == target or bool(abs((gold - target) / gold).evalf(6) < 1e-4)
    except (AttributeError, TypeError):  # sets, relations, words
        pass
    return True


@functools.lru_cache(maxsize=256)
def _parse(normal: str) -> tuple:
    from math_verify import parse

    return tuple(parse(f"${normal}$", parsing_timeout=None))  # type: ignore[arg-type]


def main() -> None:
    """Serves requests; ends when the parent's end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # no handler: the kernel ends the process
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    sys.stdout = sys.stderr  # a library that prints must not break the protocol
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable(logging.CRITICAL)
    equal("x+1", "1+x")  # imports sympy and builds the parser
    replies.write('{"ready": true}\n')
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        try:
            result = equal(request["reference"], request["answer"])
        except Exception:  # says so: a new process would take seconds to start
            result = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps({"equal": result}) + "\n")


if __name__ == "__main__":
    main()
