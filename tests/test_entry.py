"""The edge of every command: one line and an exit code, whoever is at fault."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import io
import json
import os
import subprocess
import sys

import pytest
import small
import yaml
from rich.console import Console

import marft_jax
from marft_jax import __main__ as marft
from marft_jax import chat, cli, evaluate, export, imitate, plan, plugins, report, train
from marft_jax.errors import BadInput, RunFailed, printable
from marft_jax.learning import checking
from marft_jax.plugins import load_plugin
from marft_jax.run import directory, transcripts
from marft_jax.settings import config, setting
from marft_jax.team.profiles import BUILT_IN
from marft_jax.team.team_files import Blueprint

ESCAPES = "a\x1b]52;c;cm0=\x07b\x9b2Jc\rd\u202ee\ud800"


@pytest.fixture(autouse=True)
def this_is_the_script(monkeypatch):
    """What was started is no user's module."""
    monkeypatch.setattr(sys, "argv", [__file__])


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Writes a module of a user's and lets it be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, code: str) -> str:
        (tmp_path / f"{name}.py").write_text(code)
        return name

    return write


def left_with(capsys, main, *argv) -> tuple[int, str]:
    """Exit code and the one line on stderr."""
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in argv])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("marft_jax: "), lines
    return left.value.code, lines[0]  # type: ignore[return-value]


