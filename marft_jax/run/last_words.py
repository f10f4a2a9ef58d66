"""Last words of a run: what can be done next, in commands with its own paths."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from marft_jax.config import Config
from marft_jax.run.loggers import ways_to_look


def last_words(config: Config) -> Iterator[str]:
    """Yields the lines that a finished run ends with."""
    steps, run = config.run.steps, shlex.quote(config.run.dir)
    yield f"done: {steps} steps in {config.run.dir}; to go on: --run.steps {2 * steps}"
    if config.algo.recorded:
        yield f"next, with the settings of this start: train --lora.init {run} --run.dir ANOTHER"
    page = shlex.quote(str(Path(config.run.dir) / "report.html"))
    for task, command in {
        "held-out tasks": f"evaluate --run {run}",
        "ask the team": f"chat --run {run}",
        "what it wrote": f"report --run {run} --out {page}",
    }.items():
        yield f"  {task + ':':<16}python -m marft_jax.{command}"
    for name, way in ways_to_look(config.run.loggers, Path(config.run.dir)):
        yield f"  {name + ':':<16}{way}"
