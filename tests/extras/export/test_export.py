"""Taking a team out of a run, and picking a checkpoint by its step, ``best`` or ``latest``."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import code_of
from imitated_hub import imitated
from safetensors import SafetensorError
from safetensors.numpy import load_file

from marft_jax import cli, export
from marft_jax.cli import configure
from marft_jax.envs.maths import Settings
from marft_jax.errors import BadInput
from marft_jax.extras.export import card, exporting, huggingface
from marft_jax.interop import peft
from marft_jax.models.families import FAMILIES
from marft_jax.run.checkpoints import Checkpoints
from marft_jax.run.compatibility import identity_of
from marft_jax.run.directory import write_settings
from marft_jax.run.models import open_models
from marft_jax.run.states import initial_state, make_learner, restore_state
from marft_jax.settings.setting import replaced
from marft_jax.team.profiles import BUILT_IN
from marft_jax.team.team_files import Blueprint, load_team
from marft_jax.types import MAIN

pytestmark = pytest.mark.usefixtures("one_device")

METRICS = {3: 0.9, 5: 0.4}  # the newest is not the best


@pytest.fixture(scope="module")
def models():
    with open_models(configure(), Blueprint(BUILT_IN)) as opened:
        yield opened


@pytest.fixture(scope="module")
def run(models, tmp_path_factory):
    """A run directory with two checkpoints; the adapters tell the step they are of."""
    folder = tmp_path_factory.mktemp("run")
    config = replaced(models.config, "run.dir", str(folder))
    state = make_learner(models).init()
    write_settings(folder, config, Blueprint(BUILT_IN))
    with Checkpoints(folder, identity_of(config, models.bases, models.team), 2) as checkpoints:
        for step, metric in METRICS.items():
            numbers = jax.tree.map(lambda x, step=step: jnp.full_like(x, step), state.adapters)
            saved = state.with_adapters(numbers)._replace(step=jnp.int32(step))
            checkpoints.save(step, saved, metric=metric)
    lines = [{"step": s, "reward/mean": m, "tokens/action": 7} for s, m in METRICS.items()]
    half = '{"step": 6, "rewa'  # of a run that goes on
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines) + half)
    return folder


def run_export(*flags):
    return code_of(export.main, *flags)


@pytest.mark.parametrize(("step", "found"), [("latest", 5), ("best", 3), ("3", 3), ("5", 5)])
def test_a_checkpoint_is_found_by_step_best_or_latest(models, run, step, found):
    state = restore_state(models, str(run), step)
    assert int(state.step) == found
    assert float(state.adapters[MAIN]["q"]["b"][0, 0, 0, 0]) == found


@pytest.mark.parametrize(
    ("run_dir", "step", "message"),
    [
        (True, "4", "--step 4: expected .* there are: 3, 5"),
        (True, "newest", "--step newest: expected best, latest"),
        (False, "3", "only a --run has steps"),
    ],
)
def test_a_step_that_is_not_there_is_one_clear_line(models, run, run_dir, step, message):
    with pytest.raises(BadInput, match=message):
        restore_state(models, str(run) if run_dir else None, step)


@pytest.mark.slow
def test_a_team_is_pushed_and_a_training_begins_with_it(models, run, tmp_path, monkeypatch, capsys):
    assert run_export("--run", run, "--out", tmp_path / "no", "--push", "sums") == 2
    assert not (tmp_path / "no").exists()
    with imitated(tmp_path, monkeypatch) as hub:
        assert run_export("--run", run, "--out", tmp_path / "out", "--push", "me/sums") == 0
        assert f"pushed: {hub.url}/me/sums" in capsys.readouterr().out
        begun = models._replace(config=configure(lora={"init": "hub:me/sums"}))
        state = initial_state(begun, make_learner(models).init())
    assert all((np.asarray(leaf) == 5).all() for leaf in jax.tree.leaves(state.adapters))


@pytest.mark.slow
def test_a_team_travels_as_peft_folders_and_comes_back(models, run, tmp_path, capsys):
    out = tmp_path / "out"
    assert run_export("--run", run, "--out", out, "--step", "best") == 0
    assert "step 3" in capsys.readouterr().out
    for name in ("planner", "solver"):
        weights = load_file(out / name / peft.WEIGHTS)
        assert len(weights) == 4 * 7 * 2 and all((w == 3).all() for w in weights.values())
        settings = json.loads((out / name / peft.CONFIG).read_text())
        assert settings["base_model_name_or_path"] == "base"
        assert (settings["r"], settings["lora_alpha"]) == (8, 16)
    card = (out / "README.md").read_text()
    for told in ("arithmetic", "| reward/mean | 0.9 |", "for 3 steps", "PeftModel"):
        assert told in card
    assert (out / "base" / "model.safetensors").is_file()
    for file in out.rglob("*"):  # nothing says where it was made, everybody may read it
        assert file.is_dir() or str(tmp_path).encode() not in file.read_bytes()
        usual = out.stat().st_mode & (0o777 if file.is_dir() else 0o666)
        assert file.stat().st_mode & 0o777 == usual
    (tmp_path / "elsewhere").mkdir()
    out = out.rename(tmp_path / "elsewhere" / "moved")
    saved = restore_state(models, str(run), "best").adapters
    agents = load_team(str(out / "team.yaml")).agents
    as_team = models._replace(team=models.team._replace(profiles=agents))
    config = cli.parse(["--lora.init", str(out)])
    for other in (as_team, models._replace(config=config)):  # by the team file, by the setting
        loaded = restore_state(other, None).adapters
        jax.tree.map(np.testing.assert_array_equal, loaded, saved)


def with_agents(run, folder, **changes):
    """The run with other fields of its solver."""
    copy = shutil.copytree(run, folder)
    agents = [BUILT_IN[0], dataclasses.replace(BUILT_IN[1], **changes)]
    config = replaced(replaced(configure(), "run.dir", str(copy)), "model.context", 900)
    write_settings(copy, config, Blueprint(tuple(agents)))
    return copy


FORM = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"], "additionalProperties": False}  # fmt: skip
WITHOUT = [
    ("peft", dict(tools=("python",)), "tools of solver (python)"),
    ("merged", dict(tools=("python",)), "tools of solver (python)"),
    ("merged", dict(format=FORM), "the format of solver's texts"),
]


@pytest.mark.parametrize(("form", "changes", "named"), WITHOUT)
def test_what_an_export_lacks_is_said(form, changes, named, run, tmp_path, capsys):
    own = with_agents(run, tmp_path / "run", prompt="", **changes)
    assert run_export("--run", own, "--out", out := tmp_path / "out", "--format", form) == 0
    assert f"not exported: {named}" in (out_text := capsys.readouterr().out)
    card = (out / "README.md").read_text()
    assert named in card and '""' not in card
    assert ("only marft_jax plays this team" in out_text) == (form == "peft")
    assert not (out / "client.py").exists()
    if "tools" in changes:  # the built-in model's template has none, so the prompt described them
        assert '- solver: "To call a tool, write a block' in card


def test_a_card_has_the_prompts_that_were_shown(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    config = replaced(replaced(configure(), "run.dir", str(copy)), "team.anonymous", True)
    write_settings(copy, config, Blueprint(BUILT_IN))
    assert run_export("--run", copy, "--out", out := tmp_path / "out") == 0
    card = (out / "README.md").read_text()
    assert "- planner: none\n- solver: none\n" in card and "also trained with" not in card


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("named", [True, False])
def test_one_rule_says_how_transformers_loads_a_base(name, named, tmp_path):
    """Published models of text and images have the text in a module of its own."""
    kind = name.partition("For")[0].lower() + ("_text" if name.endswith("ForCausalLM") else "")
    settings = {"architectures": [name]} if named else {"model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    images = name.endswith("ForConditionalGeneration")
    loader = "AutoModelForImageTextToText" if images else "AutoModelForCausalLM"
    assert huggingface.loader_of(str(tmp_path)) == loader
    inside = "model.language_model" if images else "model"
    assert peft.layers_in(str(tmp_path)) == inside
    facts = card.Facts(str(tmp_path), 3, configure(), Blueprint(BUILT_IN), "owner/name")
    card.write(tmp_path, facts, {"solver": ["solver"]}, "owner/name", loader)
    text = (tmp_path / "README.md").read_text()
    assert f"import {loader}, AutoTokenizer" in text and f"base = {loader}.from_pr" in text


def full_disk(folder, *_):
    (folder / "half").parent.mkdir(parents=True, exist_ok=True)
    (folder / "half").write_text("x")
    raise SafetensorError("Error while serializing: IoError: No space left on device (os error 28)")


@pytest.mark.parametrize("there", [True, False])
def test_an_export_that_cannot_be_written_leaves_nothing(there, run, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    if there:
        out.mkdir()
    monkeypatch.setattr(peft, "write", full_disk)
    assert run_export("--run", run, "--out", out) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"marft_jax: --out {out}: cannot be written (")
    assert [p.name for p in tmp_path.rglob("*")] == ["out"] * there


def test_a_card_names_files_without_their_places(models, run, tmp_path):
    data = ["/home/someone/secret/train.jsonl", "owner/name:train"]
    config = dataclasses.replace(models.config, env=Settings(data=tuple(data)))
    facts = card.Facts(str(run), 3, config, Blueprint(BUILT_IN), exporting._portable(str(run)))
    for base in ("model.gguf", ""):
        card.write(tmp_path, facts, {"solver": ["solver"]}, base)
        text = (tmp_path / "README.md").read_text()
        assert "(train.jsonl, owner/name:train)" in text and run.name in text
        assert "/home" not in text and str(run.parent) not in text


def test_a_merged_model_is_written_for_one_agent_or_for_each(run, tmp_path):
    assert run_export("--run", run, "--out", tmp_path / "a", "--format", "merged", "--agent",
                      "solver") == 0  # fmt: skip
    assert {p.name for p in (tmp_path / "a").iterdir()} == {"solver", "README.md"}
    folder = tmp_path / "a" / "solver"
    names = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
    assert names <= {p.name for p in folder.iterdir()}
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["do_sample"] is True and generation["max_new_tokens"] == 24
    assert "complete model" in (tmp_path / "a" / "README.md").read_text()


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


@pytest.mark.parametrize("form", ["peft", "merged"])
@pytest.mark.parametrize("name", ["..", "base", "team.yaml"])
def test_no_name_leads_out_of_the_folder_or_onto_another_file(name, form, run, tmp_path, capsys):
    hostile = shutil.copytree(run, tmp_path / "run")
    text = (run / "team.yaml").read_text()
    (hostile / "team.yaml").write_text(text.replace("name: solver", f"name: '{name}'"))
    (tmp_path / "README.md").write_text("mine")
    assert run_export("--run", hostile, "--out", tmp_path / "out", "--format", form) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "agents[1].name: expected a name" in line
    assert (tmp_path / "README.md").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "run"]
