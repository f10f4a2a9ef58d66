"""Runs commands of the package one after another, in one process that keeps what it compiled.

Reads lines of JSON, ``[command, flags, log]``, and answers each with its exit code. On the built-in
model a process of its own for each command spends half of its time on imports and compilation.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        command, flags, log = json.loads(line)
        with open(log, "ab", buffering=0) as file:
            for terminal in (1, 2):
                os.dup2(file.fileno(), terminal)
        print(_run(command, flags), file=answers, flush=True)


def _run(command: str, flags: list[str]) -> int:
    try:
        importlib.import_module(f"marft_jax.{command}").main(flags)
    except SystemExit as left:
        return int(left.code or 0)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
