"""The package as a whole: its layout, its settings files, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from marft_jax import cli
from marft_jax.settings import config
from marft_jax.team import team_files

TOP_LEVEL = {"marft_jax", "configs", "scripts", "tests", "setup.py", "README.md", "LICENSE"}


def test_the_visible_top_level_is_exactly_as_agreed(repository):
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout, so nothing says which files are the project's")
    top = {path.split("/")[0] for path in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} == TOP_LEVEL


def test_every_settings_file_loads(repository, tmp_path, monkeypatch):
    """From wherever: the team file is found beside it."""
    monkeypatch.chdir(tmp_path)
    folder = repository / "configs"
    for file in sorted([*folder.glob("*.yaml"), *folder.glob("plans/*.yaml")]):
        loaded = cli.parse(["--config", str(file)])
        assert loaded != cli.configure(), f"{file} changes nothing"
        assert loaded.team.file and team_files.load_team(loaded.team.file)
        (tmp_path / "config.yaml").write_text(config.dump(loaded))
        assert cli.parse(["--config", "config.yaml"]) == loaded


PARSE = "from marft_jax import cli; cli.parse({})"
READ = "'--critic.lr 1 --eval.every 2 --eval.benchmarks math500 --algo.name tppo'.split()"


@pytest.mark.parametrize("done", [
    "import marft_jax.run.reporters",
    PARSE.format("[]"),
    PARSE.format(READ),
])  # fmt: skip
def test_light_work_does_not_import_a_heavy_library(done, repository):
    code = f"import sys; {done}; print({{'jax', 'torch', 'tensorboardX'}} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    "command", ["train", "imitate", "evaluate", "chat", "serve", "plan", "export", "check"]
)
@pytest.mark.parametrize("words", [["--help"], ["--run.stepz", "3"], ["--team.workflow", "seq"]])
@pytest.mark.slow
def test_help_and_a_typo_are_answered_before_jax_is_imported(command, words, repository):
    own = dict.fromkeys(("evaluate", "chat", "serve"), ["--base", "tiny"])
    own |= {"imitate": ["--out", "x"], "plan": ["--topology", "cpu:8"]}
    own |= {"export": ["--run", "x", "--out", "y"], "check": ["a.b:C"]}
    code = (
        f"import sys; from marft_jax import {command}\n"
        f"try: {command}.main({[*own.get(command, []), *words]})\n"
        "except SystemExit as left: print(left.code, {'jax', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == ("0 set()" if "--help" in words else "2 set()")


def test_tests_see_eight_devices_and_strict_broadcasting():
    assert jax.device_count() == 8
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 3)) + jnp.ones(3)


def test_imports_go_one_way(repository):
    command = [
        sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
