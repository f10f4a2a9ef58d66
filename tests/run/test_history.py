"""What is saved is not lost: a command that begins anew moves what is there, and says so."""

from __future__ import annotations

import json
import shutil

import pytest
from run_files import lines_of

from marft_jax import imitate
from marft_jax.formats import jsonlines
from marft_jax.run import evaluating, saved_answers
from marft_jax.run.directory import set_aside


def make(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name}\n")


def all_files(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize(
    "names",
    [
        ["metrics.jsonl", "config.yaml", "team.yaml", "log.txt", "inputs.json"],
        ["metrics.jsonl", "transcripts/1.jsonl", "tensorboard/events.1", "wandb/a", "mlflow.db"],
        ["transcripts/3.jsonl"],
        ["metrics.jsonl", "events.jsonl", "demonstrations.jsonl"],
        ["evaluations/arithmetic-20.jsonl", "evaluations/summary.json"],
        ["metrics.jsonl", "checkpoints/20-from-a-copy/state"],
    ],
    ids=" ".join,
)
def test_whatever_a_new_run_would_replace_is_moved(tmp_path, names):
    make(tmp_path, *names, "rows.csv", "lock")
    for number in (1, 2):
        make(tmp_path, *names)
        [line] = set_aside(tmp_path)
        assert f"unsaved-{number}" in line and "no checkpoint" in line
        assert all_files(tmp_path / f"unsaved-{number}") == sorted(names)
    assert set_aside(tmp_path) == []
    kept = {"config.yaml", "team.yaml", "inputs.json", "demonstrations.jsonl"} & {*names}
    there = {p.name for p in tmp_path.iterdir()}
    assert there == {"lock", "rows.csv", "unsaved-1", "unsaved-2", *kept}


def test_a_start_that_ended_before_its_first_step_leaves_nothing_to_keep(tmp_path):
    make(tmp_path, "config.yaml", "team.yaml", "log.txt", "tensorboard/events.1")
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "transcripts").mkdir()
    assert set_aside(tmp_path) == [] and not (tmp_path / "unsaved-1").exists()


def test_a_link_to_checkpoints_on_a_disk_that_is_gone_is_moved_and_an_empty_disk_stays(tmp_path):
    run, disk = tmp_path / "run", tmp_path / "disk"
    make(run, "metrics.jsonl")
    disk.mkdir()
    (run / "checkpoints").symlink_to(disk)
    set_aside(run)
    assert (run / "checkpoints").is_symlink()
    disk.rmdir()
    set_aside(run)
    assert (run / "unsaved-2" / "checkpoints").is_symlink()
    assert not (run / "checkpoints").is_symlink()


def record(index, sample=0, key="k"):
    return {"sample": sample, "index": index, "key": key, "reward": 1.0}


def test_responses_of_other_settings_are_moved_and_of_more_tasks_stay(tmp_path, caplog):
    file = tmp_path / "arithmetic-20.jsonl"
    rows = [record(i, sample) for sample in range(2) for i in range(3)]
    jsonlines.append(file, map(jsonlines.dumps, rows))
    fewer = saved_answers._saved(file, "k", 1, 2)
    assert list(fewer) == [(0, 0), (0, 1)] and len(saved_answers._saved(file, "k", 2, 3)) == 6
    for number in (1, 2):
        assert saved_answers._saved(file, f"other-{number}", 2, 3) == {}
        moved = tmp_path / f"earlier-{number}" / file.name
        assert "6 responses of other settings" in caplog.text and str(moved) in caplog.text
        assert [json.loads(line) for line in moved.read_text().splitlines()] == rows
        rows = [record(i, sample, f"other-{number}") for sample in range(2) for i in range(3)]
        jsonlines.append(file, map(jsonlines.dumps, rows))


def test_a_torn_line_is_no_response_of_other_settings(tmp_path):
    file = tmp_path / "arithmetic-20.jsonl"
    file.write_text(json.dumps(record(0)) + "\n" + json.dumps(record(1))[:20])
    assert list(saved_answers._saved(file, "k", 1, 2)) == [(0, 0)]
    assert [p.name for p in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize("text", ["[1, 2]", '{"torn": ', "my own notes"])
def test_a_summary_that_is_none_is_moved(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    evaluating._write_summary(tmp_path / "summary.json", {})
    assert (tmp_path / "earlier-1" / "summary.json").read_text() == text


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_imitation_keeps_what_it_finds_without_a_checkpoint(tmp_path, capsys):
    def imitated(*flags):
        with pytest.raises(SystemExit) as left:
            few = ["--run.steps", "1", "--algo.episodes", "4"]
            imitate.main(["--out", str(tmp_path), *few, *flags])
        assert not left.value.code

    imitated("--demonstrations", "12")
    shutil.rmtree(tmp_path / "checkpoints")
    before = (tmp_path / "demonstrations.jsonl").read_text()
    capsys.readouterr()
    imitated()  # the demonstrations of before, which are moved only when they have been read
    assert "unsaved-1" in capsys.readouterr().out
    assert (tmp_path / "demonstrations.jsonl").read_text() == before
    moved = tmp_path / "unsaved-1"
    assert (moved / "demonstrations.jsonl").read_text() == before
    assert len(lines_of(moved)) == len(lines_of(tmp_path)) == 1