@pytest.mark.parametrize(("error", "code", "shown"), [
    (BadInput("first\n  second"), 2, "first second"),
    (RunFailed("the disk is full"), 1, "the disk is full"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (OSError(errno.ENOSPC, "No space left on device"), 1, "No space left on device"),
    (PermissionError(errno.EACCES, "Permission denied", "/x/y"), 1, "/x/y: cannot be"),
    (BadInput(ESCAPES), 2, "\\x1b]52"),
])  # fmt: skip
def test_a_fault_is_one_line_and_an_exit_code(error, code, shown, capsys):
    def main(argv):
        with cli.boundary():
            raise error

    assert left_with(capsys, main)[0] == code
    assert shown in left_with(capsys, main)[1]


@pytest.mark.parametrize("door", [export, plan, report])
def test_ctrl_c_while_the_command_of_an_extra_is_imported_is_one_line(door, monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(plugins, "load_extra", interrupted)
    assert left_with(capsys, door.main) == (130, "marft_jax: stopped")


def test_code_of_the_users_is_shown_with_its_own_file_and_line(mine, capsys):
    module = __import__(mine("clumsy", "def act():\n    pass\n    1 / 0\n"))

    def main(argv):
        with cli.boundary():
            json.loads("1", object_hook=None, parse_int=lambda text: module.act())

    code, line = left_with(capsys, main)
    assert code == 1 and "ZeroDivisionError: division by zero (" in line
    assert "clumsy.py:3)" in line


def test_a_fault_of_ours_keeps_its_traceback():
    with pytest.raises(KeyError), cli.boundary():
        raise KeyError("ours")


@pytest.mark.parametrize(("code", "shown", "line"), [
    ("import sys\n\nsys.exit(0)", "SystemExit: 0", 3),
    ("x = 1\n1 / 0", "ZeroDivisionError: division by zero", 2),
    ("x = (", "SyntaxError", 1),
    ("import not_there_at_all", "ModuleNotFoundError", 1),
    ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E", "E: it cannot say what it is",
     3),
    ("x = 1", "has no 'thing'", 0),
])  # fmt: skip
def test_a_users_module_that_fails_is_one_line_with_its_place(mine, code, shown, line):
    name = mine(f"failing_{abs(hash(code))}", code)
    with pytest.raises(BadInput) as caught:
        load_plugin(f"{name}:thing", "--env.name", ["arithmetic"])
    message = str(caught.value)
    assert f"--env.name {name}:thing" in message and shown in message
    assert not line or message.endswith(f"{name}.py:{line})")


def test_a_flag_of_a_commands_own_is_checked_like_a_setting(capsys):
    for main, argv in (
        (evaluate.main, ["--run", "a", "--base", "b"]),
        (evaluate.main, ["--base", "tiny", "--samples", "many"]),
        (export.main, ["--run", "a"]),
        (export.main, ["--run", "a\0b", "--out", "c"]),
        (chat.main, []),
        (chat.main, ["--run", "no/where"]),
        (chat.main, ["--base", "tiny", "--team.workflow", "program"]),
        (chat.main, ["--base", "tiny", "--team.workflow", "players"]),
        (plan.main, ["--config", "x.yaml"]),
        (train.main, ["--run.seed", "-1"]),
        (train.main, ["--run.seed", str(1 << 40)]),
        (train.main, ["--run.dir", ""]),
        (train.main, ["--run.dir", "a\0b"]),
        (train.main, ["--run.dir", "\udcff"]),
        (train.main, ["--env.name", "arithmetic:"]),
        (marft.main, ["trian"]),
        (marft.main, ["train", "--algo.learning_rate", "1"]),
    ):
        assert left_with(capsys, main, *argv)[0] == 2


@pytest.mark.parametrize(
    "address", ["s3://b/r", "gs://b/r", "S3://b", "az://c/x", "file:///tmp/x", "s3:/b", "hub:o/n"]
)
def test_what_is_written_goes_to_this_machine_or_is_refused_at_the_start(
    address, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    directory.write_settings(tmp_path / "run", cli.configure(), Blueprint(BUILT_IN))
    for flag, main, argv in (
        ("--out", evaluate.main, ["--base", "tiny", "--out", address]),
        ("--out", evaluate.main, ["--base", "tiny", "--exploitability", "--out", address]),
        ("--out", export.main, ["--run", "run", "--out", address]),
        ("--out", report.main, ["--run", "run", "--out", address]),
    ):
        code, line = left_with(capsys, main, *argv)
        assert code == 2 and f"{flag}: expected a path on this machine, got '{address}'" in line
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("address", ["file:///tmp/x", "s3:/b", "s3:///b", "hub:o/n"])
def test_a_run_directory_is_on_this_machine_or_in_object_storage(address, tmp_path, capsys):
    for flag, main, argv in (
        ("--run.dir", train.main, ["--run.dir", address]),
        ("--run.dir", train.main, ["--dry_run", "--run.dir", address]),
        ("--out", imitate.main, ["--out", address, "--demonstrations", "4"]),
    ):
        code, line = left_with(capsys, main, *argv)
        assert code == 2 and f"{flag}: expected a path on this machine, got '{address}'" in line
    with pytest.raises(BadInput, match="--run.dir: expected a path on this machine"):
        cli.configure(run={"dir": address})


def test_a_folder_may_have_a_colon_in_its_name():
    for name in ("runs/12:30", "C:/runs", "runs:2", "a:b/c"):
        assert cli.configure(run={"dir": name}).run.dir == name


@pytest.mark.parametrize("platform", ["cuda", "tpu", "abacus"])
@pytest.mark.slow
def test_a_platform_without_a_device_is_one_line(platform, tmp_path, repository):
    """Every command that computes starts its processes first."""
    environment = {**os.environ, "JAX_PLATFORMS": platform, "PYTHONPATH": str(repository)}
    command = [sys.executable, "-m", "marft_jax.evaluate", "--base", "tiny", "--limit", "1"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith(f"marft_jax: JAX_PLATFORMS={platform}: ")


def test_every_section_of_numbers_is_finite_and_no_text_is_empty():
    for key, field in setting.settings(config := cli.configure()):
        section, name = key.split(".")
        kind = str(setting.properties(type(getattr(config, section)))[name])
        bad = ["nan", "inf"] * ("'number'" in kind) + [""] * ("'string'" in kind)
        for word in bad if field.default != "" else []:
            with pytest.raises(BadInput, match=f"--{key}: expected"):
                cli.parse([f"--{key}", word])


def test_where_an_evaluation_cannot_write_is_known_before_it_plays(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code, line = left_with(capsys, evaluate.main, "--base", "tiny", "--out", tmp_path / "file")
    assert code == 2 and "responses cannot be written there" in line
    directory.write_settings(tmp_path / "run", cli.configure(), Blueprint(BUILT_IN))
    (tmp_path / "run" / "evaluations").write_text("")  # as good as a run that is read-only
    code, line = left_with(capsys, evaluate.main, "--run", tmp_path / "run")
    assert code == 2 and "--out" in line


def test_evaluate_and_chat_take_the_settings_and_the_team_of_the_run(tmp_path):
    run = tmp_path / "run"
    settings = cli.parse(["--team.max_new_tokens", "9", "--eval.every", "3"])
    directory.write_settings(run, settings, Blueprint(BUILT_IN, workflow="solo"))
    found = cli.parse_run(str(run), None, ["--eval.temperature", "0.5"])
    assert (found.team.max_new_tokens, found.eval.temperature) == (9, 0.5)
    assert found.team.file == str(run / "team.yaml") and found.run.dir == str(run)


@pytest.mark.parametrize("name", ["config.yaml", "team.yaml"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_file_of_a_run_that_was_cut_off_is_not_read_with_defaults(name, share, tmp_path):
    directory.write_settings(tmp_path, cli.configure(), Blueprint(BUILT_IN, workflow="solo"))
    file = tmp_path / name
    whole = file.read_text().splitlines()
    file.write_text("\n".join(whole[: int(len(whole) * share)]))
    with pytest.raises(BadInput, match=f"{name}: expected the last line '# end'"):
        cli.parse_run(tmp_path, None, [])
    with pytest.raises(BadInput, match=f"{name}: expected the last line '# end'"):
        cli.parse_run(None, None, ["--config" if name[0] == "c" else "--team.file", str(file)])
    for begin in ("", whole[0][:9]):
        file.write_text(begin)
        with pytest.raises(BadInput, match=rf"{name}: expected .*, (found none|got None)"):
            cli.parse_run(tmp_path, None, [])
    file.write_text("\n".join([*whole, "# a remark of the user"]))
    assert cli.parse_run(tmp_path, None, [])


@pytest.mark.parametrize("name", ["<python>:Gone", "gone_module:Env", "json:Gone"])
def test_what_plays_no_tasks_opens_a_run_whose_environment_is_gone(name, tmp_path):
    write = {"env": {"name": name, "options": ["size=3"]}, "run": {"seed": 4}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(write))
    found = cli.parse_run(tmp_path, None, ["--env.options", "b=1"], plays_tasks=False)
    assert (found.env.name, found.run.seed) == (name, 4)
    with pytest.raises(BadInput, match="env.name"):
        cli.parse_run(tmp_path, None, [])
    with pytest.raises(BadInput, match="did you mean"):
        cli.parse_run(tmp_path, None, ["--run.sed", "1"], plays_tasks=False)


def test_training_refuses_samples_that_teach_nothing_and_step_rewards_that_are_none():
    greedy = cli.configure({"team.temperature": 0.0})
    with pytest.raises(BadInput, match="agent 'planner': expected a temperature above 0"):
        checking.check_learns(greedy, Blueprint(BUILT_IN))
    [planner, solver] = BUILT_IN
    frozen = dataclasses.replace(planner, trainable=False, temperature=0.0)
    checking.check_learns(cli.configure(), Blueprint((frozen, solver)))
    misspelt = dataclasses.replace(planner, reward="planer")
    with pytest.raises(BadInput, match="got 'planer'"):
        checking.check_learns(cli.configure(), Blueprint((misspelt, solver)))


def test_questions_may_be_anything(monkeypatch):
    typed = io.TextIOWrapper(io.BytesIO(b"3+\xff4\n\xed\xa0\x80 \x1b[2J\n"), encoding="ascii")
    monkeypatch.setattr(sys, "stdin", typed)
    asked = list(chat._questions(Console()))
    assert len(asked) == 2 and asked[0] == "3+\ufffd4"
    "".join(asked).encode("utf-8")


def test_what_an_agent_writes_cannot_work_a_terminal():
    assert printable(ESCAPES) == "a\\x1b]52;c;cm0=\\x07b\\x9b2Jc\\rd\\u202ee\\ud800"
    assert printable("Grüße 😀\n\tend") == "Grüße 😀\n\tend"
    episode = small.episode(0, [small.turn(0, [1], [2], text=ESCAPES)], [0.5])
    console = Console(file=io.StringIO(), width=200)
    console.print(transcripts.render(episode._replace(task=ESCAPES)))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert not set("\x1b\x07\x9b\r\u202e") & set(shown) and shown.count("]52;") == 2


def test_one_command_has_them_all(repository, capsys):
    with pytest.raises(SystemExit) as left:
        marft.main(["--help"])
    shown = capsys.readouterr().out
    assert left.value.code == 0
    assert all(importlib.util.find_spec(f"marft_jax.{name}") for name in marft.COMMANDS)
    assert all(name in shown for name in marft.COMMANDS)
    command = [sys.executable, "-m", "marft_jax", "--version"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["marft_jax", marft_jax.__version__]


def helped(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        cli.parse([*words])
    assert left.value.code == 0
    return capsys.readouterr().out


def test_help_shows_sections_then_the_settings_of_one_or_of_all(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    sections = [field.name for field in dataclasses.fields(config.Config)]
    for words in (["--help"], ["-h"], ["--algo.lr", "1", "--help"]):
        shown = helped(capsys, *words)
        assert "--config FILE" in shown and "--algo" not in shown
        assert [line.split()[0] for line in shown.splitlines()[-len(sections) :]] == sections
        assert max(map(len, shown.splitlines())) <= 80
    one, every = helped(capsys, "--help", "lora"), helped(capsys, "--help=all")
    assert "--lora.rank  a whole number from 1 (8)" in one and "--algo" not in one
    assert "Scale of the adapters: their product is multiplied by alpha / rank." in one
    assert (
        "--algo.step_reward  text or none (none; needs --algo.credit per_step or tree and agents."
        in every
    )
    assert all(f"--{key}" in every for key, _ in setting.settings(cli.configure()))
    with pytest.raises(BadInput, match="--help: expected all or one of run, .* got 'lorra'"):
        cli.parse(["--help", "lorra"])
