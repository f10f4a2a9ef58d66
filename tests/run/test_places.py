"""``~`` is the home folder wherever a path is given, also where no shell reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from marft_jax import cli, configure
from marft_jax.run.storage import storage_of
from marft_jax.settings.config import Run
from marft_jax.settings.setting import get
from marft_jax.team.team_files import load_team

PATHS = [
    "run.dir", "team.file", "model.base", "lora.init", "eval.data", "eval.benchmarks", "env.data",
    "env.eval_data", "rollout.sampler_folder",
]  # fmt: skip
MORE = {
    "env.data": {"env.name": "math"},
    "env.eval_data": {"env.name": "math"},
    "rollout.sampler_folder": {"rollout.sampler": "http", "rollout.urls": "http://a"},
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("key", PATHS)
def test_a_setting_that_is_a_path_may_begin_at_home(key, home, tmp_path):
    more, several = MORE.get(key, {}), key in ("eval.benchmarks", "env.data", "env.eval_data")
    whole = f"{home}/a/b.jsonl"
    wanted = (whole,) if several else whole
    flags = [f"--{name}={value}" for name, value in {**more, key: "~/a/b.jsonl"}.items()]
    assert get(cli.parse(flags), key) == wanted
    tree = {}
    for name, value in {**more, key: "~/a/b.jsonl"}.items():
        section, _, last = name.partition(".")
        tree.setdefault(section, {})[last] = value
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(tree))
    assert get(cli.parse(["--config=~/a.yaml"]), key) == wanted
    assert get(configure("~/a.yaml"), key) == get(configure({**more, key: wanted}), key) == wanted


def test_a_run_and_a_team_are_found_at_home(home):
    assert storage_of("~/runs/a").path == home / "runs" / "a"
    assert configure(run=Run(dir="~/runs/a")).run.dir == f"{home}/runs/a"
    (home / "t.yaml").write_text(
        "bases: {big: {model: ~/m}}\nagents: [{name: a, answers: true, init: ~/x, base: big}]"
    )
    team = load_team(cli.parse(["--team.file=~/t.yaml"]).team.file)
    assert team.agents[0].init == f"{home}/x" and team.bases["big"].model == f"{home}/m"


@pytest.mark.parametrize("words", [["--run=~/a"], ["--run", "~/a"], ["--run=~"]])
def test_the_flags_of_a_command_know_home(words, home):
    own, rest = cli.run_parser("x", "").parse_known_args([*words, "--team.stop=~"])
    assert Path(own.run) == home / "a" if "a" in words[-1] else home
    assert rest[:1] == ["--team.stop=~"]


def test_other_texts_are_left_as_they_are():
    assert cli.parse(["--team.stop=~/", "--run.dir=a~/b"]).team.stop == ("~/",)
    assert cli.parse(["--run.dir=a~/b"]).run.dir == "a~/b"
