"""What a run tells while it trains: ``metrics.jsonl``, TensorBoard, ``log.txt`` and a display.

    with Reporter("runs/quickstart", total_steps=60) as reporter:
        reporter.log(1, {"reward/mean": 0.4, "agent/solver/entropy": 0.9})
        reporter.event("saved checkpoint 10")

A step's metrics are a flat mapping from name to number. A writer is anything with ``write`` and
``close``; another destination is one more of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from marft_jax.formats import jsonlines
from marft_jax.printable import printable

LOGGER = logging.getLogger("marft_jax")


class Writer(Protocol):
    """Where the numbers of a step go."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def rewind(self, step: int) -> None: ...

    def close(self) -> None: ...


class Reporter:
    """Everything that a run reports, behind one value; use it in a ``with``.

    While it is open, what any module of the package says through ``logging`` also goes to the
    run's ``log.txt`` and to the display.

    Args:
        run_dir: the run directory; made when missing.
        total_steps: the training steps of the whole run, earlier starts included.
        tensorboard: also write TensorBoard event files.
        resume_step: the first step that this start will log; what an earlier start wrote about
            it and later ones is dropped.
        console: where the display goes; stdout by default.

    Attributes:
        step: the last step that was reported.
    """

    def __init__(
        self,
        run_dir: str | Path,
        total_steps: int,
        tensorboard: bool = True,
        resume_step: int = 0,
        console: Console | None = None,
    ) -> None:
        self._run_dir = Path(run_dir)
        self._total_steps = total_steps
        self._tensorboard = tensorboard
        self._resume_step, self.step = resume_step, max(resume_step - 1, 0)
        self._console = console or Console(highlight=False)
        self._writers: list[Writer] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            display = Display(self._console, self._total_steps, self.step)
            self._display = display
            stack.callback(display.close)
            stack.enter_context(_logging_to(self._run_dir / "log.txt", display))
            for writer in self._files():
                stack.callback(writer.close)
                self._writers.append(writer)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Gives the numbers of a finished step to every writer; ``metrics.jsonl`` has them at once.

        Args:
            step: how many training steps are done, this one included.
            metrics: name to number: a Python number, or an array of one element.
        """
        numbers = {name: _number(value) for name, value in metrics.items() if name != "step"}
        for writer in self._writers:
            writer.write(step, numbers)
        self.step = step
        line = self._display.advance(step, numbers)
        LOGGER.info("%s", line.plain, extra={"styled": line})

    def rewind(self, step: int) -> None:
        """Drops what was reported about this step and later ones, which will come again."""
        for writer in self._writers:
            writer.rewind(step)
        self.step = step - 1
        self._display.rewind(step)

    def event(self, text: str) -> None:
        """Says something once, in ``log.txt`` and on the display."""
        LOGGER.info("%s", text)

    def doing(self, text: str, done: int = 0, total: int = 0) -> None:
        """Shows on the display what goes on right now: beside the bar, and without one as a line
        when it takes long.

        Args:
            text: a word or a few.
            done, total: how much of it is done, where that is known.
        """
        self._display.doing(f"{text} {done}/{total}" if total else text, quiet=not done)

    def _files(self) -> Iterator[Writer]:
        yield JsonLines(self._run_dir / "metrics.jsonl", self._resume_step)
        if self._tensorboard:
            yield TensorBoard(self._run_dir / "tensorboard", self._resume_step)


class JsonLines:
    """One JSON object per step, flushed each step; a number that is not finite becomes null."""

    def __init__(self, path: Path, resume_step: int) -> None:
        self._path = path
        self._open(resume_step)

    def _open(self, resume_step: int) -> None:
        jsonlines.keep_steps_before(self._path, resume_step)
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(jsonlines.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())  # a checkpoint of this step must not outlive its line

    def rewind(self, step: int) -> None:
        self._file.close()
        self._open(step)

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Every metric as a scalar; what an earlier start wrote from ``resume_step`` on is purged.

    Events are written where ``write`` is called and flushed each step: a disk that is full raises
    there, and no thread or clock takes part.
    """

    def __init__(self, folder: Path, resume_step: int) -> None:
        self._folder, self._opened = folder, 0
        self._open(resume_step)

    def _open(self, resume_step: int) -> None:
        # slow to import, and only needed here
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        self._folder.mkdir(parents=True, exist_ok=True)
        suffix = f".{os.getpid()}.{self._opened}"  # two files of one second are two files
        self._file = EventsWriter(str(self._folder / "events"), suffix)
        self._opened += 1
        self._event: Any = getattr(event_pb2, "Event")  # noqa: B009 (made at run time)
        start = {"status": 1}  # SessionLog.START
        self._file.write_event(
            self._event(step=resume_step, wall_time=time.time(), session_log=start)
        )

    def rewind(self, step: int) -> None:
        self._file.close()
        self._open(step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboardX.summary import scalar

        for name, value in metrics.items():
            event = self._event(step=step, wall_time=time.time(), summary=scalar(name, value))
            self._file.write_event(event)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


_LINE_SECONDS = 10.0  # between two lines about one and the same thing


class Display:
    """One line per step; on a terminal also a bar with the time left, below the lines.

    A display that is gone (a closed terminal, a pipe that nobody reads) shows nothing more.
    """

    def __init__(self, console: Console, total_steps: int, done: int = 0) -> None:
        self._console = console
        self._total = total_steps
        self._last = self._said = time.monotonic()
        self._seconds: deque[float] = deque(maxlen=20)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]} left  {task.description}"),
            console=console,
            refresh_per_second=2,
            disable=console.quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total_steps, completed=done, left="?")
        with self._shown():
            self._bar.start()

    def advance(self, step: int, metrics: Mapping[str, float]) -> Text:
        """The line of a finished step."""
        left = clock(self._step_seconds() * max(self._total - step, 0))
        self._bar.update(self._task, completed=step, left=left)
        parts = {
            "step": f"{step}/{self._total}",
            "reward": _show(metrics.get("reward/mean"), ".3f"),
            "kl": _show(_over_agents(metrics, "approx_kl"), ".1e"),
            "loss": _show(_over_agents(metrics, "loss"), ".3f"),
            "entropy": _show(_over_agents(metrics, "entropy"), ".3f"),
            "cut": _show(_over_agents(metrics, "truncated"), ".0%"),
            "tok/s": _show(metrics.get("throughput/action_tokens_per_s"), ",.0f"),
            "left": left,
        }
        parts.pop("kl" if parts["loss"] != "-" else "loss")  # demonstrations have no KL
        return Text("  ").join(Text.assemble((k, "dim"), " ", v) for k, v in parts.items())

    def doing(self, text: str, quiet: bool) -> None:
        """Shows what goes on: beside the bar, or every ten seconds as a line unless ``quiet``."""
        self._bar.update(self._task, description=text)
        if not (quiet or self._console.is_terminal) and (
            time.monotonic() - self._said > _LINE_SECONDS
        ):
            self.say(text)

    def say(self, text: str | Text) -> None:
        """Prints a line above the bar as it is: no markup, no wrapping."""
        self._said = time.monotonic()
        with self._shown():
            self._console.print(text, markup=False, soft_wrap=True)

    def rewind(self, step: int) -> None:
        self._bar.update(self._task, completed=step - 1)

    def close(self) -> None:
        if not self._console.quiet:
            with self._shown():
                self._bar.stop()

    @contextlib.contextmanager
    def _shown(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SystemExit):  # a pipe that nobody reads: rich would leave
            self._console.quiet = True

    def _step_seconds(self) -> float:
        """The median of the latest steps, so that compilation does not count for long."""
        now = time.monotonic()
        self._seconds.append(now - self._last)
        self._last = now
        return statistics.median_low(self._seconds)


