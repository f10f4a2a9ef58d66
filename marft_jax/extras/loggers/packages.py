"""Writers of other packages:

    wandb     files in the run directory; WANDB_MODE=online sends them
    trackio   files in ~/.cache/huggingface/trackio, or TRACKIO_DIR; TRACKIO_SPACE_ID or
              TRACKIO_SERVER_URL sends them
    mlflow    mlflow.db in the run directory, or MLFLOW_TRACKING_URI

Without these variables nothing leaves the machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from marft_jax.formats import documents

_PROJECT = "marft_jax"


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


def make_wandb(run_dir: Path, first_step: int) -> Package:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_MODE", "offline")
    import wandb  # pyright: ignore[reportMissingImports]

    quiet = wandb.Settings(silent=True, console="off")
    return _wandb(wandb, run_dir, first_step, dir=run_dir, settings=quiet)


def make_trackio(run_dir: Path, first_step: int) -> Package:
    import trackio

    return _wandb(trackio, run_dir, first_step, embed=False, auto_log_gpu=False, auto_log_cpu=False)


def make_mlflow(run_dir: Path, first_step: int) -> Package:
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
