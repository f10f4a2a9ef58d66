"""Taking a team out of a run, and picking a checkpoint by its step, ``best`` or ``latest``."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from marft_jax import config as config_lib
from marft_jax import export, trained
from marft_jax.algorithms import find_algorithm
from marft_jax.checkpoint import Checkpoints
from marft_jax.config import BadInput
from marft_jax.identity import identity_of
from marft_jax.interop import peft
from marft_jax.learner import Learner
from marft_jax.session import open_session
from marft_jax.team.files import Blueprint, load_team
from marft_jax.team.roles import BUILT_IN
from marft_jax.train import write_settings

METRICS = {3: 0.9, 5: 0.4}  # the newest is not the best


@pytest.fixture(scope="module")
def session():
    return open_session(config_lib.Config(), Blueprint(BUILT_IN))


@pytest.fixture(scope="module")
def run(session, tmp_path_factory):
    """A run directory with two checkpoints; the adapters tell the step they are of."""
    folder = tmp_path_factory.mktemp("run")
    config = config_lib.parse(["--run.dir", str(folder)])
    learner = Learner(config, session.base, session.team, find_algorithm("appo"), session.mesh)
    state = learner.init()
    write_settings(folder, config, Blueprint(BUILT_IN))
    with Checkpoints(folder, identity_of(config, session.base, session.team), 2) as checkpoints:
        for step, metric in METRICS.items():
            numbers = jax.tree.map(lambda x, step=step: jnp.full_like(x, step), state.adapters)
            saved = state._replace(adapters=numbers, step=jnp.int32(step))
            checkpoints.save(step, saved, metric=metric)
    lines = [{"step": s, "reward/mean": m, "tokens/action": 7} for s, m in METRICS.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def run_export(*flags):
    with pytest.raises(SystemExit) as left:
        export.main([str(flag) for flag in flags])
    return left.value.code


@pytest.mark.parametrize(("step", "found"), [("latest", 5), ("best", 3), ("3", 3), ("5", 5)])
def test_a_checkpoint_is_found_by_step_best_or_latest(session, run, step, found):
    state = trained.restore_state(session, str(run), step)
    assert int(state.step) == found
    assert float(state.adapters["q"]["b"][0, 0, 0, 0]) == found
    assert trained.restore_team(session, str(run), step) == found


@pytest.mark.parametrize(
    ("run_dir", "step", "message"),
    [
        (True, "4", "there are: 3, 5"),
        (True, "newest", "--step: expected"),
        (False, "3", "only a --run has steps"),
    ],
)
def test_a_step_that_is_not_there_is_one_clear_line(session, run, run_dir, step, message):
    with pytest.raises(BadInput, match=message):
        trained.restore_state(session, str(run) if run_dir else None, step)


def test_a_team_travels_as_peft_folders_and_comes_back(session, run, tmp_path, capsys):
    out = tmp_path / "out"
    assert run_export("--run", run, "--out", out, "--step", "best") == 0
    assert "step 3" in capsys.readouterr().out
    for name in ("planner", "solver"):
        weights = load_file(out / name / peft.WEIGHTS)
        assert len(weights) == 4 * 2 * 2 and all((w == 3).all() for w in weights.values())
        settings = json.loads((out / name / peft.CONFIG).read_text())
        assert settings["base_model_name_or_path"] == str(out / "base")
        assert (settings["r"], settings["lora_alpha"]) == (8, 16)
        card = (out / name / "README.md").read_text()
        for told in ("arithmetic", "| reward/mean | 0.9 |", "training steps: 3", "PeftModel"):
            assert told in card
    assert (out / "base" / "model.safetensors").is_file()
    saved = trained.restore_state(session, str(run), "best").adapters
    as_team = session._replace(
        team=session.team._replace(profiles=load_team(str(out / "team.yaml")).agents)
    )
    config = config_lib.parse(["--lora.init", str(out)])
    for other in (as_team, session._replace(config=config)):  # by the team file, by the setting
        loaded = trained.restore_state(other, None).adapters
        jax.tree.map(np.testing.assert_array_equal, loaded, saved)


def test_a_merged_model_is_written_for_one_agent_or_for_each(run, tmp_path):
    assert run_export("--run", run, "--out", tmp_path / "a", "--format", "merged", "--agent",
                      "solver") == 0  # fmt: skip
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["solver"]
    folder = tmp_path / "a" / "solver"
    names = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
    assert names <= {p.name for p in folder.iterdir()}
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["do_sample"] is True and generation["max_new_tokens"] == 24
    assert "complete model" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--agent", "solver"], "--format merged"),
        (["--format", "merged", "--agent", "judge"], "planner, solver"),
        (["--run", "nowhere"], "config.yaml"),
    ],
)
def test_what_cannot_be_exported_is_one_clear_line(run, tmp_path, flags, message, capsys):
    assert run_export("--run", run, "--out", tmp_path / "out", *flags) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("marft_jax: ") and message in line


def test_a_folder_with_something_in_it_is_left_alone(run, tmp_path, capsys):
    (tmp_path / "mine").write_text("")
    assert run_export("--run", run, "--out", tmp_path) == 2
    assert "new or empty" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
