"""Real training processes, killed, frozen out and stopped."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_run_that_was_killed_ends_like_one_that_was_not(repository, tmp_path):
    """At its start, in a step and in a save; ``--kills 24`` is the long form."""
    command = [sys.executable, str(repository / "scripts" / "fault_test.py"), "--kills", "3"]
    flags = ["--steps", "20", "--save-every", "2", "--dir", str(tmp_path), "--algo.episodes", "8"]
    done = subprocess.run([*command, *flags], cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "final state are equal" in done.stdout


@pytest.mark.slow
def test_a_learning_rate_1000_times_too_high_ends_with_a_normal_reward(repository, tmp_path):
    run = tmp_path / "run"
    flags = ["--algo.lr", "1.0", "--algo.episodes", "32", "--run.dir", str(run)]
    flags += ["--run.steps", "14", "--guard.patience", "2", "--guard.lr_factor", "0.001"]
    command = [sys.executable, "-m", "marft_jax.train", *flags]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 15))
    assert rows[-1]["guard/rollbacks"] == 1
    events = [json.loads(x) for x in (run / "transcripts/guard.jsonl").read_text().splitlines()]
    assert sum(event["event"] == "rolled back" for event in events) == 1
    first = sum(row["reward/mean"] for row in rows[:3]) / 3
    last = sum(row["reward/mean"] for row in rows[-5:]) / 5
    assert last > 0.6 and last > first - 0.1, (first, last)
