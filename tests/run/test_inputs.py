"""Rows and code are part of what a run is: a run that continues has those that it began with."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from marft_jax import cli, train
from marft_jax.errors import BadInput
from marft_jax.run.compatibility import check_unchanged, inputs_of
from marft_jax.settings.setting import with_absolute_paths
from marft_jax.team.profiles import Profile

ROWS = "".join(f'{{"question": "{n}+1=?", "answer": "{n + 1}"}}\n' for n in range(60))
FLOWS = """
def alone(team, observation):
    from marft_jax.team import State, Step
    state = State(observation)
    while True:
        [turn] = yield [team.act(1, state)]
        yield Step([turn])
        return
"""
PARTS = {
    "own_flows.py": FLOWS,
    "own_parts/rewards.py": "def paid(turns, result): return [0.0] * len(turns)\n",
    "own_paid.py": "def paid(turns, result): return [0.0] * len(turns)\n",
    "own_logger.py": "class Logger: pass\n",
    "own_sampler.py": "class Own: pass\n",
    "rows.jsonl": ROWS,
    "more.jsonl": ROWS.replace("+1", "+01"),
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The folder of a user, in which a run begins."""
    folder = tmp_path / "home"
    for name, text in PARTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p] + [str(folder)])
    return folder


def config_of(**sections):
    given = {
        "env.name": "math", "env.data": "rows.jsonl", "run.dir": "run",
        "algo.credit": "per_step", "algo.step_reward": "own_parts.rewards:paid",
        "run.loggers": "own_logger:Logger", "rollout.sampler": "own_sampler:Own",
    }  # fmt: skip
    return with_absolute_paths(cli.configure(given, sections))


def kept_of(config):
    """The files of a run; a team file names its workflow and a step reward."""
    paid = Profile("solver", answers=True, reward="own_paid:paid")
    return inputs_of(config, "own_flows:alone", [paid])


@pytest.fixture
def run(home):
    """A run directory that has a checkpoint."""
    (home / "run" / "checkpoints" / "1").mkdir(parents=True)
    (home / "run" / "checkpoints" / "1" / "meta.json").write_text("{}")
    (home / "run" / "inputs.json").write_text(json.dumps(kept_of(config_of())))
    return home / "run"


def refusal(run: Path, **sections) -> str:
    with pytest.raises(BadInput) as caught:
        check_unchanged(run, kept_of(config_of(**sections)))
    return str(caught.value)


CODE = ["own_flows.py", "own_paid.py", "own_parts/rewards.py", "own_sampler.py"]


def test_the_files_of_a_run_are_its_data_and_the_modules_that_it_names(run):
    files = json.loads((run / "inputs.json").read_text())
    assert sorted(files) == ["--env.data", *CODE]
    assert [path for path, *_ in files["--env.data"]] == [str(run.parent / "rows.jsonl")]


@pytest.mark.parametrize("name", [*CODE, "rows.jsonl"])
def test_a_file_that_changed_is_named_with_what_to_do(run, home, name):
    check_unchanged(run, kept_of(config_of()))
    (home / name).write_text(PARTS[name] + "# 12\n")
    said = refusal(run)
    assert f"has changed ({home / name})" in said and "--run.dir" in said and "--lora.init" in said
    (home / name).write_text(PARTS[name])  # restored, at another time
    check_unchanged(run, kept_of(config_of()))


def test_what_counts_is_the_content_not_where_a_file_lies_or_what_is_beside_it(run, home):
    os.utime(home / "rows.jsonl", (1, 1))
    (home / "own_logger.py").write_text("class Logger: x = 1\n")
    (home / "rows.jsonl").rename(home / "renamed.jsonl")
    check_unchanged(run, kept_of(config_of(**{"env.data": "renamed.jsonl"})))
    more = home / "more.jsonl"
    for given, named in (
        ("more.jsonl", more), (["renamed.jsonl", "more.jsonl"], more),
        (["renamed.jsonl", "renamed.jsonl"], "other files or order"),
    ):  # fmt: skip
        assert f"--env.data has changed ({named})" in refusal(run, **{"env.data": given})


