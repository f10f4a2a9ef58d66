"""The package as a whole: its layout, its settings files, and what importing it costs."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import small
from scripted import Scripted

from marft_jax import config
from marft_jax.algorithms import settle
from marft_jax.team import files
from marft_jax.team.runner import Rollout
from marft_jax.threads import DaemonThreads

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
        loaded = settle(config.parse(["--config", str(file)]))
        assert loaded != config.Config(), f"{file} changes nothing"
        assert loaded.team.file and files.load_team(loaded.team.file)
        (tmp_path / "config.yaml").write_text(config.dump(loaded))
        assert config.parse(["--config", "config.yaml"]) == loaded


def test_every_flag_in_the_readme_exists(repository):
    text = (repository / "README.md").read_text()
    sections = "|".join(config.Config.__annotations__)
    flags = set(re.findall(rf"--((?:{sections})\.[a-z_]+)", text))
    assert len(flags) > 60
    assert flags <= {key for key, _ in config.settings()}


def test_the_readmes_workflow_and_environment_run(repository, monkeypatch):
    """What a newcomer pastes from the README works as it stands."""
    text = (repository / "README.md").read_text()
    pasted: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, pasted)
    env = lambda: pasted["Parity"]()  # noqa: E731
    team = small.team(3, context=300)
    engine = Scripted(lambda request: str(request.fold[1] % 2))
    rollout = Rollout(engine, team, pasted["two_drafts"], env, DaemonThreads())
    episodes = rollout.play(range(4), 0)
    assert {episode.reward for episode in episodes} == {1.0}
    assert episodes[0].dependency.astype(int).tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 0]]


@pytest.mark.parametrize("module", ["marft_jax", "marft_jax.metrics"])
def test_importing_a_light_module_does_not_import_a_heavy_one(module, repository):
    code = f"import sys, {module}; print({{'jax', 'torch', 'tensorboardX'}} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_tests_see_eight_devices_and_strict_broadcasting():
    assert jax.device_count() == 8
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 3)) + jnp.ones(3)
