"""Loggers: found by name, and no failure of one ends a run; the last lines of a training."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from logged import log
from logged import run as run  # a fixture

from marft_jax.cli import configure
from marft_jax.errors import BadInput
from marft_jax.extras.loggers.packages import Package
from marft_jax.run import loggers
from marft_jax.run.loggers import find_loggers
from marft_jax.run.notices import next_steps


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
        "  to serve it:    marft_jax/README.md#export-and-serve",
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


@pytest.fixture
def forgotten():
    """What is imported from a folder that looks like a package is forgotten."""
    before = set(sys.modules)
    yield
    for module in {*sys.modules} - before:
        if module.partition(".")[0] in ("wandb", "mlflow", "trackio"):
            del sys.modules[module]


@pytest.mark.usefixtures("forgotten")
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


def test_a_logger_that_is_none_is_one_line():
    with pytest.raises(BadInput, match="expected tensorboard, wandb, trackio, mlflow or package"):
        find_loggers(["wandbb"])


def test_a_package_that_fails_later_ends_its_logging_and_not_the_run(run, monkeypatch):
    def fail(step, metrics):
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(loggers._BUILT_IN, "wandb", lambda *_: Package(fail, list))
    log(run, "wandb", 1, 2)
    said = "wandb: no more steps are logged there: ConnectionError: no route to host"
    assert (run / "log.txt").read_text().count(said) == 1
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2

    def broken(*_):
        raise RuntimeError("no API key")

    monkeypatch.setitem(loggers._BUILT_IN, "wandb", broken)
    with pytest.raises(BadInput, match="--run.loggers wandb: cannot be opened: RuntimeError: no A"):
        log(run, "wandb", 3)
