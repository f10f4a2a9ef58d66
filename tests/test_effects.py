"""A setting that a run does not read is refused, each of them; one that it reads is not."""

from __future__ import annotations

import dataclasses
import random
import re

import pytest

from marft_jax import cli
from marft_jax import config as config_lib
from marft_jax.config import Config
from marft_jax.errors import BadInput
from marft_jax.learning.algorithms import ALGORITHMS, settle

CONDITIONAL = [key for key, field in config_lib.settings() if field.metadata.get("read")]
ROWS = ["--env.name", "math"]
CODE = ["--env.name", "code"]
GYM = ["--env.name", "reasoning_gym"]
OWN = ["--env.name", "mine:Env"]
GRPO = ["--algo.name", "grpo"]
EVERY = ["--eval.every", "2"]
PROFILE = "{tmp}/all.yaml"  # whose agents set everything themselves

READ = {
    "model.thinking": ["--model.base", "Qwen/Qwen3-4B"],
    "team.rounds": ["--team.workflow", "debate"],
    "team.max_steps": ["--team.workflow", "mine:flow"],
    "team.max_tool_calls": OWN,
    "env.data": ROWS,
    "env.weights": [*ROWS, "--env.data", "a"],
    "env.eval_data": CODE,
    "env.filters": CODE,
    "env.max_bad_rows": CODE,
    "env.question_field": ROWS,
    "env.answer_field": ROWS,
    "env.extract": [*EVERY, "--eval.benchmarks", "math500"],
    "env.grade_seconds": GYM,
    "env.workers": [*EVERY, "--eval.benchmarks", "humaneval:4@0.5"],
    **{f"env.{name}": CODE for name in ("reward", "tests", "test_seconds", "code_seconds")},
    **{f"env.{name}": CODE for name in ("memory_mb", "sandbox")},
    "env.task": GYM,
    "env.options": OWN,
    "algo.credit_discount": ["--algo.credit", "step_discount"],
    "algo.step_reward": ["--algo.credit", "per_step"],
    "algo.overlong_penalty": ["--algo.overlong_buffer", "4"],
    "algo.baseline": ["--algo.name", "reinforce"],
    "algo.baseline_decay": ["--algo.name", "reinforce", "--algo.baseline", "moving"],
    "algo.max_refills": [*GRPO, "--algo.dynamic_sampling", "true"],
    "algo.correction_cap": ["--algo.correction", "truncated"],
    "algo.kl_in": ["--algo.kl_coef", "0.1"],
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
    **{f"team.{name}": ["--team.file", PROFILE] for name in ("top_p", "top_k", "min_p")},
    "team.rounds": ["--team.file", PROFILE],
    "env.holdout": [*ROWS, "--env.eval_data", "b"],
    "env.horizon": OWN,
    "env.difficulty": ROWS,
    "env.curriculum": ROWS,
    "env.data": [*EVERY, "--eval.benchmarks", "math500"],
    "env.weights": ROWS,
    "critic.lr": GRPO,
    "critic.hidden": GRPO,
    "critic.warmup_steps": GRPO,
    "algo.value_clip": GRPO,
    "algo.huber_delta": GRPO,
    "algo.gamma": GRPO,
    "algo.gae_lambda": GRPO,
    "algo.step_reward": ["--algo.credit", "per_step", "--team.file", PROFILE],
    "algo.baseline_decay": ["--algo.name", "reinforce"],
    **{f"algo.{name}": ["--algo.name", "reinforce"] for name in ("clip", "clip_high", "dual_clip")},
    "mesh.process": ["--mesh.coordinator", "auto"],
    "eval.data": EVERY,
    "guard.lr_factor": ["--guard.rollbacks", "0"],
}
"""Where a setting is not read; without a line, in the quickstart."""
EVERYTHING = """
agents:
  - {name: a, max_new_tokens: 9, temperature: 0.5, top_p: 0.5, top_k: 3, min_p: 0.1,
     reward: solver, answers: true}
"""


@pytest.fixture
def here(tmp_path):
    (tmp_path / "all.yaml").write_text(EVERYTHING)
    return tmp_path


def other_value(key: str) -> str:
    """A value that is not the default."""
    field = dict(config_lib.settings())[key]
    kind, default = str(field.type), field.default
    if kind.startswith("Literal"):
        return next(word for word in re.findall(r"['\"](\w+)['\"]", kind) if word != default)
    if "bool" in kind:
        return str(not default).lower()
    if "int" in kind:
        return str((default if isinstance(default, int) else 3) + 1)
    if "float" in kind:
        low = field.metadata.get("least") or field.metadata.get("above") or 0
        return str(low + 0.625)
    return "arithmetic" if key == "eval.benchmarks" else "x=1"


EVALUATED = ["mesh.rollout"]
"""Read in every training, but not when a run is evaluated."""