def clock(seconds: float) -> str:
    """``7.4`` as ``0:07``, ``3725`` as ``1:02:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _DisplayHandler(logging.Handler):
    """Log records as lines of the display."""

    def __init__(self, display: Display) -> None:
        super().__init__()
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        self._display.say(getattr(record, "styled", None) or printable(self.format(record)))


class _OneLine(logging.Formatter):
    """A record as one entry: what it quotes begins no line of its own."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record)).replace("\n", "\n    ")


@contextlib.contextmanager
def _logging_to(path: Path, display: Display) -> Iterator[None]:
    """Sends the package's log records to a file and the display, and in the end puts all back."""
    file = logging.FileHandler(path, encoding="utf-8")
    file.handleError = lambda record: None  # metrics.jsonl meets the same full disk, and says so
    file.setFormatter(_OneLine("%(asctime)s %(levelname)s %(message)s"))
    handlers = (file, _DisplayHandler(display))
    level, propagate = LOGGER.level, LOGGER.propagate
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False  # a handler that another package put on the root would repeat it
    for handler in handlers:
        LOGGER.addHandler(handler)
    try:
        yield
    finally:
        LOGGER.setLevel(level)
        LOGGER.propagate = propagate
        for handler in handlers:
            LOGGER.removeHandler(handler)
            handler.close()


def _over_agents(metrics: Mapping[str, float], name: str) -> float | None:
    """The mean of ``agent/<any>/<name>``, or None where no agent reports it."""
    values = [v for k, v in metrics.items() if k.startswith("agent/") and k.endswith(f"/{name}")]
    return sum(values) / len(values) if values else None


def _show(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _number(value: Any) -> float:
    return value if isinstance(value, (int, float)) else value.item()
