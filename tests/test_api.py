"""The package in Python: what a notebook calls is what the commands call."""

from __future__ import annotations

import ast
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from run_files import lines_of, write_run

import marft_jax
from marft_jax import cli, plugins
from marft_jax.cli import configure
from marft_jax.envs.datasets import load
from marft_jax.errors import BadInput
from marft_jax.settings.config import Config, Run
from marft_jax.team import Blueprint, Profile, State, Step
from marft_jax.team.workflows import sequential
from marft_jax.types import StepResult

pytestmark = pytest.mark.usefixtures("one_device")

SMALL = {"algo.episodes": 8, "run.save_every": 100, "run.loggers": None}


def test_every_name_of_the_package_is_there_typed_and_costs_nothing_before_it_is_used(repository):
    tree = ast.parse((repository / "marft_jax" / "__init__.py").read_text("utf-8"))
    [typed] = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test)[0] == "T"]
    names = {alias.asname for line in typed.body for alias in getattr(line, "names")}  # noqa: B009
    assert names == set(marft_jax._HOMES) <= set(dir(marft_jax))
    for name in names:
        assert getattr(marft_jax, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        marft_jax.tarin  # noqa: B018
    code = "import sys, marft_jax; print({'numpy', 'jax', 'rich', 'yaml'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True)
    assert done.stdout.strip() == b"set()"


def test_settings_mean_what_they_mean_on_the_command_line(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("algo: {lr: 0.5, clip: 0.4}\nrun: {steps: 7}\n")
    built = marft_jax.configure(
        file, {"algo.lr": 3e-5, "lora.targets": ("q", "v")}, {"algo.lr": 0.25},
        run={"dir": str(tmp_path / "new"), "best_metric": None}, model={"thinking": False},
        critic={"hidden": []},
    )  # fmt: skip
    words = f"--config {file} --algo.lr 0.25 --lora.targets q v --run.dir {tmp_path}/new "
    words += "--run.best_metric none --critic.hidden none"
    assert built == cli.parse(words.split()) != configure()


@pytest.mark.parametrize(("sources", "sections", "shown"), [
    ([{"algo.lrr": 1}], {}, "did you mean 'algo.lr'?"),
    ([], {"run": {"steps": "many"}}, "--run.steps: expected a whole number from 1, got 'many'"),
    ([], {"run": 3}, "configure: expected settings below 'run', got 3"),
    (["nowhere.yaml"], {}, "nowhere.yaml"),
    ([{"run.dir": b"x"}], {}, "--run.dir: expected text, a number, true, false or none, got b'x'"),
    ([{5: 6}], {}, "unknown setting '5'"),
    ([{"run.dir": "x" * 300}], {}, "--run.dir: expected a shorter name, got 'xxx"),
    ([{"lora.targets": {"q"}}], {}, "--lora.targets: expected text"),
])  # fmt: skip
def test_wrong_settings_are_one_line(sources, sections, shown):
    with pytest.raises(BadInput) as error:
        marft_jax.configure(*sources, **sections)
    assert shown in str(error.value) and "\n" not in str(error.value)


def test_a_run_is_evaluated_with_its_own_settings_and_those_on_top(tmp_path):
    run = write_run(tmp_path / "run", seed=5)
    config = marft_jax.configure_run(run, {"eval.temperature": 0.5})
    assert (config.run.seed, config.eval.temperature, config.run.dir) == (5, 0.5, str(run))
    assert marft_jax.configure_run(None, model={"base": "tiny"}) == configure()
    with pytest.raises(BadInput, match="expected a run directory"):
        marft_jax.configure_run(tmp_path)


def test_the_default_directory_is_continued_by_train_alone(tmp_path, monkeypatch):
    before = marft_jax.configure(algo={"name": "grpo"})
    run = write_run(tmp_path / Run().dir, seed=5)
    (run / "config.yaml").write_text("run: {seed: 5}\nalgo: {name: appo, group_size: 1}\n")
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(f"run: {{dir: {Run().dir}}}")
    assert marft_jax.configure(algo={"name": "grpo"}) == before
    assert configure() == cli.parse([]) == Config(env=configure().env, algo=configure().algo)
    assert configure(run=Run(steps=9)).run == Run(steps=9)
    assert configure(run=Run(steps=9)).algo == configure().algo
    named = [cli.parse_training([]), configure(run={"dir": Run().dir}), configure("c.yaml")]
    assert [config.run.seed for config in named] == [5, 5, 5]


def config_of(folder: Path, steps: int) -> Config:
    return marft_jax.configure(SMALL, run={"dir": str(folder), "steps": steps})


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, list[marft_jax.TrainedStep]]:
    """Three steps, and what the function was shown of them."""
    folder, seen = tmp_path_factory.mktemp("runs") / "whole", []
    assert marft_jax.train_team(config_of(folder, 3), on_step=seen.append) == 0
    return folder, seen


@pytest.mark.release
def test_every_step_is_shown_with_its_metrics_and_episodes(whole):
    folder, seen = whole
    assert [step.step for step in seen] == [1, 2, 3]
    rewards = [row["reward/mean"] for row in lines_of(folder)]
    assert [step.metrics["reward/mean"] for step in seen] == rewards
    assert [np.mean([e.reward for e in step.episodes]) for step in seen] == pytest.approx(rewards)


@pytest.mark.slow
def test_a_function_that_has_seen_enough_ends_the_run_which_goes_on_exactly(whole, tmp_path):
    run = tmp_path / "run"
    ended = marft_jax.train_team(config_of(run, 3), on_step=lambda step: step.step == 2)
    assert ended == 75
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["2"]
    assert marft_jax.train_team(config_of(run, 3), on_step=lambda step: True) == 0  # the last one
    assert lines_of(run) == lines_of(whole[0])


@pytest.mark.slow
def test_a_function_that_fails_ends_the_run_and_what_was_learned_is_kept(whole, tmp_path):
    run = tmp_path / "run"

    def fail(step):
        step.metrics.clear()
        if step.step == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        marft_jax.train_team(config_of(run, 3), on_step=fail)
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["2"]
    assert marft_jax.train_team(config_of(run, 3)) == 0
    assert lines_of(run) == lines_of(whole[0])


@pytest.mark.slow
def test_an_interrupt_ends_the_run_and_not_the_notebook(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)  # as in Jupyter

    def interrupt(step):
        signal.raise_signal(signal.SIGINT)

    # a script's job in the background is started with SIGINT ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            marft_jax.train_team(config_of(tmp_path / "run", 3), on_step=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["1"]


@pytest.mark.slow
def test_demonstrations_are_learned_with_the_same_function(tmp_path):
    config, seen = config_of(tmp_path / "start", 1), []
    wanted = marft_jax.Wanted(generated=8)
    assert marft_jax.imitate_team(config, wanted, on_step=seen.append) == 0
    assert seen[0].metrics["agent/solver/loss"] > 0


@pytest.mark.slow
def test_a_team_is_evaluated_and_asked(whole, capsys):
    folder = whole[0]
    scores = marft_jax.evaluate_team(folder, limit=4)
    assert scores["arithmetic", "team"].tasks == 4
    team = marft_jax.LoadedTeam(folder)
    first = team.ask("3+4+5=?")
    assert [turn.name for turn in first.turns] == ["planner", "solver"]
    assert [turn.text for turn in team.ask("3+4+5=?").turns] == [turn.text for turn in first.turns]
    assert first.answer == first.turns[1].text
    assert repr(first) == "Episode('3+4+5=?': 2 turns, reward 0)"
    assert repr(first.turns[1]) == f"Turn(solver: {first.answer!r})"
    with pytest.raises(BadInput, match="too long|context"):
        team.ask("1+" * 500)


def test_a_run_is_read_as_columns_and_records(tmp_path):
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/mean": null, "late": 2}\n')
    run = marft_jax.read_run(str(folder))
    columns = run.columns()
    assert columns["step"].tolist() == [1, 2, 3, 4] and columns["step"].dtype == np.int64
    assert columns["reward/mean"][:3].tolist() == [0.1, 0.2, 0.3]
    assert np.isnan(columns["reward/mean"][3]) and columns["late"][3] == 2
    assert [row["turns"][1]["text"] for row in run.episodes(2)] == ["answer at 2"] * 4
    assert run.episodes(99) == []
    assert repr(run).startswith(f"RunRecord(run {folder}, step 4 of ") and len(repr(run)) < 300
    assert "0.100 to 0.300" in repr(run)
    with pytest.raises(BadInput, match="expected a run directory, found none"):
        marft_jax.read_run(tmp_path / "none")
    pandas = pytest.importorskip("pandas")
    assert pandas.DataFrame(columns).shape == (4, len(columns))


ROWS = [{"question": f"{n}+1=?", "answer": str(n + 1)} for n in range(8)]
MATH = {"env.name": "math", "env.holdout": 0.5}


def test_rows_are_tasks_and_an_importable_function_is_its_name():
    config = configure(MATH, {"env.data": ROWS}, team={"workflow": sequential})
    assert config.team.workflow == "marft_jax.team.workflows:sequential"
    [name] = config.env.data
    assert configure(MATH, {"env.data": [ROWS]}).env.data == (name,)
    sides = [load.split_tasks(config.env, split) for split in ("train", "eval")]
    assert sum(len(tasks) for [tasks] in sides) == len(ROWS)
    with pytest.raises(BadInput, match="--env.data: expected text, .* got {'question'"):
        configure(MATH, {"env.data": [ROWS[0], "a.jsonl"]})


@pytest.mark.slow
def test_a_class_a_function_and_a_team_train_and_no_command_continues_the_run(tmp_path, capsys):
    class Says:
        def reset(self, seed):
            return f"{seed}?"

        def step(self, turns):
            return StepResult("", float(len(turns)), True)

    def twice(team, observation):
        turns = yield [team.act(0, State(observation))]
        turns += yield [team.act(0, State(observation), turns)]
        yield Step(turns)

    team = Blueprint((Profile("speaker", prompt="solve", answers=True, max_new_tokens=2),))
    given = {"env.name": Says, "team.workflow": twice, "team.file": team}

    def config(steps: int) -> Config:
        return configure(given, SMALL, run={"dir": str(tmp_path / "run"), "steps": steps})

    assert marft_jax.train_team(config(1)) == 0
    assert [row["reward/mean"] for row in lines_of(tmp_path / "run")] == [2]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "--team.workflow, --env.name: an object of Python, which no command can load" in log
    assert marft_jax.train_team(config(2)) == 0
    assert len(lines_of(tmp_path / "run")) == 2
    plugins._OBJECTS.clear()  # as in another process
    with pytest.raises(BadInput, match="--env.name .*Says: .* got an object of a Python session"):
        cli.parse_training(["--run.dir", str(tmp_path / "run")])


@pytest.mark.slow
def test_the_notebook_runs_as_it_stands(repository, tmp_path, monkeypatch, capsys):
    """All but its size: how well the team learns is asked elsewhere."""
    monkeypatch.chdir(tmp_path)
    configure = marft_jax.configure

    def smaller(*sources, run, **sections):
        sources = (*sources, {"algo.episodes": 8})
        return configure(*sources, run={**run, "steps": 2}, **sections)

    monkeypatch.setattr(marft_jax, "configure", smaller)
    cells = runpy.run_path(str(repository / "scripts" / "notebook.py"))
    assert len(cells["columns"]["reward/mean"]) == 2
    assert "solver: '" in capsys.readouterr().out
