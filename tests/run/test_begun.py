"""A folder in which a run has begun is that run, whether or not a step was saved; others are not
touched."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from run_files import killed_after, lines_of

from marft_jax import cli, configure, imitate, train
from marft_jax.errors import BadInput
from marft_jax.learning.settings import Imitation
from marft_jax.run.directory import write_settings
from marft_jax.run.notices import next_steps
from marft_jax.run.storage import storage_of
from marft_jax.settings.config import Config
from marft_jax.settings.setting import get
from marft_jax.team.team_files import load_team

TEAM = "{bases}\nagents: [{{name: ann, prompt: {prompt}}}, {{name: bob, answers: true{on}}}]"
SMALL = ["--algo.episodes", "4", "--critic.hidden", "8"]


def begun(folder, *flags: object) -> Config:
    """Leaves what a start leaves that is killed before its first checkpoint."""
    config = cli.parse([*map(str, flags), "--run.dir", str(folder)])
    folder.mkdir(exist_ok=True)
    (folder / "lock").write_text("process 1")
    write_settings(folder, config, load_team(config.team.file))
    return config


def left(main, *words: object) -> int:
    with pytest.raises(SystemExit) as found:
        main([*map(str, words)])
    return int(found.value.code or 0)


@pytest.mark.parametrize(
    "flags",
    [["--run.seed", 7, "--algo.episodes", 16], ["--env.name", "math", "--env.data", "a.jsonl"],
     ["--algo.name", "grpo", "--algo.group_size", 4], ["--lora.rank", 3, "--lora.init", "old"],
     ["--rollout.sampler", "http", "--rollout.urls", "http://a"],
     ["--algo.name", Imitation.name, "--algo.epochs", 3], ["--eval.every", 3],
     ["--team.workflow", "debate", "--team.rounds", 3, "--mesh.fsdp", 2]],
    ids=lambda flags: str(flags[0])[2:],
)  # fmt: skip
def test_settings_of_a_run_without_a_checkpoint_are_kept(tmp_path, flags):
    config = begun(tmp_path / "run", *flags)
    more = ["--algo.name", Imitation.name] * (config.algo.recorded)
    again = cli.parse_training(["--run.dir", str(tmp_path / "run"), *more])
    for flag in flags[::2]:
        key = str(flag).removeprefix("--")
        assert get(again, key) == get(config, key)
    assert again.team.file == str(tmp_path / "run" / "team.yaml")
    assert configure(run={"dir": tmp_path / "run"}) == again
    other = cli.parse_training(["--run.dir", str(tmp_path / "run"), "--run.steps", "3", *more])
    assert other.run.steps == 3


@pytest.mark.parametrize("bases, on", [("", ""), ("bases: {big: {model: tiny}}", ", base: big")])
def test_the_team_of_a_run_without_a_checkpoint_is_kept(tmp_path, bases, on):
    file = tmp_path / "team.yaml"
    file.write_text(TEAM.format(bases=bases, on=on, prompt="Plan."))
    begun(tmp_path / "run", "--team.file", file)
    file.unlink()
    again = cli.parse_training(["--run.dir", str(tmp_path / "run")])
    assert [agent.prompt for agent in load_team(again.team.file).agents] == ["Plan.", ""]


@pytest.mark.parametrize(
    "before, flags, key",
    [([], ["--algo.name", "grpo"], "algo.group_size"),
     (["--algo.name", "grpo"], ["--algo.name", "appo"], "algo.group_size"),
     (["--algo.lr", "0.5"], ["--algo.name", "tppo"], "algo.minibatches"),
     ([], ["--env.name", "math", "--env.data", "a.jsonl"], "env.workers"),
     (["--rollout.sampler", "http", "--rollout.urls", "http://a"], ["--rollout.sampler", "engine"],
      "rollout.slots")],
)  # fmt: skip
def test_another_choice_has_the_defaults_of_what_it_chooses(tmp_path, before, flags, key):
    begun(tmp_path / "run", *before)
    found = cli.parse_training(["--run.dir", str(tmp_path / "run"), *flags])
    assert get(found, key) == get(cli.parse(flags), key)
    assert "--algo.lr" not in before or found.algo.lr == 0.5


def test_another_base_is_refused_by_its_name(tmp_path):
    begun(tmp_path / "run")
    with pytest.raises(BadInput, match=r"--model.base other: .*tiny.*another --run.dir"):
        cli.parse_training(["--run.dir", str(tmp_path / "run"), "--model.base", "other"])


def test_what_a_start_changes_is_named(tmp_path):
    team = tmp_path / "team.yaml"
    team.write_text(TEAM.format(bases="", on="", prompt="Plan."))
    before = begun(tmp_path / "run", "--team.file", team)
    blueprint = load_team(before.team.file)
    assert [*map(str, write_settings(tmp_path / "run", before, blueprint))] == []
    team.write_text(TEAM.format(bases="", on=", temperature: 0.5", prompt="Plan it."))
    after = cli.parse(["--run.seed", "7", "--algo.episodes", "16", "--mesh.coordinator", "auto"])
    assert [*map(str, write_settings(tmp_path / "run", after, load_team(str(team))))] == [
        "--run.seed was 0, is 7",
        "--algo.episodes was 64, is 16",
        "team: agents.ann.prompt was 'Plan.', is 'Plan it.'",
        "team: agents.bob.temperature was None, is 0.5",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_run_that_was_killed_before_its_first_checkpoint_goes_on_with_its_settings(
    tmp_path, monkeypatch, capsys
):
    run = tmp_path / "run"
    with killed_after(2, monkeypatch):
        train.main(["--run.dir", str(run), "--run.seed", "7", "--run.steps", "3", *SMALL])
    assert not (run / "checkpoints").exists() or not [*(run / "checkpoints").iterdir()]
    for number in (1, 2):  # killed again while it begins anew
        with killed_after(1, monkeypatch):
            train.main(["--run.dir", str(run)])
        assert (run / "config.yaml").exists()
        assert "seed: 7" in (run / f"unsaved-{number}" / "config.yaml").read_text() or number == 2
    capsys.readouterr()
    assert left(train.main, "--run.dir", run, "--run.steps", 1, "--algo.lr", 0.25) == 0
    shown = capsys.readouterr().out
    assert "--algo.lr was 0.001, is 0.25" in shown and "--run.steps was 3, is 1" in shown
    config = cli.parse(["--config", str(run / "config.yaml")])
    assert (config.run.seed, config.algo.episodes, config.critic.hidden) == (7, 4, (8,))
    whole = tmp_path / "whole"
    flags = ["--run.seed", 7, "--run.steps", 1, "--algo.lr", 0.25, *SMALL]
    assert left(train.main, "--run.dir", whole, *flags) == 0
    assert lines_of(run) == lines_of(whole)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_demonstrations_of_a_run_without_a_checkpoint_are_kept(tmp_path, monkeypatch):
    run = tmp_path / "run"
    with killed_after(1, monkeypatch):
        flags = "--demonstrations 8 --run.steps 1 --run.seed 5".split()
        imitate.main(["--out", str(run), *flags, *SMALL])
    kept = (run / "demonstrations.jsonl").read_text()
    assert left(imitate.main, "--out", run) == 0
    assert (run / "demonstrations.jsonl").read_text() == kept
    assert cli.parse(["--config", str(run / "config.yaml")]).run.seed == 5


@pytest.mark.parametrize(
    "files",
    [["config.yaml", "team.yaml", "log.txt"], ["config.json", "model.safetensors"], ["rows.csv"],
     ["checkpoints/model.pt"], ["config.yaml", "metrics.jsonl"], ["log.txt", ".git/HEAD"]],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.parametrize("main", [train.main, imitate.main])
def test_a_folder_that_is_no_run_is_refused_and_left_as_it_is(
    tmp_path, monkeypatch, capsys, files, main
):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("run: {seed: 3}\n")
    monkeypatch.chdir(tmp_path)
    out = ["--out", ".", "--demonstrations", 4] if main is imitate.main else ["--run.dir", "."]
    assert left(main, *out, "--run.steps", 1) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "--run.dir" in line and files[0].partition("/")[0] in line
    found = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert found == sorted(files)


@pytest.mark.parametrize(
    "files",
    [[], ["lock"], [".gitkeep"], ["unsaved-1/log.txt", "lock"], ["lost+found/"],
     ["adapters/a.safetensors", "lock"], ["checkpoints/", "notes.txt"]],
    ids=" ".join,
)  # fmt: skip
def test_a_folder_in_which_nothing_of_a_user_lies_is_a_new_run(tmp_path, files):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        if name.endswith("/"):
            (tmp_path / name).mkdir()
        else:
            (tmp_path / name).write_text("" if name == "notes.txt" else "x")
    flags = ["--run.dir", str(tmp_path)]
    assert cli.parse_training(flags) == cli.parse(flags)


def test_a_run_of_the_release_before_is_a_run_without_its_first_line(tmp_path):
    config = begun(tmp_path, "--run.seed", 7)
    text = (tmp_path / "config.yaml").read_text().splitlines(keepends=True)
    (tmp_path / "config.yaml").write_text("".join(text[1:-1]))
    assert cli.parse_training(["--run.dir", str(tmp_path)]).run.seed == config.run.seed == 7


class Session:
    """An environment of a Python session."""

    def reset(self, seed):
        return "1+1=?"

    step = reset


@pytest.mark.parametrize("place", ["runs/x", "-runs", "my runs/it's", "[a]/*"])
def test_the_last_lines_of_a_run_are_commands_that_work(place, monkeypatch):
    monkeypatch.setattr(Session, "__module__", "__main__")

    def last(**settings):
        lines = next_steps(configure({"run.dir": place, "run.steps": 5, **settings}), "solo")
        return [line.partition(":")[2].strip() for line in lines]

    for line in last()[1:-1]:  # the last names the guide
        own, _ = cli.run_parser("x", "").parse_known_args(shlex.split(line)[3:])
        assert storage_of(own.run).path == Path(place)
    assert last(**{"env.name": Session})[1:3] == [
        f"marft_jax.evaluate_team({place!r})",
        f"marft_jax.LoadedTeam({place!r}).ask(QUESTION)",
    ]
    assert "python -m marft_jax.train --lora.init" in last(**{"algo.name": Imitation.name})[1]
