"""A setting that a run does not read is refused, each of them; one that it reads is not."""

from __future__ import annotations

import dataclasses
import random

import pytest
import small

from marft_jax import cli, setting
from marft_jax import config as config_lib
from marft_jax.envs import base as envs
from marft_jax.errors import BadInput
from marft_jax.learning.settings import SETTINGS, Appo, resolve, resolved
from marft_jax.types import MAIN

ROWS = ["--env.name", "math"]
CODE = ["--env.name", "code"]
GYM = ["--env.name", "reasoning_gym"]
GRPO = ["--algo.name", "grpo"]
EVERY = ["--eval.every", "2"]
PROFILE = "{tmp}/all.yaml"  # whose agents set everything themselves

READ = {
    "model.thinking": ["--model.base", "Qwen/Qwen3-4B"],
    "team.rounds": ["--team.workflow", "debate"],
    "team.max_steps": ["--team.workflow", "mine:flow"],
    "team.max_tool_calls": ["--env.name", "an_env:Env"],
    "env.weights": [*ROWS, "--env.data", "a"],
    "env.retries": ["--env.name", "open_spiel", "--env.illegal", "retry"],
    "env.move_seconds": ["--env.name", "open_spiel", "--env.workers", "2"],
    "algo.credit_discount": ["--algo.credit", "step_discount"],
    "algo.step_reward": ["--algo.credit", "per_step"],
    "algo.overlong_penalty": ["--algo.overlong_buffer", "4"],
    "algo.baseline_decay": ["--algo.name", "reinforce", "--algo.baseline", "moving"],
    "algo.max_refills": [*GRPO, "--algo.dynamic_sampling", "true"],
    "algo.correction_cap": ["--algo.correction", "truncated"],
    "algo.correction_floor": ["--algo.correction", "truncated"],
    "algo.correction_of": ["--algo.name", "tppo", "--algo.correction", "truncated"],
    "algo.entropy_target": [],
    "algo.kl_in": ["--algo.kl_coef", "0.1"],
    "algo.kl_moves": ["--algo.kl_coef", "0.1", "--algo.kl_reference", "start"],
    "algo.kl_estimator": ["--algo.kl_coef", "0.1"],
    "mesh.processes": ["--mesh.coordinator", "host:12"],
    "mesh.process": ["--mesh.coordinator", "host:12"],
    "mesh.wait_seconds": ["--mesh.coordinator", "auto"],
    **{f"eval.{name}": EVERY for name in ("episodes", "temperature", "benchmarks")},
    "eval.data": [*EVERY, "--eval.benchmarks", "math500"],
}
"""Where a setting is read; without a line, in the quickstart."""
UNREAD = {
    **{f"team.{name}": ["--team.file", PROFILE] for name in ("max_new_tokens", "temperature")},
    **{f"team.{name}": ["--team.file", PROFILE] for name in ("top_p", "top_k", "min_p", "stop")},
    "team.rounds": ["--team.file", PROFILE],
    "env.holdout": [*ROWS, "--env.eval_data", "b"],
    "env.weights": ROWS,
    "env.retries": ["--env.name", "open_spiel"],
    "env.move_seconds": ["--env.name", "open_spiel"],
    "critic.mode": GRPO,
    "critic.lr": GRPO,
    "critic.hidden": GRPO,
    "critic.warmup_steps": GRPO,
    "algo.step_reward": ["--algo.credit", "per_step", "--team.file", PROFILE],
    "algo.baseline_decay": ["--algo.name", "reinforce"],
    "algo.correction_of": ["--algo.name", "tppo"],
    "algo.entropy_target": GRPO,
    "mesh.process": ["--mesh.coordinator", "auto"],
    "mesh.rollout": [],
    "eval.data": EVERY,
    "guard.lr_factor": ["--guard.rollbacks", "0"],
}
"""Where a setting is not read; without a line, in the quickstart."""
CONDITIONAL = sorted({*READ, *UNREAD})
EVERYTHING = """
agents:
  - {name: a, max_new_tokens: 9, temperature: 0.5, top_p: 0.5, top_k: 3, min_p: 0.1, stop: x,
     reward: solver, answers: true}
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "an_env.py").write_text("class Env:\n    reset = step = None\n")
    (tmp_path / "all.yaml").write_text(EVERYTHING)
    return tmp_path


def other_value(key: str, flags: list[str]) -> str:
    """A value that is not the default of a command line with these flags."""
    section, name = key.split(".")
    schema = setting.properties(type(getattr(cli.parse(flags), section)))[name]
    default, kind = schema["default"], schema.get("anyOf", [schema])[0]
    kind = kind.get("items", kind)
    if "enum" in kind:
        return next(word for word in kind["enum"] if word != default)
    if kind["type"] == "boolean":
        return str(not default).lower()
    if kind["type"] == "integer":
        return str((default if isinstance(default, int) else 3) + 1)
    if kind["type"] == "number":
        return str((kind.get("minimum") or kind.get("exclusiveMinimum") or 0) + 0.625)
    return "arithmetic" if key == "eval.benchmarks" else "x=1"


EVALUATED = ["mesh.rollout"]
"""Read in every training, but not when a run is evaluated."""


@pytest.mark.parametrize("key", CONDITIONAL)
def test_a_setting_is_refused_where_nothing_reads_it_and_taken_where_it_is_read(key, here):
    reads = READ.get(key, [])
    given = [f"--{key}", other_value(key, reads)]
    taken = cli.parse([*reads, *given])
    assert setting.get(taken, key) != setting.get(cli.parse(reads), key)
    flags = [word.format(tmp=here) for word in UNREAD.get(key, [])]
    with pytest.raises(BadInput) as caught:
        cli.parse_run(None, None, given) if key in EVALUATED else cli.parse([*flags, *given])
    message = str(caught.value)
    assert message.startswith(f"--{key}: ") and f"got {given[1]}" in message
    assert "it needs " in message or "it belongs to " in message
    assert "\n" not in message and len(message) < 300


def families() -> dict[str, dict[str, type]]:
    return {"env": {name: envs.settings_type(name) for name in envs.BUILT_IN}, "algo": SETTINGS}


@pytest.mark.parametrize(
    ("section", "name"), [(s, name) for s, kinds in families().items() for name in kinds]
)
def test_a_setting_of_another_environment_or_algorithm_is_unknown_and_says_whose_it_is(
    section, name
):
    own = {field.name for field in dataclasses.fields(families()[section][name])}
    foreign = {
        (field.name, str(field.default))
        for other, kind in families()[section].items()
        for field in dataclasses.fields(kind)
        if field.name not in own
    }
    assert foreign
    for key, value in foreign:
        with pytest.raises(BadInput, match=rf"^--{section}\.{key}: unknown setting .* belongs to"):
            cli.parse([f"--{section}.name", name, f"--{section}.{key}", value])


def test_a_file_is_judged_by_itself_and_a_flag_by_what_it_meets(tmp_path):
    """A flag on top of a file may leave some of the file without effect; they are defaults then."""
    file = tmp_path / "maths.yaml"
    file.write_text("env: {name: math, data: [x.jsonl]}\ncritic: {lr: 0.1}\n")
    config = cli.parse(["--config", str(file), "--env.name", "arithmetic", "--algo.name", "grpo"])
    assert config.env == cli.configure().env and config.critic == cli.configure().critic
    assert cli.parse(["--config", str(file)]).env.data == ("x.jsonl",)
    (tmp_path / "lost.yaml").write_text("env: {task: countdown}\n")
    with pytest.raises(BadInput, match=r"lost.yaml: env.task: .* it belongs to reasoning_gym"):
        cli.parse(["--config", str(tmp_path / "lost.yaml")])
    before = ["--config", str(tmp_path / "lost.yaml"), "--env.name", "reasoning_gym"]
    assert cli.parse(before).env.task == "countdown"  # read after all


def test_a_setting_goes_with_the_one_that_it_needs(tmp_path):
    file = tmp_path / "evaluated.yaml"
    file.write_text("eval: {every: 2, benchmarks: [math500], data: tasks}\n")
    assert cli.parse(["--config", str(file)]).eval.data == "tasks"
    assert cli.parse(["--config", str(file), "--eval.every", "0"]) == cli.configure()


def test_an_evaluation_reads_what_evaluations_read():
    assert cli.parse_run(None, None, ["--eval.temperature", "0.7"]).eval.temperature == 0.7


@pytest.fixture
def run(tmp_path):
    """A run directory as training leaves it, of a run that has been going on with a debate."""
    folder = tmp_path / "run"
    (folder / "checkpoints" / "3").mkdir(parents=True)
    (folder / "team.yaml").write_text("workflow: debate\nagents: [{name: a, answers: true}]\n")
    config = dataclasses.replace(
        cli.configure(),
        run=config_lib.Run(dir="elsewhere", steps=7),
        team=config_lib.Team(file="team.yaml", rounds=3),
        mesh=config_lib.Mesh(coordinator="host:1", processes=2, process=1),
        algo=Appo(lr=0.5),
    )
    (folder / "config.yaml").write_text(config_lib.dump(config))
    return folder


def test_a_run_that_continues_takes_its_saved_settings_and_flags_on_top(run):
    config = cli.parse_training(["--run.dir", str(run), "--algo.clip", "0.3"])
    assert (config.run.dir, config.run.steps, config.algo.lr) == (str(run), 7, 0.5)
    assert (config.algo.clip, config.team.rounds) == (0.3, 3)
    assert config.team.file == str(run / "team.yaml")
    assert config.mesh == config_lib.Mesh()  # who computes with whom is not the run's
    changed = cli.parse_training(["--run.dir", str(run), "--team.workflow", "sequential"])
    assert changed.team.rounds == cli.configure().team.rounds
    with pytest.raises(BadInput, match="--team.rounds: this run does not read it"):
        cli.parse_training(["--run.dir", str(run), "--team.workflow", "solo", "--team.rounds", "4"])


def test_a_directory_without_checkpoints_is_a_new_run(run):
    (run / "checkpoints" / "3").rmdir()
    assert cli.parse_training(["--run.dir", str(run)]).run.steps == cli.configure().run.steps


def test_a_run_that_continues_does_not_read_where_to_start_from(run):
    with pytest.raises(BadInput, match="--lora.init team: .* has begun"):
        cli.parse_training(["--run.dir", str(run), "--lora.init", "team"])


def test_a_resolved_config_loads_wherever_the_run_is_moved(run, tmp_path):
    moved = run.rename(tmp_path / "moved")
    config = cli.parse(["--config", str(moved / "config.yaml")])
    assert config.team.file == str(moved / "team.yaml") and config.team.rounds == 3


@pytest.mark.parametrize("name", SETTINGS)
def test_what_an_algorithm_resolves_to_loads_again(name, tmp_path):
    config = cli.parse(["--algo.name", name])
    settled = resolved(config, resolve(config, {MAIN: (config.model.base, small.CONFIG)}))
    assert settled.algo.lr == 1e-3
    (tmp_path / "config.yaml").write_text(config_lib.dump(settled))
    assert cli.parse(["--config", str(tmp_path / "config.yaml")]) == settled


def test_whatever_is_accepted_is_resolved_to_what_loads_again(tmp_path):
    chance, file, accepted = random.Random(0), tmp_path / "config.yaml", 0
    contexts = [*READ.values(), *UNREAD.values(), []]
    for _ in range(300):
        flags = [word for word in chance.choice(contexts) if word != PROFILE]
        flags = flags if "--team.file" not in flags else []
        keys = [key for key, _ in setting.settings(cli.parse(flags))]
        keys = [key for key in keys if key not in ("team.file", "env.name", "algo.name")]
        for key in chance.sample(keys, 2):
            flags = [*flags, f"--{key}", other_value(key, flags)]
            try:
                config = cli.parse(flags)
            except BadInput:
                break
        else:
            accepted += 1
            file.write_text(config_lib.dump(config))
            assert cli.parse(["--config", str(file)]) == config
    assert accepted > 30
