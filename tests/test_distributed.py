"""Two processes train one team as one process would, and none waits for ever for one that is
gone."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import bounds
import pytest

from marft_jax.models.weights import tiny

TEAM = """
bases: {other: {model: tiny}}
agents: [{name: planner, prompt: plan}, {name: solver, prompt: solve, answers: true, base: other}]
"""
FLAGS = ["--algo.episodes", "8", "--rollout.slots", "8", "--run.loggers", "none"]


def start(
    run: Path, steps: int, process: int | None, port: int, devices: int, log: Path, *flags: str
):
    """``python -m marft_jax.train`` as one of two processes, or alone."""
    words = [sys.executable, "-m", "marft_jax.train", "--run.dir", str(run), *FLAGS, *flags]
    words += ["--run.steps", str(steps), "--run.save_every", "1"]
    if process is not None:
        words += ["--mesh.coordinator", f"localhost:{port}", "--mesh.processes", "2"]
        words += ["--mesh.process", str(process), "--mesh.wait_seconds", "15"]
    environment = os.environ | {
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    return subprocess.Popen(
        words, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT,
        preexec_fn=end_with_the_tests,
    )  # fmt: skip


def end_with_the_tests() -> None:
    """Ends this process when the one that started it is killed (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def metrics(run: Path) -> list[dict[str, float]]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return [json.loads(line) for line in lines]


def said(run: Path, step: int) -> list[list[str]]:
    lines = (run / "transcripts" / f"{step}.jsonl").read_text().splitlines()
    return [[turn["text"] for turn in json.loads(line)["turns"]] for line in lines]


def wait_for(run: Path, steps: int, both: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    """Until it has taken so many steps, and saved the one before the last."""
    deadline, saved = time.monotonic() + 300, run / "checkpoints" / str(steps - 1)
    while not (len(metrics(run)) >= steps and saved.is_dir()) and time.monotonic() < deadline:
        assert all(process.poll() is None for process in both), [f.read_text() for f in logs[:2]]
        time.sleep(0.2)


def assert_alike(run: Path, other: Path) -> None:
    """As many steps as the other has, with the same numbers."""
    steps = len(metrics(other))
    for two, one in zip(metrics(run)[:steps], metrics(other), strict=True):
        keys = [k for k in one if not k.startswith(("time/", "throughput/", "device/"))]
        got, expected = ({k: row[k] for k in keys} for row in (two, one))
        bounds.close(got, expected, bounds.update(tiny.CONFIG), size=1.0)


@pytest.mark.slow
def test_two_processes_learn_what_one_does_and_end_when_one_dies(tmp_path):
    """The same text, losses and rewards to 1e-5; then a SIGKILL, a clear end, and a restart.

    They play ahead on devices of their own, with all that needs the others meanwhile: a second
    draw, levels, evaluations. The one process shares its devices between play and learning. Each
    agent has a base of its own, which two processes play on devices of its own.
    """
    (tmp_path / "team.yaml").write_text(TEAM)
    flags = ["--team.file", str(tmp_path / "team.yaml")]
    flags += ["--rollout.lag", "2", "--algo.name", "grpo", "--algo.group_size", "4"]
    flags += ["--algo.dynamic_sampling", "true", "--algo.max_refills", "1", "--eval.every", "2"]
    flags += ["--eval.episodes", "4", "--env.curriculum", "0.15", "--run.transcripts_every", "2"]
    port, logs = free_port(), [tmp_path / f"{i}.log" for i in range(3)]
    apart = [*flags, "--mesh.rollout", "4", "--mesh.bases", "1", "1"]
    both = [start(tmp_path / "two", 400, i, port, 4, logs[i], *apart) for i in range(2)]
    wait_for(tmp_path / "two", 4, both, logs)
    both[1].send_signal(signal.SIGKILL)
    assert both[0].wait(300) not in (0, 75)
    told = logs[0].read_text()
    assert "start all of them again" in told or "JAX distributed service" in told, told[-2000:]

    alone = start(tmp_path / "one", 4, None, port, 4, logs[2], *flags)
    assert alone.wait(300) == 0, logs[2].read_text()
    assert_alike(tmp_path / "two", tmp_path / "one")
    assert [said(tmp_path / "two", step) for step in (2, 4)] == [
        said(tmp_path / "one", step) for step in (2, 4)
    ]
    assert [row["rollout/version"] for row in metrics(tmp_path / "one")] == [0, 0, 0, 1]

    done = len(metrics(tmp_path / "two"))
    port = free_port()
    both = [start(tmp_path / "two", 400, i, port, 4, logs[i], *apart) for i in range(2)]
    wait_for(tmp_path / "two", done + 1, both, logs)
    assert "continuing after step" in logs[0].read_text()
    both[1].send_signal(signal.SIGTERM)  # one is told, both stop
    assert [process.wait(300) for process in both] == [75, 75], [f.read_text() for f in logs[:2]]
    steps = [line["step"] for line in metrics(tmp_path / "two")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > done
    assert max(int(p.name) for p in (tmp_path / "two/checkpoints").iterdir()) == len(steps)


@pytest.mark.parametrize("where, process, code, message", [
    ("localhost:{port}", "1", -signal.SIGABRT, "waiting up to 1 s for all 2 processes"),
    ("192.0.2.1:{port}", "0", 2, "192.0.2.1:{port}: expected an address of this machine"),
    ("auto", "0", 2, "--mesh.coordinator auto: the processes did not find each other"),
])  # fmt: skip
@pytest.mark.slow
def test_who_misses_another_process_says_so_and_ends(tmp_path, where, process, code, message):
    port = str(free_port())
    words = ["--mesh.coordinator", where.format(port=port), "--mesh.wait_seconds", "1"]
    if where != "auto":
        words += ["--mesh.processes", "2", "--mesh.process", process]
    train = [sys.executable, "-m", "marft_jax.train", "--run.dir", str(tmp_path / "run"), *words]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(train, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code and message.format(port=port) in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()
