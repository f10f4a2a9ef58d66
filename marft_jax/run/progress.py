"""Says how far long work is, and how long it will still take."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.text import Text

from marft_jax.errors import printable

LINE_SECONDS = 10.0
"""Between two lines about one and the same thing, where there is no terminal."""


def clock(seconds: float) -> str:
    """``7.4`` as ``0:07``, ``3725`` as ``1:02:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Pace:
    """Estimate of how long work of equal parts will still take: as long for each as since the first
    call."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def line(self, what: str, done: int, total: int, unit: str = "") -> str:
        """``what 3/8, 0:12 left``; no time as long as there is nothing to go by."""
        now = time.monotonic()
        before, began = self._first = self._first or (done, now)
        left = (now - began) / max(done - before, 1) * (total - done)
        return f"{what} {done}/{total}{unit}" + (f", {clock(left)} left" if done > before else "")


class Progress:
    """Shows how far work is: in place on a terminal, elsewhere as a line now and then.

    with Progress("loading", console) as progress:
        progress(3, 272)
    """

    def __init__(self, what: str, console: Console, unit: str = "") -> None:
        self._what, self._console, self._pace, self._unit = what, console, Pace(), unit
        self._status = console.status(Text(printable(f"{what} ...")))
        self._shows, self._spoke = console.is_terminal and not console.quiet, time.monotonic()

    def __call__(self, done: int, total: int, note: str = "") -> None:
        line = Text(printable(self._pace.line(self._what, done, total, self._unit) + note))
        if self._shows:
            self._status.update(line)
        elif time.monotonic() - self._spoke > LINE_SECONDS:
            self._spoke = time.monotonic()
            self._console.print(line, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._shows:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._shows:
            self._status.stop()
