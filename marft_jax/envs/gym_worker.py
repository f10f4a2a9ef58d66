"""A process that makes and scores tasks of reasoning-gym: JSON lines in, JSON lines out.

    {"seed": 3}                  ->  {"question": "...", "answer": "..."}
    {"seed": 3, "text": "1+2"}   ->  {"score": 0.01}

Some scorers evaluate what they are given as an expression. So once the library is there, this
process can start no other, open no connection, and write no file; and it is killed when late.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import Any

from marft_jax.envs.sandbox.guest import filter as limits

_MEMORY, _CPU_SECONDS = 4 << 30, 1 << 30


def main() -> None:
    """Serves requests for the task and settings of the command line, until the pipe closes."""
    name, settings = sys.argv[1], json.loads(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # no handler: the kernel ends the process
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    sys.stdout = sys.stderr  # a library that prints must not break the protocol
    import reasoning_gym  # pyright: ignore[reportMissingImports]

    def made(seed: int) -> tuple[Any, dict[str, Any]]:
        dataset = reasoning_gym.create_dataset(name, seed=seed, size=1, **settings)
        return dataset, dataset[0]

    made(0)  # imports what the task needs, or fails now
    with contextlib.suppress(OSError, ValueError, ImportError):
        limits.limit(_MEMORY, _CPU_SECONDS, 0)
        limits.restrict()
    replies.write('{"ready": true}\n')
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        dataset, entry = made(request["seed"])
        if "text" in request:
            reply = {"score": float(dataset.score_answer(request["text"], entry))}
        else:
            reply = {"question": entry["question"], "answer": str(entry["answer"])}
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
