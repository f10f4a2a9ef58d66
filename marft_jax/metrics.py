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

from marft_jax import jsonlines

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
        self._resume_step = resume_step
        self._console = console or Console(highlight=False)
        self._writers: list[Writer] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            display = Display(self._console, self._total_steps)
            stack.callback(display.close)
            stack.enter_context(_logging_to(self._run_dir / "log.txt", display))
            for writer in self._files():
                stack.callback(writer.close)
                self._writers.append(writer)
            self._writers.append(display)
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

    def rewind(self, step: int) -> None:
        """Drops what was reported about this step and later ones, which will come again."""
        for writer in self._writers:
            writer.rewind(step)

    def event(self, text: str) -> None:
        """Says something once, in ``log.txt`` and on the display."""
        LOGGER.info("%s", text)

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
    """Every metric as a scalar; what an earlier start wrote from ``resume_step`` on is purged."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        self._folder = folder
        self._open(resume_step)

    def _open(self, resume_step: int) -> None:
        from tensorboardX import SummaryWriter  # slow to import, and only needed here

        self._writer = SummaryWriter(str(self._folder), purge_step=resume_step, flush_secs=10)

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._open(step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Display:
    """One line per step; on a terminal also a bar with the time left, below the lines."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console = console
        self._total = total_steps
        self._last = time.monotonic()
        self._seconds: deque[float] = deque(maxlen=20)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]} left"),
            console=console,
            refresh_per_second=2,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total_steps, left="?")
        self._bar.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        left = clock(self._step_seconds() * max(self._total - step, 0))
        self._bar.update(self._task, completed=step, left=left)
        parts = {
            "step": f"{step}/{self._total}",
            "reward": _show(metrics.get("reward/mean"), ".3f"),
            "kl": _show(_over_agents(metrics, "approx_kl"), ".1e"),
            "entropy": _show(_over_agents(metrics, "entropy"), ".3f"),
            "tok/s": _show(metrics.get("throughput/action_tokens_per_s"), ",.0f"),
            "left": left,
        }
        self.say(Text("  ").join(Text.assemble((k, "dim"), " ", v) for k, v in parts.items()))

    def say(self, text: str | Text) -> None:
        """Prints a line above the bar as it is: no markup, no wrapping."""
        self._console.print(text, markup=False, soft_wrap=True)

    def rewind(self, step: int) -> None:
        self._bar.update(self._task, completed=step - 1)

    def close(self) -> None:
        self._bar.stop()

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
        self._display.say(self.format(record))


@contextlib.contextmanager
def _logging_to(path: Path, display: Display) -> Iterator[None]:
    """Sends the package's log records to a file and the display, and in the end puts all back."""
    file = logging.FileHandler(path, encoding="utf-8")
    file.handleError = lambda record: None  # metrics.jsonl meets the same full disk, and says so
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
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