@pytest.mark.parametrize("key", CONDITIONAL)
def test_a_setting_is_refused_where_nothing_reads_it_and_taken_where_it_is_read(key, here):
    given = [f"--{key}", other_value(key)]
    taken = cli.parse([*READ.get(key, []), *given])
    assert config_lib.get(taken, key) != config_lib.get(Config(), key)
    flags = [word.format(tmp=here) for word in UNREAD.get(key, [])]
    with pytest.raises(BadInput) as caught:
        cli.parse([*flags, *given], evaluating=key in EVALUATED)
    message = str(caught.value)
    assert message.startswith(f"--{key}: this run does not read it, got ")
    assert "\n" not in message and len(message) < 300
    takes = message.partition("it is read ")[2]
    conditions = dict(config_lib.settings())[key].metadata["read"]
    assert any(takes.startswith(condition.says) for condition in conditions)


def test_the_default_is_never_refused():
    """A run's own ``config.yaml`` names everything."""
    for key in CONDITIONAL:
        default = config_lib.get(Config(), key)
        if not isinstance(default, tuple) and default != "":
            assert cli.parse([f"--{key}", str(default)]) == Config()


def test_every_conditional_setting_has_a_way_to_be_read():
    assert set(READ) | set(UNREAD) <= set(CONDITIONAL)
    assert len(CONDITIONAL) > 50


def test_a_file_is_judged_by_itself_and_a_flag_by_what_it_meets(tmp_path):
    """A flag on top of a file may leave some of the file without effect; they are defaults then."""
    file = tmp_path / "maths.yaml"
    file.write_text("env: {name: math, data: [x.jsonl]}\ncritic: {lr: 0.1}\n")
    config = cli.parse(["--config", str(file), "--env.name", "arithmetic", "--algo.name", "grpo"])
    assert config.env == Config().env and config.critic == Config().critic
    assert cli.parse(["--config", str(file)]).env.data == ("x.jsonl",)
    (tmp_path / "lost.yaml").write_text("env: {task: countdown}\n")
    with pytest.raises(BadInput, match=r"lost.yaml: env.task: this run does not read it"):
        cli.parse(["--config", str(tmp_path / "lost.yaml")])
    before = ["--config", str(tmp_path / "lost.yaml"), "--env.name", "reasoning_gym"]
    assert cli.parse(before).env.task == "countdown"  # read after all


def test_settings_know_which_algorithms_have_a_critic():
    with_critic = [name for name, algorithm in ALGORITHMS.items() if algorithm.has_critic]
    assert with_critic == list(config_lib.WITH_CRITIC)


def test_an_evaluation_reads_what_evaluations_read():
    assert cli.parse(["--eval.temperature", "0.7"], evaluating=True).eval.temperature == 0.7


@pytest.fixture
def run(tmp_path):
    """A run directory as training leaves it, of a run that has been going on with a debate."""
    folder = tmp_path / "run"
    (folder / "checkpoints" / "3").mkdir(parents=True)
    (folder / "team.yaml").write_text("workflow: debate\nagents: [{name: a, answers: true}]\n")
    config = dataclasses.replace(
        Config(),
        run=config_lib.Run(dir="elsewhere", steps=7),
        team=config_lib.Team(file="team.yaml", rounds=3),
        mesh=config_lib.Mesh(coordinator="host:1", processes=2, process=1),
        algo=config_lib.Algo(lr=0.5),
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
    assert changed.team.rounds == Config().team.rounds
    with pytest.raises(BadInput, match="--team.rounds: this run does not read it"):
        cli.parse_training(["--run.dir", str(run), "--team.workflow", "solo", "--team.rounds", "4"])


def test_a_directory_without_checkpoints_is_a_new_run(run):
    (run / "checkpoints" / "3").rmdir()
    assert cli.parse_training(["--run.dir", str(run)]).run.steps == Config().run.steps


def test_a_run_that_continues_does_not_read_where_to_start_from(run):
    with pytest.raises(BadInput, match="--lora.init team: .* has begun"):
        cli.parse_training(["--run.dir", str(run), "--lora.init", "team"])


def test_a_resolved_config_loads_wherever_the_run_is_moved(run, tmp_path):
    moved = run.rename(tmp_path / "moved")
    config = cli.parse(["--config", str(moved / "config.yaml")])
    assert config.team.file == str(moved / "team.yaml") and config.team.rounds == 3


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_an_algorithm_resolves_to_loads_again(name, tmp_path):
    settled = settle(cli.parse(["--algo.name", name]))
    (tmp_path / "config.yaml").write_text(config_lib.dump(settled))
    again = cli.parse(["--config", str(tmp_path / "config.yaml")])
    assert again == settled == settle(again)


def test_whatever_is_accepted_is_resolved_to_what_loads_again(tmp_path):
    chance, file, accepted = random.Random(0), tmp_path / "config.yaml", 0
    keys = [key for key, _ in config_lib.settings() if key not in ("team.file", "env.name")]
    contexts = [*READ.values(), *UNREAD.values(), []]
    for _ in range(300):
        flags = [word for word in chance.choice(contexts) if word != PROFILE]
        flags = flags if "--team.file" not in flags else []
        for key in chance.sample(keys, 2):
            flags += [f"--{key}", other_value(key)]
        try:
            config = cli.parse(flags)
        except BadInput:
            continue
        accepted += 1
        file.write_text(config_lib.dump(config))
        assert cli.parse(["--config", str(file)]) == config
    assert accepted > 30
