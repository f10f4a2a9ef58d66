"""Loggers write the numbers of a run elsewhere, besides its ``metrics.jsonl``. By name:

tensorboard             event files in the run directory
wandb, trackio, mlflow  ``extras/loggers``
package.module:Class    a ``Writer`` of your own
"""

from __future__ import annotations

import functools
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from marft_jax.errors import BadInput, described, place
from marft_jax.plugins import extras_of, load_extra, load_plugin

LOGGER = logging.getLogger("marft_jax")


class Writer(Protocol):
    """Receives the numbers of each step. It is made with the run directory and the first step that
    it gets; what an earlier start wrote about that step and later ones is void."""

    def write(self, step: int, metrics: Mapping[str, float], /) -> None: ...

    def close(self) -> None: ...


MakeWriter = Callable[[Path, int], Writer]


def find_loggers(names: Iterable[str]) -> list[MakeWriter]:
    """Returns the function that makes a writer, for each of these names.

    Raises:
        BadInput: there is no such logger.
    """
    writers: list[MakeWriter] = []
    for name in dict.fromkeys(names):
        make = _BUILT_IN.get(name) or load_plugin(name, "--run.loggers", _BUILT_IN, kind="Class")
        writers.append(functools.partial(Logger, name, make))
    return writers


class Logger:
    """A writer that another package or a user made. What it raises later ends its logging with a
    warning, not the run.

    Raises:
        BadInput: the writer cannot be opened.
    """

    def __init__(self, name: str, make: MakeWriter, run_dir: Path, first_step: int) -> None:
        self._name = name
        try:
            self._writer: Writer | None = make(run_dir, first_step)
            if not all(callable(getattr(self._writer, name, None)) for name in ("write", "close")):
                raise BadInput("expected write(step, metrics) and close()")
        except (Exception, SystemExit) as error:
            why = f"cannot be opened: {described(error)}{place(error)}"
            there = getattr(sys.modules.get(name), "__file__", None)  # none: an empty folder
            if isinstance(error, ImportError | AttributeError) and name in _BUILT_IN and not there:
                why = f'cannot be opened: {name} is not installed: pip install -e ".[{name}]"'
            raise BadInput(f"--run.loggers {name}: {why}") from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._try("write", step, metrics)

    def close(self) -> None:
        self._try("close")

    def _try(self, method: str, *args: Any) -> None:
        if self._writer is None:
            return
        try:
            getattr(self._writer, method)(*args)
        except (Exception, SystemExit) as error:
            why = described(error) + place(error)
            LOGGER.warning("--run.loggers %s: no more steps are logged there: %s", self._name, why)
            self._writer = None


class TensorBoard:
    """Writes every metric as a scalar.

    ``write`` itself writes and flushes the events, so a full disk raises there.
    """

    def __init__(self, run_dir: Path, first_step: int) -> None:
        # slow to import, and only needed here
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        folder = run_dir / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        suffix = f".{os.getpid()}.{time.monotonic_ns()}"  # two files of one second are two files
        self._file = EventsWriter(str(folder / "events"), suffix)
        self._event: Any = getattr(event_pb2, "Event")  # noqa: B009 (made at run time)
        self._write(first_step, session_log={"status": 1})  # SessionLog.START purges what follows

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboardX.summary import scalar

        for name, value in metrics.items():
            if math.isfinite(value):  # it would warn of every other one
                self._write(step, summary=scalar(name, value))
        self._file.flush()

    def _write(self, step: int, **content: Any) -> None:
        self._file.write_event(self._event(step=step, wall_time=time.time(), **content))

    def close(self) -> None:
        self._file.close()


def _load(entry: str, run_dir: Path, first_step: int) -> Writer:
    """Makes the writer of an extra, which is imported when it is used."""
    return load_extra(entry)(run_dir, first_step)


_BUILT_IN: dict[str, MakeWriter] = {
    "tensorboard": TensorBoard,
    **{name: functools.partial(_load, f"logger.{name}") for name in extras_of("logger")},
}
