"""Reports of a run: ``metrics.jsonl``, ``log.txt``, ``events.jsonl``, loggers and a display.

    with open_reporter("runs/quickstart", total_steps=60) as reporter:
        reporter.log(1, {"reward/mean": 0.4, "agent/solver/entropy": 0.9})
        reporter.event("saved checkpoint 10")

A step's metrics are a flat mapping from name to number.
"""

from __future__ import annotations

import contextlib
import datetime
import fnmatch
import logging
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import progress
from rich.console import Console
from rich.text import Text

from marft_jax.errors import logged_to, printable
from marft_jax.formats import jsonlines
from marft_jax.run.loggers import MakeWriter, Writer

LOGGER = logging.getLogger("marft_jax")
FROM_BASE = "follow from the base and other settings: "
"""Begins the line of settings that nobody gave, such as the learning rate."""


class JsonLines:
    """Writer of ``metrics.jsonl``: a JSON object per step; a number that is not finite is null."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        jsonlines.keep_steps_before(run_dir / "metrics.jsonl", first_step)
        self._file = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(jsonlines.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())  # a checkpoint of this step must not outlive its line

    def close(self) -> None:
        self._file.close()


_LINE = {
    "reward": ("reward/mean", ".3f"),
    "kl": ("agent/*/approx_kl", ".1e"),
    "loss": ("agent/*/loss", ".3f"),
    "entropy": ("agent/*/entropy", ".3f"),
    "cut": ("agent/*/truncated", ".0%"),
    "tok/s": ("throughput/action_tokens_per_s", ",.0f"),
}
"""Line of a step: label to (pattern of metrics, whose mean is shown; format)."""


class Reporter(logging.Handler):
    """Writes all reports of a run, and prints log records; a terminal also shows a bar.

    When its terminal or pipe is closed, it prints nothing more. See ``open_reporter``.
    """

    def __init__(
        self,
        run_dir: Path,
        total_steps: int,
        loggers: Sequence[MakeWriter],
        done: int,
        console: Console,
    ) -> None:
        super().__init__()
        self._run_dir, self._total, self._console = run_dir, total_steps, console
        self._kinds = [JsonLines, *loggers]
        self._writers: list[Writer] = []
        self._stepped = time.monotonic()
        self._seconds: deque[float] = deque(maxlen=20)
        self._bar = progress.Progress(
            progress.TextColumn("training"),
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[left]} left  {task.description}"),
            console=console,
            disable=console.quiet or not console.is_terminal,
            refresh_per_second=2,
        )
        self._steps = self._bar.add_task("", total=total_steps, left="?")
        self.rewind(done + 1)
        with self._until_gone():
            self._bar.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Reports the numbers of a finished step; ``metrics.jsonl`` has them when this returns.

        A number is a Python number or an array of one element."""
        numbers = {name: np.asarray(value).item() for name, value in metrics.items()}
        for writer in self._writers:
            writer.write(step, numbers)
        line = self._line(step, numbers)
        LOGGER.info("%s", line.plain, extra={"styled": line})

    def rewind(self, step: int) -> None:
        """Deletes the reports of this step and later ones, which will be repeated."""
        self._close_writers()
        try:
            for kind in self._kinds:
                self._writers.append(kind(self._run_dir, step))
        except BaseException:
            self._close_writers()
            raise
        self._bar.update(self._steps, completed=step - 1)

    def event(self, text: str) -> None:
        """Prints a line to ``log.txt`` and the display."""
        LOGGER.info("%s", text)

    def doing(self, text: str, done: int = 0, total: int = 0) -> None:
        """Shows the current work and its progress beside the bar."""
        count = f" {done}/{total}" if total else ""
        self._bar.update(self._steps, description=text + count)

    def emit(self, record: logging.LogRecord) -> None:
        text = getattr(record, "styled", None) or printable(self.format(record))
        with self._until_gone():
            self._console.print(text, markup=False, soft_wrap=True)

    def finish(self) -> None:
        """Closes the writers and the bar; log records are still printed.

        Not ``close``, which ``logging`` calls on every handler when a library configures it anew.
        """
        self._close_writers()
        if not self._console.quiet:
            with self._until_gone():
                self._bar.stop()

    def _close_writers(self) -> None:
        while self._writers:
            self._writers.pop().close()

    def _line(self, step: int, metrics: Mapping[str, float]) -> Text:
        """Returns the line of a finished step. The time left uses the median of the latest steps,
        so that a step with compilation counts little."""
        now = time.monotonic()
        self._seconds.append(now - self._stepped)
        self._stepped = now
        left = clock(statistics.median_low(self._seconds) * max(self._total - step, 0))
        self._bar.update(self._steps, completed=step, left=left)
        parts = {label: _mean(metrics, *mean) for label, mean in _LINE.items()}
        del parts["loss" if parts["loss"] == "-" else "kl"]  # demonstrations have no KL
        parts = {"step": f"{step}/{self._total}", **parts, "left": left}
        return Text("  ").join(Text.assemble((k, "dim"), " ", v) for k, v in parts.items())

    @contextlib.contextmanager
    def _until_gone(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SystemExit):  # a pipe that nobody reads: rich would leave
            self._console.quiet = True


