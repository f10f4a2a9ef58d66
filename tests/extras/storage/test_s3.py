"""Runs on a server of S3: teams that are trained there, killed processes, and what is refused."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import s3_server
from buckets import metrics, newest, race
from commands import code_of
from run_files import lines_of

import marft_jax
from marft_jax import chat, cli, evaluate, export, imitate, report, train
from marft_jax.extras.storage import lock
from marft_jax.extras.storage.mirror import Mirror
from marft_jax.run.checkpoints import Checkpoints

RUN = "s3://team/runs/one"
SMALL = "--algo.episodes 8 --run.save_every 2".split()

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture
def home(monkeypatch, tmp_path):
    """Goes to a machine that has not seen the run."""
    machines = itertools.count()

    def go():
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder := tmp_path / f"m{next(machines)}"))
        return folder

    go()
    return go


@pytest.fixture
def server(monkeypatch, home):
    with s3_server.serving("team", monkeypatch.setenv) as server:
        yield server


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lock, "RENEW_S", 0.3)


def reader():
    place = Mirror(RUN, trains=False)
    place.fetch("*")
    for folder in (place.path / "checkpoints").glob("[0-9]*"):
        place.fetch_checkpoint(int(folder.name))
    return place.path


@pytest.mark.slow
def test_a_team_is_trained_there_and_continued_played_and_exported_elsewhere(
    server, home, tmp_path, monkeypatch, capsys
):
    for steps in (2, 3):
        home()
        assert code_of(train.main, "--run.dir", RUN, "--run.steps", steps, *SMALL) == 0
    assert code_of(train.main, "--run.dir", tmp_path / "here", "--run.steps", 3, *SMALL) == 0
    home()
    run = marft_jax.read_run(RUN)
    assert run.name == "one" and [*run.metrics] == [1, 2, 3] and [*run.transcripts] == [1, 2, 3]
    assert lines_of(run.folder) == lines_of(tmp_path / "here")
    home()
    place = Mirror(RUN, trains=False)
    assert {p.name for p in (place.path / "checkpoints").iterdir()} == {"2", "3"}
    with Checkpoints(RUN, {}, keep=1) as checkpoints:
        assert checkpoints.find("latest") == 3
    assert not (checkpoints.run / "checkpoints" / "2" / "state").exists()
    home()
    for _ in range(2):
        assert code_of(evaluate.main, "--run", RUN, "--limit", 4) == 0
    assert "4 of 4 were already answered" in capsys.readouterr().out
    home()
    assert code_of(export.main, "--run", RUN, "--out", tmp_path / "team") == 0
    assert (tmp_path / "team" / "planner" / "adapter_config.json").is_file()
    monkeypatch.setattr("sys.stdin", iter([]))
    [plan, answer] = marft_jax.LoadedTeam(RUN, step=2).ask("4+7+8=?").turns
    assert (plan.name, answer.name) == ("planner", "solver")
    assert code_of(report.main, "--run", RUN, "--out", tmp_path / "r.html") == 0
    assert "3 of 3" in (tmp_path / "r.html").read_text()
    assert [file.name for file in marft_jax.read_run(RUN).evaluations] == ["arithmetic-3.jsonl"]


@pytest.mark.parametrize("main", [train.main, evaluate.main, chat.main, report.main])
def test_what_cannot_be_opened_is_one_line_and_exit_code_2_before_any_work(
    main, server, monkeypatch, capsys
):
    flag = "--run.dir" if main is train.main else "--run"

    def refused(address):
        assert code_of(main, flag, address) == 2
        [line] = capsys.readouterr().err.splitlines()
        return line

    assert "bucket does not exist" in refused("s3://nowhere/run")
    assert "Protocol not known" in refused("nope://b/run")
    server.fault = lambda request: "403 Forbidden"
    assert "Forbidden" in refused(RUN)
    server.fault = lambda request: None
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert "credentials" in refused(RUN)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "Could not connect" in refused(RUN)


@pytest.mark.parametrize("main, flag", [(train.main, "--run.dir"), (imitate.main, "--out")])
def test_a_bucket_that_can_only_be_read_is_refused_before_a_model_is_loaded(
    main, flag, server, capsys
):
    server.fault = lambda r: "403 Forbidden" if r["REQUEST_METHOD"] == "PUT" else None
    more = ["--demonstrations", 4] if main is imitate.main else []
    assert code_of(main, flag, RUN, *more) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "that can be written" in line and "Forbidden" in line


@pytest.mark.release
def test_a_process_that_is_killed_again_and_again_loses_no_saved_step(server, home, quick):
    for moment in range(1, 7):
        saved = s3_server.killed_at(
            server, moment * 5, moment % 2 == 0, lambda: s3_server.run_trainer(RUN, 999, home())
        )
        home()
        run = reader()
        assert newest(run) >= max(saved, default=0)
        if newest(run):
            steps = metrics(run)
            assert steps == [*range(1, len(steps) + 1)] and len(steps) >= newest(run)
    process = s3_server.run_trainer(RUN, newest(run) + 4, home())
    assert process.wait() == 0
    home()
    assert newest(reader()) >= newest(run) + 4


def test_of_several_processes_a_single_one_makes_the_lock(server, home, quick):
    def place():
        home()
        return Mirror(RUN, trains=True)

    assert race(4, place, 0.05) == (1, 3)


def test_settings_of_a_run_there_are_those_of_its_start(server, home):
    with contextlib.suppress(SystemExit):
        train.main(["--run.dir", RUN, "--run.steps", "1", "--run.seed", "5", *SMALL])
    home()
    config = cli.configure(run={"dir": RUN, "steps": 2})
    assert (config.run.dir, config.run.seed, config.run.steps) == (RUN, 5, 2)
