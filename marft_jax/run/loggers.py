"""Loggers write the numbers of a run elsewhere, besides its ``metrics.jsonl``. By name:

    tensorboard           event files in the run directory
    wandb                 files in the run directory; WANDB_MODE=online sends them
    trackio               files in ~/.cache/huggingface/trackio, or TRACKIO_DIR; TRACKIO_SPACE_ID
                          or TRACKIO_SERVER_URL sends them
    mlflow                mlflow.db in the run directory, or MLFLOW_TRACKING_URI
    package.module:Class  a ``Writer`` of your own

Without these variables nothing leaves the machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from marft_jax.errors import BadInput, described, place
from marft_jax.formats import documents
from marft_jax.plugins import load_plugin

LOGGER = logging.getLogger("marft_jax")
_PROJECT = "marft_jax"


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
    found: list[MakeWriter] = []
    for name in dict.fromkeys(names):
        make = _BUILT_IN.get(name) or load_plugin(name, "--run.loggers", _BUILT_IN, kind="Class")
        found.append(functools.partial(Logger, name, make))
    return found


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


@dataclasses.dataclass(frozen=True)
class Package:
    """Writer of a package's run.

    Each start of a training, and each rollback of the guard, begins a run of its own, named by the
    run directory and its first step, in the group of the run directory. So no run has a step twice.
    """

    write: Callable[[int, Mapping[str, float]], Any]
    close: Callable[[], Any]


def _title(run_dir: Path, first_step: int) -> str:
    return run_dir.resolve().name + (f" from step {first_step}" if first_step > 1 else "")


def _settings(run_dir: Path) -> dict[str, Any]:
    """Returns the settings of a run, by ``section.name``."""
    file = run_dir / "config.yaml"
    tree = documents.read(str(file), "--run.dir") if file.is_file() else {}
    return {f"{section}.{key}": value for section in tree for key, value in tree[section].items()}


def _wandb(library: Any, run_dir: Path, first_step: int, **more: Any) -> Package:
    """Begins a run of wandb, or of trackio, which has the same functions."""
    with _silent():
        run = library.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=_title(run_dir, first_step),
            group=run_dir.resolve().name,
            config=_settings(run_dir),
            **more,
        )

    def close() -> None:
        with _silent():
            run.finish()

    return Package(lambda step, metrics: run.log(dict(metrics), step=step), close)


def _silent() -> contextlib.AbstractContextManager[object]:
    return contextlib.redirect_stdout(io.StringIO())  # packages greet


def _make_wandb(run_dir: Path, first_step: int) -> Package:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_MODE", "offline")
    import wandb  # pyright: ignore[reportMissingImports]

    quiet = wandb.Settings(silent=True, console="off")
    return _wandb(wandb, run_dir, first_step, dir=run_dir, settings=quiet)


def _make_trackio(run_dir: Path, first_step: int) -> Package:
    import trackio

    return _wandb(trackio, run_dir, first_step, embed=False, auto_log_gpu=False, auto_log_cpu=False)


def _make_mlflow(run_dir: Path, first_step: int) -> Package:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]
    from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

    logging.getLogger("mlflow").setLevel(logging.WARNING)  # it sets its own when imported
    local = f"sqlite:///{run_dir.resolve()}/mlflow.db"
    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", local))
    project = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
    there = client.get_experiment_by_name(project)
    experiment = there.experiment_id if there else client.create_experiment(project)
    tags = {"group": run_dir.resolve().name}
    run = client.create_run(experiment, tags=tags, run_name=_title(run_dir, first_step)).info.run_id
    params = [Param(key, str(value)) for key, value in _settings(run_dir).items()]
    for first in range(0, len(params), 100):  # at most so many at once
        client.log_batch(run, params=params[first : first + 100])

    def write(step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        named = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in metrics.items()}
        client.log_batch(run, [Metric(name, value, now, step) for name, value in named.items()])

    return Package(write, lambda: client.set_terminated(run))


_BUILT_IN: dict[str, MakeWriter] = {
    "tensorboard": TensorBoard,
    "wandb": _make_wandb,
    "trackio": _make_trackio,
    "mlflow": _make_mlflow,
}
