"""Shows how far long work is: a bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import math
import time
from typing import Any

from rich import progress
from rich.console import Console
from rich.text import Text

from marft_jax.errors import printable

LINE_SECONDS = 10.0
"""Seconds between two lines about the same work, where there is no terminal."""


def clock(seconds: float) -> str:
    """``7.4`` as ``0:07``, ``3725`` as ``1:02:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Bar(progress.Progress):
    """Progress bar of rich that shows nothing without a terminal, but still estimates times."""

    def __init__(self, *columns: progress.ProgressColumn, console: Console, **settings: Any):
        super().__init__(
            *columns,
            console=console,
            disable=console.quiet or not console.is_terminal,
            speed_estimate_period=math.inf,
            get_time=lambda: time.monotonic(),
            **settings,
        )
        self.spoke = time.monotonic()

    def is_late(self) -> bool:
        """True without a terminal, when nothing was printed for ``LINE_SECONDS``."""
        return self.disable and time.monotonic() - self.spoke > LINE_SECONDS


def line_of(task: progress.Task, unit: str = "") -> str:
    """``loading 3/8, 0:12 left``; without the time as long as nothing gives an estimate."""
    left = "" if task.time_remaining is None else f", {clock(task.time_remaining)} left"
    return f"{task.description} {task.completed:.0f}/{task.total or 0:.0f}{unit}{left}"


class Progress(Bar):
    """Progress of one piece of work.

    with Progress("loading", console, " MiB") as progress:
        progress(3, 272)
    """

    def __init__(self, what: str, console: Console, unit: str = "") -> None:
        text = progress.TextColumn("{task.fields[line]}", markup=False)
        super().__init__(progress.SpinnerColumn(), text, console=console, transient=True)
        self._unit, self._work = unit, self.add_task(printable(what), line=printable(what))

    def __call__(self, done: int, total: int, note: str = "") -> None:
        self.update(self._work, completed=done, total=total)
        line = printable(line_of(self.tasks[0], self._unit) + note)
        self.update(self._work, line=line)
        if self.is_late():
            self.spoke = time.monotonic()
            self.console.print(Text(line), soft_wrap=True)
