"""Run directories: as training leaves them, written by hand, as broken as wanted; and read back."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import pytest

from marft_jax.cli import configure
from marft_jax.run import checkpoints, loop
from marft_jax.run.manifest import manifest_of
from marft_jax.settings import config as config_lib
from marft_jax.settings.setting import replaced

TEAM = """
workflow: sequential
agents:
- {name: planner, prompt: Plan it., answers: false}
- {name: solver, prompt: Solve it., answers: true}
"""
START = {
    "step": 1, "event": "start", "time": "2026-01-01 10:00:00", "derived": [],
    "what": "appo: planner, solver (sequential) on tiny", "where": "cpu mesh 1x1x1",
}  # fmt: skip
EVENTS = [
    START,
    {"step": 2, "event": "outside", "kind": "kl", "who": "solver", "rollbacks": 0},
    {"step": 2, "event": "warning", "time": "2026-01-01 10:00:05", "text": "no gradient"},
]  # fmt: skip


def turn(agent: str, text: str, **more: Any) -> dict[str, Any]:
    system = {"planner": "Plan it.", "solver": "Solve it."}.get(agent, "")
    numbers = {"reward": 0.0, "value": 0.5, "advantage": -0.25}
    row = {"agent": agent, "step": 0, "prompt": f"<system>{system}<user>task<assistant>"}
    rest = {"text": text, "tokens": [0, 3], "sees": [], "truncated": False, "answers": False}
    return row | rest | numbers | more


def episode(index: int, texts: Sequence[str], reward: float = 1.0, **more: Any) -> dict[str, Any]:
    verdict = {"agent": "solver", "verdict": "right" if reward else "wrong", "answer": "6"}
    info = {"reference": "7", "verdicts": [verdict]}
    answer = turn("solver", texts[1], answers=True, sees=[0], reward=reward)
    return {
        "index": index, "group": index, "member": 0, "task": f"task {index}", "reward": reward,
        "D": [[0, 0], [1, 0]], "turns": [turn("planner", texts[0]), answer],
        "results": [{"reward": reward, "done": True, "info": info}],
    } | more  # fmt: skip


def lines(file: Path, rows: Sequence[Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(folder: Path, seed: int = 0, steps: Sequence[int] = (1, 2, 3)) -> Path:
    """A whole run of few steps: every task comes again at every step, in samples of two."""
    config = replaced(configure(), "run.seed", seed)
    config = replaced(config, "run.steps", max(steps))
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config_lib.dump(config))
    (folder / "team.yaml").write_text(TEAM)
    lines(folder / "events.jsonl", EVENTS)
    agents = {"agent/planner/entropy": 0.5, "agent/solver/entropy": 0.25, "time/step_s": 30.0}
    rows = [{"step": s, "reward/mean": s / 10 + seed, **agents} for s in steps]
    lines(folder / "metrics.jsonl", rows)
    os.utime(folder / "metrics.jsonl", (0, 1767261660))  # 2026-01-01 10:01 in UTC
    for step in steps:
        sampled = [
            episode(task, [f"plan at {step}", f"answer at {step}"], float(m == task), member=m)
            for task in range(2)
            for m in range(2)
        ]
        lines(folder / "transcripts" / f"{step}.jsonl", sampled)
    saved = folder / "checkpoints" / "3"
    lines(saved / "meta.json", [{"metric": 0.3, "versions": {"jax": "1"}}])
    lines(saved / "manifest.json", [manifest_of(saved)])
    for who in ("", "-single_agent"):
        played = [
            episode(i, ["p", "s"], float(i > 1), benchmark="sums", sample=0) for i in range(4)
        ]
        lines(folder / "evaluations" / f"sums-3{who}.jsonl", played)
    return folder


def lines_of(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock and the machine decide."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = re.compile(r"time/|throughput/|device/")
    return [{k: v for k, v in row.items() if not measured.match(k)} for row in rows]


def arrays_of(run: Path, step: int) -> Any:
    """Every array of a checkpoint, on the host."""
    folder = run / "checkpoints" / str(step) / "state"
    return jax.device_get(ocp.StandardCheckpointer().restore(folder.absolute()))


class Killed(BaseException):
    """Ends a run as SIGKILL would: nothing is saved on the way out."""


@contextlib.contextmanager
def killed_after(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kills the run that is trained inside, after this step has been learned and before it is
    reported or saved."""
    report = loop.report

    def dying(run: Any, state: Any, *args: Any) -> Any:
        if int(state.step) == step:
            patch.setattr(checkpoints.Checkpoints, "flush", lambda self: None)  # not on the way out
            raise Killed
        return report(run, state, *args)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(loop, "report", dying)
        yield
