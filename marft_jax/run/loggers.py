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
import functools
import importlib.util
import io
import logging
import math
import os
import re
import secrets
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from marft_jax.errors import BadInput, described, place
from marft_jax.formats import documents, foreign, jsonlines
from marft_jax.plugins import load_plugin

LOGGER = logging.getLogger("marft_jax")
_PROJECT = "marft_jax"


SAMPLE_COLUMNS = ("step", "task", "episode", "agent", "text", "reward", "advantage")
Samples = list[list[Any]]
"""Turns of a step, as rows with these columns."""


class Writer(Protocol):
    """Receives the numbers of each step. It is made with the run directory and the first step that
    it gets; what an earlier start wrote about that step and later ones is void.

    ``write_samples(step, samples)`` is optional. It gets turns of the steps whose transcripts are
    written, before the numbers of the same step.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


MakeWriter = Callable[[Path, int], Writer]


def find_loggers(names: Iterable[str]) -> list[MakeWriter]:
    """Returns the function that makes a writer, for each of these names.

    Raises:
        BadInput: there is no such logger, or its package is not installed.
    """
    found: list[MakeWriter] = []
    for name in dict.fromkeys(names):
        if name in _PACKAGES:
            if not _is_installed(name):
                raise BadInput(
                    f"--run.loggers {name}: expected its package, which is not installed; "
                    f'pip install "marft_jax[{name}]", or leave it out'
                )
            make = functools.partial(Package, name)
        elif name == "tensorboard":
            make = TensorBoard
        else:
            make = load_plugin(name, "--run.loggers", ("tensorboard", *_PACKAGES), kind="Class")
        found.append(functools.partial(Logger, name, make))
    return found


def ways_to_look(names: Iterable[str], run_dir: Path) -> Iterator[tuple[str, str]]:
    """Yields the name of each built-in logger, with the command or place that shows its records."""
    environ, folder = os.environ, shlex.quote(str(run_dir))
    ways = {
        "tensorboard": f"tensorboard --logdir {folder}/tensorboard (pip install tensorboard)",
        "wandb": f"wandb sync {folder}/wandb/offline-run-*"
        if environ.get("WANDB_MODE", "offline") == "offline"
        else f"project {environ.get('WANDB_PROJECT', _PROJECT)} of your account",
        "trackio": environ.get("TRACKIO_SPACE_ID")
        or environ.get("TRACKIO_SERVER_URL")
        or f"trackio show --project {_PROJECT}",
        "mlflow": environ.get("MLFLOW_TRACKING_URI")
        or f"mlflow ui --backend-store-uri sqlite:///{folder}/mlflow.db",
    }
    yield from ((name, ways[name]) for name in names if name in ways)


class TensorBoard:
    """Writes every metric as a scalar; Custom Scalars has a chart with all agents per metric.

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
        self._laid_out = False
        self._write(first_step, session_log={"status": 1})  # SessionLog.START purges what follows

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboardX.summary import custom_scalars, scalar

        if not self._laid_out:
            self._laid_out = True
            self._write(step, summary=custom_scalars({"agents": _charts(metrics)}))
        for name, value in metrics.items():
            if math.isfinite(value):  # it would warn of every other one
                self._write(step, summary=scalar(name, value))
        self._file.flush()

    def _write(self, step: int, **content: Any) -> None:
        self._file.write_event(self._event(step=step, wall_time=time.time(), **content))

    def close(self) -> None:
        self._file.close()


def _charts(metrics: Iterable[str]) -> dict[str, list[Any]]:
    """Makes a chart for each metric of the agents, with a line for each agent."""
    charts: dict[str, list[Any]] = {}
    for name in metrics:
        kind, _, rest = name.partition("/")
        if kind == "agent":
            lines = charts.setdefault(rest.rpartition("/")[2], ["Multiline", []])[1]
            lines.append(f"^{re.escape(name)}$")
    return charts


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # not a mere folder of that name


class _Start(NamedTuple):
    """Run of a package to open: the run with this id, or a new run."""

    folder: Path
    id: str
    name: str
    settings: Mapping[str, Any]


class _Opened(NamedTuple):
    write: Callable[[int, Mapping[str, float]], object]
    close: Callable[[], object]
    write_samples: Callable[[int, Samples], object] = lambda step, samples: None


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
            why = f"cannot be opened: {described(error)}{place(error, own_only=True)}"
            raise BadInput(f"--run.loggers {name}: {why}") from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._try("write", step, metrics)

    def write_samples(self, step: int, samples: Samples) -> None:
        self._try("write_samples", step, samples)

    def close(self) -> None:
        self._try("close")

    def _try(self, method: str, *args: Any) -> None:
        try:
            getattr(self._writer, method, lambda *_: None)(*args)  # write_samples is optional
        except (Exception, SystemExit) as error:
            why = described(error) + place(error, own_only=True)
            LOGGER.warning("--run.loggers %s: no more steps are logged there: %s", self._name, why)
            self._writer = None


