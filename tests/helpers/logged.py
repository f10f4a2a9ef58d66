"""A run directory whose numbers go to loggers."""

from __future__ import annotations

import io
import math
import socket
from pathlib import Path

import pytest
from rich.console import Console

from marft_jax.cli import configure
from marft_jax.run.loggers import find_loggers
from marft_jax.run.reporters import open_reporter
from marft_jax.settings import config as config_lib


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run directory; whoever calls another machine fails."""
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    real = socket.getaddrinfo

    def local(host, *rest, **more):
        assert host in (None, "localhost", "127.0.0.1"), host
        return real(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", local)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(config_lib.dump(configure()))
    return folder


def reporter(run: Path, names, done: int = 0):
    console = Console(file=io.StringIO(), force_terminal=False)
    return open_reporter(run, 9, find_loggers(names), done, console)


def log(run: Path, name: str, *steps: int) -> None:
    with reporter(run, [name], done=steps[0] - 1) as report:
        for step in steps:
            report.log(step, {"agent/plan-er/kl": step / 2, "eval/a/pass@2": math.nan})
