"""Commands to run after a training, with the paths of the run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from marft_jax.config import Config
from marft_jax.team.workflows import NEED_ENV


def next_steps(config: Config, workflow: str) -> Iterator[str]:
    """Yields the lines that a finished run prints last.

    Args:
        workflow: the workflow that was played; some offer no chat.
    """
    steps, run = config.run.steps, shlex.quote(config.run.dir)
    yield f"done: {steps} steps in {config.run.dir}; to go on: --run.steps {2 * steps}"
    if config.algo.recorded:
        yield f"next, with the settings of this start: train --lora.init {run} --run.dir ANOTHER"
    page = shlex.quote(str(Path(config.run.dir) / "report.html"))
    commands = {
        "held-out tasks": f"evaluate --run {run}",
        "ask the team": f"chat --run {run}",
        "what it wrote": f"report --run {run} --out {page}",
    }
    if workflow in NEED_ENV:
        del commands["ask the team"]
    before = "marft " if Path(sys.argv[0]).name == "marft" else "python -m marft_jax."
    yield from (f"  {task + ':':<16}{before}{command}" for task, command in commands.items())