class Package:
    """Writer of another package.

    Each run of the package has every step once. ``loggers/NAME.json`` in the run directory keeps
    the id of that run and, once it is closed, its last step. A training that continues right after
    that step continues the same run. Where steps are repeated, after a kill or a rollback of the
    guard, a new run begins, named by its first step.
    """

    def __init__(self, name: str, run_dir: Path, first_step: int) -> None:
        self._last, self._file = first_step - 1, run_dir / "loggers" / f"{name}.json"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        before: dict[str, Any] = {}
        with contextlib.suppress(BadInput):
            before = foreign.read_settings(self._file)
        if before.get("last") != self._last:
            title = run_dir.resolve().name + (f" from step {first_step}" if first_step > 1 else "")
            before = {"id": secrets.token_hex(4), "name": title}
        self._kept = {key: str(before[key]) for key in ("id", "name")}
        settings = _settings(run_dir / "config.yaml")
        with _silent():
            self._open = _PACKAGES[name](_Start(run_dir, **self._kept, settings=settings))
        self._note(None)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        with _silent():
            self._open.write(step, metrics)
        self._last = step

    def write_samples(self, step: int, samples: Samples) -> None:
        with _silent():
            self._open.write_samples(step, samples)

    def close(self) -> None:
        with _silent():
            self._open.close()
        self._note(self._last)

    def _note(self, last: int | None) -> None:
        jsonlines.write(self._file, [jsonlines.dumps(self._kept | {"last": last})])


def _silent() -> contextlib.AbstractContextManager[object]:
    return contextlib.redirect_stdout(io.StringIO())  # packages greet


def _settings(file: Path) -> dict[str, Any]:
    """Returns the settings of a run, by ``section.name``."""
    tree = documents.read(str(file), "--run.dir") if file.is_file() else {}
    return {f"{section}.{key}": value for section in tree for key, value in tree[section].items()}


def _wandb(start: _Start) -> _Opened:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb  # pyright: ignore[reportMissingImports]

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", _PROJECT),
        id=start.id,
        name=start.name,
        dir=start.folder,
        config=dict(start.settings),
        mode=os.environ.get("WANDB_MODE", "offline"),  # pyright: ignore[reportArgumentType]
        resume="allow",
        settings=wandb.Settings(silent=True, console="off"),
    )

    def write_samples(step: int, samples: Samples) -> None:
        run.log({"samples": wandb.Table(list(SAMPLE_COLUMNS), samples)}, step=step)

    return _Opened(
        lambda step, metrics: run.log(dict(metrics), step=step), run.finish, write_samples
    )


def _trackio(start: _Start) -> _Opened:
    import trackio

    run = trackio.init(
        project=_PROJECT,
        name=f"{start.name} {start.id}",  # by which it is found again
        config=dict(start.settings),
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )

    def write_samples(step: int, samples: Samples) -> None:
        run.log({"samples": trackio.Table(list(SAMPLE_COLUMNS), samples)}, step=step)

    return _Opened(
        lambda step, metrics: run.log(dict(metrics), step=step), trackio.finish, write_samples
    )


def _mlflow(start: _Start) -> _Opened:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]
    from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

    logging.getLogger("mlflow").setLevel(logging.WARNING)  # it sets its own when imported
    local = f"sqlite:///{start.folder.resolve()}/mlflow.db"
    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", local))
    project = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
    there = client.get_experiment_by_name(project)
    # tables lie beside a database of ours; elsewhere the server knows where
    own = f"{start.folder.resolve()}/mlflow" if client.tracking_uri == local else None
    experiment = there.experiment_id if there else client.create_experiment(project, own)
    found = client.search_runs([experiment], f"tags.marft_jax = '{start.id}'")
    tags = {"marft_jax": start.id}
    run = (found or [client.create_run(experiment, tags=tags, run_name=start.name)])[0].info.run_id
    params = [Param(key, str(value)) for key, value in start.settings.items()]
    for first in range(0, 0 if found else len(params), 100):  # at most so many at once
        client.log_batch(run, params=params[first : first + 100])
    client.update_run(run, "RUNNING")

    def write(step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        named = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in metrics.items()}
        client.log_batch(run, [Metric(name, value, now, step) for name, value in named.items()])

    def write_samples(step: int, samples: Samples) -> None:
        columns = dict(zip(SAMPLE_COLUMNS, map(list, zip(*samples, strict=True)), strict=True))
        client.log_table(run, columns, f"samples/{step:06}.json")

    return _Opened(write, lambda: client.set_terminated(run), write_samples)


_PACKAGES: dict[str, Callable[[_Start], _Opened]] = {
    "wandb": _wandb,
    "trackio": _trackio,
    "mlflow": _mlflow,
}
