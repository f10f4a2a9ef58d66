"""Last words of a run: what can be done next, in commands with its own paths."""

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


def last_words(config: Config, workflow: str) -> Iterator[str]:
    """Yields the lines that a finished run of this workflow ends with."""
    steps, run, how = config.run.steps, shlex.quote(config.run.dir), _as_started()
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


def _as_started() -> str:
    """Spells what comes before a command's name in the shell that started this process, which may
    not have the environment on its PATH: ``marft``, or the interpreter."""
    is_marft = os.path.basename(sys.argv[0]) == "marft"
    program = os.path.abspath(sys.argv[0] if is_marft else sys.executable)
    folder, own = os.path.split(program)
    shown = shlex.quote(program)
    for name in (own, "marft" if is_marft else "python"):
        found = shutil.which(name) or ""
        if os.path.dirname(found) == folder and os.path.samefile(found, program):
            shown = name
    return f"{shown} " if is_marft else f"{shown} -m marft_jax."
