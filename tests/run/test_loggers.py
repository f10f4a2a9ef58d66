"""Loggers: no run of a logger has a step twice, whatever ends a training; no network."""

from __future__ import annotations

import io
import math
import socket
import sqlite3
import sys
from pathlib import Path

import pytest
from rich.console import Console

from marft_jax import config as config_lib
from marft_jax.cli import configure
from marft_jax.errors import BadInput
from marft_jax.run import loggers
from marft_jax.run.loggers import find_loggers
from marft_jax.run.next_steps import next_steps
from marft_jax.run.reporters import open_reporter


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


def in_wandb(run: Path) -> list[tuple[str, int]]:
    """Runs and steps in the files of wandb, a log of records in blocks."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb"), key=lambda f: f.stat().st_mtime):
        data, at, title = file.read_bytes(), 7, ""
        while at < len(data):
            size = int.from_bytes(data[at + 4 : at + 6], "little")
            record = Record.FromString(data[at + 7 : at + 7 + size])
            at += 7 + size
            if record.WhichOneof("record_type") == "run":
                title = f"{record.run.display_name} {record.run.run_id}"
            elif record.WhichOneof("record_type") == "history":
                row = {"/".join(i.nested_key): i.value_json for i in record.history.item}
                assert float(row["agent/plan-er/kl"]) == record.history.step.num / 2
                found.append((title, record.history.step.num))
    return found


def in_sqlite(file: Path, query: str) -> list[tuple]:
    with sqlite3.connect(file) as base:
        return base.execute(query).fetchall()


READ = {
    "wandb": in_wandb,
    "trackio": lambda run: in_sqlite(
        run.parent / "trackio" / "marft_jax.db",
        "select run_name || run_id, step from metrics where cast(metrics as text) like '%plan-er%' "
        "order by id",
    ),
    "mlflow": lambda run: in_sqlite(
        run / "mlflow.db",
        "select name || run_uuid, step from metrics join runs using (run_uuid) "
        "where key = 'agent/plan-er/kl' and value = step / 2.0 order by start_time, step",
    ),
}


@pytest.mark.parametrize("name", READ)
def test_a_run_of_a_logger_has_each_step_once(name, run):
    pytest.importorskip(name)
    log(run, name, 1, 2)
    log(run, name, 3)  # another start
    with reporter(run, [name], done=3) as report:
        report.rewind(2)  # the guard took steps 2 and 3 back
        report.log(2, {"agent/plan-er/kl": 1.0})
    log(run, name, 2)  # as after a kill: steps that no checkpoint had come again
    found: dict[str, list[int]] = {}
    for title, step in READ[name](run):
        found.setdefault(title, []).append(step)
    assert sorted(found.values()) == [[1, 2], [2], [2], [3]]
    for title, steps in found.items():
        assert title.startswith(f"run from step {steps[0]}" if steps[0] > 1 else "run")
    if name == "mlflow":
        [lr, *_] = in_sqlite(run / "mlflow.db", "select value from params where key = 'algo.lr'")
        assert lr == ("auto",)


@pytest.mark.parametrize(
    ("started", "shown"), [("train.py", "python -m marft_jax."), ("/usr/bin/marft", "marft ")]
)
def test_a_run_ends_with_its_own_next_commands(monkeypatch, started, shown):
    monkeypatch.setattr(sys, "argv", [started])
    own = {"dir": "runs/my sums", "steps": 5}
    assert list(next_steps(configure(run=own), "sequential")) == [
        "done: 5 steps in runs/my sums; to go on: --run.steps 10",
        f"  held-out tasks: {shown}evaluate --run 'runs/my sums'",
        f"  ask the team:   {shown}chat --run 'runs/my sums'",
        f"  what it wrote:  {shown}report --run 'runs/my sums' --out 'runs/my sums/report.html'",
    ]


@pytest.mark.parametrize("workflow", ["program", "players"])
def test_chat_is_not_offered_where_no_question_can_be_asked(workflow):
    assert not any("marft_jax.chat" in line for line in next_steps(configure(), workflow))


class Mine:
    """A logger of one's own."""

    written: list[tuple[int, dict[str, float]]] = []

    def __init__(self, run_dir: Path, first_step: int) -> None:
        self.written.append((first_step, {}))

    def write(self, step, metrics):
        self.written.append((step, dict(metrics)))

    def close(self):
        pass


def test_a_logger_of_ones_own_is_found_by_name(run):
    log(run, f"{__name__}:Mine", 3)
    assert [step for step, _ in Mine.written] == [3, 3]
    assert Mine.written[1][1]["agent/plan-er/kl"] == 1.5


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
@pytest.mark.parametrize("used", [True, False])
def test_a_logger_whose_package_is_missing_says_how_to_install_it(
    name, used, monkeypatch, tmp_path
):
    if used:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(BadInput, match=rf'{name} is not installed: pip install -e "\.\[{name}\]"$'):
        find_loggers([name])[0](tmp_path, 1)


def test_a_logger_that_is_none_or_not_installed_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()  # as wandb leaves one where it was used
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(BadInput, match="expected tensorboard, wandb, trackio, mlflow or package"):
        find_loggers(["wandbb"])
    with pytest.raises(BadInput, match=r"wandb: cannot be opened: .*wandb"):
        find_loggers(["tensorboard", "wandb"])[1](tmp_path, 1)


def test_a_package_that_fails_later_ends_its_logging_and_not_the_run(run, monkeypatch):
    def fail(step, metrics):
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(loggers._BUILT_IN, "wandb", lambda *_: loggers.Package(fail, list))
    log(run, "wandb", 1, 2)
    said = (run / "log.txt").read_text()
    assert (
        said.count("wandb: no more steps are logged there: ConnectionError: no route to host") == 1
    )
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2

    def broken(*_):
        raise RuntimeError("no API key")

    monkeypatch.setitem(loggers._BUILT_IN, "wandb", broken)
    with pytest.raises(BadInput, match="--run.loggers wandb: cannot be opened: RuntimeError: no A"):
        log(run, "wandb", 3)
