"""Shows how far long work is: a bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import math
import time

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


class Progress(progress.Progress):
    """Progress of one piece of work, such as ``loading 3/8 MiB, 0:12 left``.

    with Progress("loading", console, " MiB") as progress:
        progress(3, 272)
    """

    def __init__(self, what: str, console: Console, unit: str = "") -> None:
        super().__init__(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.fields[line]}", markup=False),
            console=console,
            transient=True,
            disable=console.quiet or not console.is_terminal,
            speed_estimate_period=math.inf,
            get_time=lambda: time.monotonic(),
        )
        self._what, self._unit, self._spoke = what, unit, time.monotonic()
        self._work = self.add_task(what, line=printable(what))

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Shows the numbers, the time left as soon as it can be estimated, and a note."""
        self.update(self._work, completed=done, total=total)
        left = self.tasks[0].time_remaining
        left = "" if left is None else f", {clock(left)} left"
        line = printable(f"{self._what} {done}/{total}{self._unit}{left}{note}")
        self.update(self._work, line=line)
        if self.disable and time.monotonic() - self._spoke > LINE_SECONDS:
            self._spoke = time.monotonic()
            self.console.print(Text(line), soft_wrap=True)
