"""Loggers of other packages: no run of theirs has a step twice, whatever ends a training."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from logged import log, reporter
from logged import run as run  # a fixture


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
