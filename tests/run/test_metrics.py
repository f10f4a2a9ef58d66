"""Metrics: strict JSON, whole files, one truth after a resume, and a display people can read."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import logging.config
import math
import re
import resource
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
from rich.console import Console

from marft_jax.errors import RunFailed
from marft_jax.formats import jsonlines
from marft_jax.run import reporters
from marft_jax.run.directory import disk_errors
from marft_jax.run.loggers import TensorBoard
from marft_jax.run.measuring import warn_without_gradient
from marft_jax.run.reporters import Progress, open_reporter


def plain_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=40)


def terminal_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80, height=20)


def shown(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def reporter(folder: Path, **settings):
    settings = {"total_steps": 5, "console": plain_console()} | settings
    return open_reporter(folder, **settings)


def read(folder: Path) -> list[dict]:
    def refuse(name: str):
        raise AssertionError(f"{name} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_each_step_is_one_object_that_is_on_disk_at_once(tmp_path):
    with reporter(tmp_path / "new" / "run") as report:
        report.log(1, {"reward/mean": 0.25, "tokens/action": 7})
        assert read(tmp_path / "new" / "run") == [
            {"step": 1, "reward/mean": 0.25, "tokens/action": 7}
        ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_a_number_that_is_not_finite_is_null_in_json(tmp_path, value):
    with reporter(tmp_path) as report:
        report.log(1, {"bad": value, "good": np.float32(0.5), "more": np.array([0.25])})
    assert read(tmp_path) == [{"step": 1, "bad": None, "good": 0.5, "more": 0.25}]


def test_resuming_drops_the_steps_that_will_be_reported_again(tmp_path):
    with reporter(tmp_path) as report:
        for step in (1, 2, 3, 4):
            report.log(step, {"x": step})
    with reporter(tmp_path, done=2) as report:
        assert [line["x"] for line in read(tmp_path)] == [1, 2]
        report.log(3, {"x": 30})
    assert [(line["step"], line["x"]) for line in read(tmp_path)] == [(1, 1), (2, 2), (3, 30)]


def test_resuming_drops_a_line_that_a_kill_left_half_written(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "x": 1}\n{"step": 2, "x"')
    with reporter(tmp_path, done=2) as report:
        report.log(3, {"x": 3})
    assert [line["step"] for line in read(tmp_path)] == [1, 3]


def test_a_line_is_what_ends_with_a_newline(tmp_path):
    """Text may hold characters that Python's ``splitlines`` takes for ends of lines."""
    jsonlines.append(tmp_path / "rows", [jsonlines.dumps({"step": 1, "x": "a\u2028b\x85c"})])
    jsonlines.keep_steps_before(tmp_path / "rows", 2)
    assert json.loads((tmp_path / "rows").read_text())["x"] == "a\u2028b\x85c"


def test_a_last_line_without_its_newline_does_not_swallow_the_next(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "x": 1}')
    with reporter(tmp_path, done=1) as report:
        report.log(2, {"x": 2})
    assert [line["step"] for line in read(tmp_path)] == [1, 2]


def test_a_write_that_fails_leaves_the_old_file_and_no_draft(tmp_path):
    path = tmp_path / "file.jsonl"
    jsonlines.write(path, ["old"])

    def lines():
        yield "new"
        raise RuntimeError("the process dies here")

    with pytest.raises(RuntimeError):
        jsonlines.write(path, lines())
    assert path.read_text() == "old\n"
    assert [file.name for file in tmp_path.iterdir()] == ["file.jsonl"]


