"""Process that makes and scores tasks of reasoning-gym: JSON lines in, JSON lines out.

    {"seed": 3}                  ->  {"question": "...", "answer": "..."}
    {"seed": 3, "text": "1+2"}   ->  {"score": 0.01}

Some scorers evaluate what they are given as an expression. So once the library is there, this
process can start no other, open no connection, and write no file; and it is killed when late.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from marft_jax.envs.worker_side.serving import Answer, Line, serve
from marft_jax.plugins import load_extra

_MEMORY, _CPU_SECONDS = 4 << 30, 1 << 30


def _prepare(_: Line) -> Answer:
    import reasoning_gym  # pyright: ignore[reportMissingImports]

    name, settings = sys.argv[1], json.loads(sys.argv[2])

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        dataset = reasoning_gym.create_dataset(name, seed=request["seed"], size=1, **settings)
        entry = dataset[0]
        if "text" in request:
            return {"score": float(dataset.score_answer(request["text"], entry))}
        return {"question": entry["question"], "answer": str(entry["answer"])}

    answer({"seed": 0})  # imports what the task needs, or fails now
    limits = load_extra("sandbox.limits")
    with contextlib.suppress(OSError, ValueError):
        limits.limit(_MEMORY, _CPU_SECONDS, 0)
        limits.restrict()
    return answer


if __name__ == "__main__":
    serve(_prepare)