@contextlib.contextmanager
def open_reporter(
    run_dir: str | Path,
    total_steps: int,
    loggers: Sequence[MakeWriter] = (),
    done: int = 0,
    console: Console | None = None,
) -> Iterator[Reporter]:
    """Opens the reports of a run. While they are open, log records of the package go to the run's
    ``log.txt`` and to the terminal; logging is restored at the end.

    Args:
        total_steps: training steps of the whole run, earlier starts included.
        loggers: further writers, see ``find_loggers``.
        done: finished steps; reports of later steps by an earlier start are deleted.
        console: where lines are printed; stdout by default.
    """
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(run_dir / "log.txt", encoding="utf-8")
    file.handleError = lambda record: None  # metrics.jsonl meets the same full disk, and says so
    file.setFormatter(_OneLine("%(asctime)s %(levelname)s %(message)s"))
    console = console or Console(highlight=False)
    with contextlib.ExitStack() as stack:
        stack.callback(file.close)
        reporter = Reporter(run_dir, total_steps, loggers, done, console)
        stack.enter_context(logged_to(file, reporter))
        stack.callback(reporter.finish)
        yield reporter


class _OneLine(logging.Formatter):
    """Formats a record as one entry: further lines are indented, so that they start no entry."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record)).replace("\n", "\n    ")


def _mean(metrics: Mapping[str, float], pattern: str, form: str) -> str:
    values = [value for name, value in metrics.items() if fnmatch.fnmatchcase(name, pattern)]
    return format(statistics.fmean(values), form) if values else "-"


class Events(logging.Handler):
    """Writer of ``events.jsonl``: an object per line with ``event``, the ``step`` that it belongs
    to, ``time``, and what the event tells. In a ``with`` it also writes warnings of the log.

    Attributes:
        step: the step that is being made.
        rollbacks: rollbacks of the run so far; a step that is repeated after one is another step.
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__(logging.WARNING)
        self._file = run_dir / "events.jsonl"
        self.step, self.rollbacks = 1, 0

    def __enter__(self) -> Events:
        LOGGER.addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        LOGGER.removeHandler(self)

    def note(self, event: str, **more: Any) -> None:
        now = datetime.datetime.now().isoformat(" ", "seconds")
        row = {"step": self.step, "rollbacks": self.rollbacks, "event": event, "time": now}
        jsonlines.append(self._file, [jsonlines.dumps(row | more)])

    def emit(self, record: logging.LogRecord) -> None:
        self.note("warning", text=self.format(record))

    def forget_after(self, step: int) -> None:
        """Deletes the events of later steps, which will be made again."""
        now = (self.rollbacks, step)
        jsonlines.keep(self._file, lambda row: (row["rollbacks"], row["step"]) <= now)
        self.step = step + 1


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
