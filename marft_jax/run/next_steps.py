"""Commands to run after a training, with the paths of the run."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from marft_jax.config import Config
from marft_jax.run.loggers import ways_to_look
from marft_jax.team.workflows import NEED_ENV


def next_steps(config: Config, workflow: str) -> Iterator[str]:
    """Yields the lines that a finished run prints last.

    Args:
        workflow: the workflow that was played; some offer no chat.
    """
    steps, run, how = config.run.steps, shlex.quote(config.run.dir), _command()
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
    for task, command in commands.items():
        yield f"  {task + ':':<16}{how}{command}"
    for name, way in ways_to_look(config.run.loggers, Path(config.run.dir)):
        yield f"  {name + ':':<16}{way}"


def _command() -> str:
    """Spells what comes before the name of a command: ``marft`` or the interpreter that runs this
    process, with its folder unless the shell finds it on its PATH."""
    is_marft = os.path.basename(sys.argv[0]) == "marft"
    program = os.path.abspath(sys.argv[0] if is_marft else sys.executable)
    name = os.path.basename(program)
    shown = name if shutil.which(name) == program else shlex.quote(program)
    return f"{shown} " if is_marft else f"{shown} -m marft_jax."