def test_tensorboard_has_every_metric(tmp_path):
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    with reporter(tmp_path, loggers=[TensorBoard]) as report:
        report.log(1, {"reward/mean": 0.25, "agent/solver/entropy": 2.0})
        report.log(2, {"reward/mean": 0.75, "agent/solver/entropy": 1.0})
    [file] = (tmp_path / "tensorboard").iterdir()
    data, found, at = file.read_bytes(), [], 0
    while at < len(data):  # a record is: length, its checksum, the event, its checksum
        length = int.from_bytes(data[at : at + 8], "little")
        event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
        for value in event.summary.value:
            found.append((event.step, value.tag, value.simple_value))
        at += 12 + length + 4
    assert found == [
        (1, "reward/mean", 0.25), (1, "agent/solver/entropy", 2.0),
        (2, "reward/mean", 0.75), (2, "agent/solver/entropy", 1.0),
    ]  # fmt: skip


@contextlib.contextmanager
def disk_full_after(size: int):
    """No file of this process grows beyond that."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_ends_the_run_with_one_line_and_does_not_hang(tmp_path):
    with pytest.raises(RunFailed, match="cannot be written"), disk_errors(tmp_path):
        with reporter(tmp_path, loggers=[TensorBoard]) as report, disk_full_after(4096):
            for step in range(1, 1000):
                report.log(step, {f"metric/{i}": 1.0 for i in range(40)})


def test_a_clock_that_jumps_by_weeks_stops_nothing(tmp_path, monkeypatch):
    now = [1e9]
    monkeypatch.setattr(reporters.time, "time", lambda: now[0])
    with reporter(tmp_path, loggers=[TensorBoard]) as report:
        for step, now[0] in enumerate([1e9, 2e9, 1e6, 1.5e9] * 10, start=1):
            report.log(step, {"x": step})
    assert len(read(tmp_path)) == 40


def test_a_rollback_opens_another_event_file(tmp_path):
    with reporter(tmp_path, loggers=[TensorBoard]) as report:
        report.log(1, {"x": 1})
        report.rewind(1)
        report.log(1, {"x": 2})
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def test_without_a_terminal_each_step_is_one_plain_line(tmp_path):
    console = plain_console()
    with reporter(tmp_path, console=console) as report:
        report.log(2, {
            "reward/mean": 0.5, "agent/a/approx_kl": 0.001, "agent/b/approx_kl": 0.003,
            "agent/a/truncated": 0.25, "agent/a/entropy": 1.0,
            "throughput/action_tokens_per_s": 1234.5,
        })  # fmt: skip
    assert re.fullmatch(
        r"step 2/5  reward 0.500  kl 2.0e-03  entropy 1.000  cut 25%  tok/s 1,234  left 0:0\d\n",
        shown(console),
    )


def test_a_metric_that_is_missing_shows_as_a_dash(tmp_path):
    console = plain_console()
    with reporter(tmp_path, console=console) as report:
        report.log(5, {})
    assert shown(console) == "step 5/5  reward -  kl -  entropy -  cut -  tok/s -  left 0:00\n"


def test_long_work_says_how_far_it_is_and_how_long_it_takes(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(reporters.time, "monotonic", lambda: now[0])
    for console in (plain_console(), terminal_console()):
        now[0] = 0.0
        with Progress("loading m\x1bodel", console) as progress:
            for done, now[0] in enumerate([1.0, 5.0, 13.0, 14.0, 25.0]):
                progress(done, 8, ", fine")
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown(console))
        if console.is_terminal:
            assert "loading m\\x1bodel" in text and text.count("\n") < 3
        else:
            assert text.splitlines() == [
                r"loading m\x1bodel 2/8, 0:48 left, fine", r"loading m\x1bodel 4/8, 0:27 left, fine"
            ]  # fmt: skip


def test_time_left_is_the_usual_step_times_the_steps_to_go(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(reporters.time, "monotonic", lambda: now[0])
    console = plain_console()
    with reporter(tmp_path, console=console, total_steps=103) as report:
        for step, now[0] in ((1, 60.0), (2, 62.0), (3, 64.0)):
            report.log(step, {})
    assert shown(console).splitlines()[-1].endswith("left 3:20")


def test_events_and_warnings_go_to_the_log_and_the_display_once(tmp_path):
    console = plain_console()
    with reporter(tmp_path, console=console) as report:
        report.event("saved [bold]checkpoint[/bold] 10")
        logging.getLogger("marft_jax.engine").warning("cache is full")
    assert shown(console) == "saved [bold]checkpoint[/bold] 10\ncache is full\n"
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "INFO saved [bold]checkpoint[/bold] 10",
        "WARNING cache is full",
    ]


def test_what_others_wrote_can_steer_no_terminal_and_forge_no_line(tmp_path):
    console = plain_console()
    with reporter(tmp_path, console=console) as report:
        report.event("dropped: \x1b]52;c;aGk=\x07\x9b2J\n2026-01-01 00:00:00 INFO all is well")
    for text in (shown(console), (tmp_path / "log.txt").read_text()):
        assert not set(text) & {"\x1b", "\x07", "\x9b"} and r"\x1b]52;c;aGk=\x07\x9b2J" in text
    assert (tmp_path / "log.txt").read_text().splitlines()[1].startswith("    2026")


def test_a_run_that_continues_begins_its_bar_where_it_is(tmp_path):
    console = terminal_console()
    with reporter(tmp_path, console=console, done=3) as report:
        report.log(4, {"reward/mean": 0.5})
        report.doing("evaluating arithmetic", 3, 8)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown(console))
    assert "0/5" not in text and "step 4/5" in text
    assert re.search(r"training.*━.* 4/5 0:0\d left  evaluating arithmetic 3/8", text)


def test_a_display_that_is_gone_stops_nothing(tmp_path):
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(5, "Input/output error")

    for terminal in (True, False):
        console = Console(file=Gone(), force_terminal=terminal)
        with reporter(tmp_path / str(terminal), console=console) as report:
            report.log(1, {"x": 1})
            report.log(2, {"x": 1})
        assert len(read(tmp_path / str(terminal))) == 2


def test_the_log_of_an_earlier_start_is_continued(tmp_path):
    for text in ("first", "second"):
        with reporter(tmp_path) as report:
            report.event(text)
            report.log(1, {"reward/mean": 0.5})
    assert (tmp_path / "log.txt").read_text().count("INFO step 1/5  reward 0.500") == 2


def test_a_closed_reporter_leaves_logging_as_it_was(tmp_path):
    logger = logging.getLogger("marft_jax")
    before = (logger.level, logger.propagate, list(logger.handlers))
    with pytest.raises(KeyError), reporter(tmp_path):
        raise KeyError
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_a_run_directory_that_cannot_be_written_leaves_logging_as_it_was(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    logger = logging.getLogger("marft_jax")
    before = list(logger.handlers)
    with pytest.raises(OSError), reporter(tmp_path):
        pass
    assert logger.handlers == before


def test_a_library_that_configures_logging_closes_no_report(tmp_path):
    """It closes every handler that there is, as uvicorn does."""
    with reporter(tmp_path) as report:
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
        report.log(1, {"x": 1})
    assert [line["step"] for line in read(tmp_path)] == [1]


@pytest.mark.parametrize("acts", [0, 1])
def test_a_step_in_which_no_agent_that_learns_acted_is_named(acts, caplog):
    """A frozen agent alone (solo, an orchestrator that calls nobody) earns, and nothing moves."""
    team = small.team(2)
    [first, second] = team.profiles
    team = team._replace(profiles=(first, dataclasses.replace(second, trainable=False)))
    episode = small.episode(0, [small.turn(acts, [1], [2])], [1.0])
    collected: Any = types.SimpleNamespace(episodes=[episode])
    moved: Any = types.SimpleNamespace(advantages_EJ=np.ones((1, 1)))
    assert warn_without_gradient(3, collected, moved, team) == bool(acts)
    assert (f"no agent that learns acted, only {second.name}" in caplog.text) == bool(acts)