def test_a_run_without_a_checkpoint_or_of_the_release_before_takes_what_is_there(run, home):
    (home / "rows.jsonl").write_text("")
    refusal(run)
    (run / "inputs.json").rename(run / "kept")
    check_unchanged(run, kept_of(config_of()))
    for broken in ("", "[]", '{"--env.data": 1}', '{"--env.data": [[1]]}'):
        (run / "inputs.json").write_text(broken)
        check_unchanged(run, kept_of(config_of()))
    (run / "kept").rename(run / "inputs.json")
    now = kept_of(config_of())
    (run / "checkpoints" / "1" / "meta.json").unlink()
    [line] = check_unchanged(run, now)
    assert "rows.jsonl" in line


@pytest.mark.parametrize(
    ("key", "given", "kept"),
    [
        ("model.base", "own_parts", "{home}/own_parts"),
        ("model.base", "tiny", "tiny"),
        ("model.base", "owner/name", "owner/name"),
        ("lora.init", "hub:owner/name", "hub:owner/name"),
        ("env.data", ["rows.jsonl", "owner/name:test"], ["{home}/rows.jsonl", "owner/name:test"]),
        ("env.eval_data", ["../home/rows.jsonl"], ["{home}/rows.jsonl"]),
        ("eval.benchmarks", ["rows.jsonl:4@0.5", "gsm8k"], ["{home}/rows.jsonl:4@0.5", "gsm8k"]),
    ],
)
def test_a_run_keeps_where_the_files_that_it_names_lie(home, key, given, kept):
    for folder in ("tiny", "gsm8k"):
        (home / folder).mkdir()
    config = config_of(**{key: given, "eval.every": 1})
    section, name = key.split(".")
    found = getattr(getattr(config, section), name)
    wanted = kept if isinstance(kept, list) else [kept]
    spelled = [text.format(home=home) for text in wanted]
    assert found == (tuple(spelled) if isinstance(kept, list) else spelled[0])


SMALL = "--algo.episodes 4 --run.save_every 1 --run.loggers none --team.max_new_tokens 4".split()


def trained(*flags: object) -> int:
    with pytest.raises(SystemExit) as left:
        train.main([*SMALL, *map(str, flags)])
    return int(left.value.code or 0)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_run_goes_on_from_any_folder_until_its_rows_or_its_code_change(
    home, tmp_path, monkeypatch, capsys
):
    team = "workflow: own_flows:alone\nagents: [{name: planner}, {name: solver, answers: true}]\n"
    (home / "team.yaml").write_text(team)
    one = ["--env.workers", 1]  # each takes seconds to start
    flags = ["--env.name", "math", "--env.data", "rows.jsonl", "--team.file", "team.yaml", *one]
    assert trained("--run.dir", "run", "--run.steps", 1, *flags) == 0
    assert trained("--run.dir", "run", "--run.steps", 2, *flags) == 0  # as it was given
    monkeypatch.chdir(tmp_path)
    assert trained("--run.dir", "home/run", "--run.steps", 3) == 0
    log = (home / "run" / "log.txt").read_text()
    assert "--run.steps was 2, is 3" in log and "--env.data" not in log
    (home / "own_flows.py").write_text(FLOWS.replace("act(1", "act(-1"))
    (home / "rows.jsonl").write_text(ROWS[:-40])
    before = (home / "run" / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert trained("--run.dir", "home/run", "--run.steps", 4) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "own_flows.py has changed" in line and "--env.data has changed" in line
    assert (home / "run" / "metrics.jsonl").read_bytes() == before
    flags = ["--run.dir", "next", "--lora.init", "home/run", "--run.steps", 1]
    flags += ["--env.name", "math", "--env.data", "home/rows.jsonl", *one]
    assert trained(*flags, "--team.file", "home/team.yaml") == 0
