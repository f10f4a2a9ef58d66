"""A setting that a run does not read is unknown, or named in one warning; others are not."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import small

from marft_jax import cli
from marft_jax.cli import unused_settings
from marft_jax.envs import base as envs
from marft_jax.errors import BadInput
from marft_jax.formats.documents import FIRST_LINE
from marft_jax.learning.settings import SETTINGS, Appo, resolve, resolved
from marft_jax.settings import config as config_lib
from marft_jax.settings import setting
from marft_jax.types import MAIN

ROWS = ["--env.name", "math"]
SPIEL = ["--env.name", "open_spiel"]
GRPO = ["--algo.name", "grpo"]
DISTILL = ["--algo.name", "distill"]
PAID = [*DISTILL, "--algo.reward_coef", "1", "--algo.group_size", "2"]
IMITATES = ["--algo.name", "imitation"]
EVERY = ["--eval.every", "2"]
PROFILE = ["--team.file", "{tmp}/all.yaml"]  # whose agents set everything themselves
PAST_SELF = ["--team.file", "{tmp}/past.yaml"]
TREE = [*GRPO, "--algo.branches", "3", "--algo.credit", "tree"]
SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop")

READ = {
    "model.thinking": ["--model.base", "Qwen/Qwen3-4B"],
    **{f"team.{name}": [] for name in SAMPLING},
    "team.rounds": ["--team.workflow", "debate"],
    "team.max_steps": ["--team.workflow", "mine:flow"],
    "team.format_rest": ["--team.file", "{tmp}/form.yaml"],
    "team.max_tool_calls": ["--env.name", "an_env:Env"],
    "env.holdout": [*ROWS, "--env.data", "a"],
    "env.weights": [*ROWS, "--env.data", "a"],
    "env.retries": [*SPIEL, "--env.illegal", "retry"],
    "env.url_model": ["--env.name", "judged", "--env.url", "http://a"],
    "env.url_seconds": ["--env.name", "judged", "--env.url", "http://a"],
    **{f"critic.{name}": [] for name in ("mode", "lr", "hidden", "warmup_steps")},
    "algo.baseline_decay": ["--algo.name", "reinforce", "--algo.baseline", "moving"],
    "algo.branch_at": TREE,
    "algo.branch_continue": [*TREE, "--algo.branch_at", "every"],
    "algo.branch_budget": TREE,
    "algo.correction_cap": ["--algo.correction", "truncated"],
    "algo.correction_floor": ["--rollout.lag", "1"],
    "algo.correction_of": ["--algo.name", "tppo", "--algo.correction", "truncated"],
    **{f"algo.{name}": PAID for name in ("credit", "reward_bias", "reward_scale", "reward_clip")},
    "algo.credit_discount": ["--algo.credit", "step_discount"],
    "algo.entropy_target": [],
    "algo.kl_coef": [*DISTILL, "--algo.kl_in", "loss"],
    "algo.kl_estimator": ["--algo.kl_coef", "0.1"],
    "algo.kl_in": ["--algo.kl_coef", "0.1"],
    "algo.kl_reference_every": ["--algo.kl_coef", "0.1", "--algo.kl_reference", "start"],
    "algo.kl_reference": ["--algo.kl_coef", "0.1"],
    "algo.max_refills": [*GRPO, "--algo.dynamic_sampling", "true"],
    "algo.normalize": PAID,
    "algo.overlong_buffer": PAID,
    "algo.overlong_penalty": ["--algo.overlong_buffer", "4"],
    "algo.step_reward": ["--algo.credit", "per_step"],
    **{f"rollout.{name}": PAST_SELF for name in ("past_every", "past_kept", "past_choice")},
    "rollout.lag": [],
    "mesh.processes": ["--mesh.coordinator", "host:12"],
    "mesh.process": ["--mesh.coordinator", "host:12"],
    "mesh.rollout": [],
    "mesh.wait_seconds": ["--mesh.coordinator", "auto"],
    **{f"eval.{name}": EVERY for name in ("episodes", "temperature", "benchmarks")},
    "eval.data": [*EVERY, "--eval.benchmarks", "math500"],
    **{f"guard.{name}": [] for name in ("max_kl", "min_entropy", "reward_drop", "lr_factor")},
}
"""Where a setting is read: all that need another one."""
UNREAD = {
    **{f"team.{name}": PROFILE for name in SAMPLING},
    "team.rounds": PROFILE,
    "env.holdout": [*ROWS, "--env.eval_data", "b"],
    "env.weights": ROWS,
    "env.retries": SPIEL,
    "env.url_model": ["--env.name", "judged"],
    "env.url_seconds": ["--env.name", "judged"],
    **{f"critic.{name}": GRPO for name in ("lr", "hidden", "warmup_steps")},
    "critic.mode": IMITATES,
    "algo.baseline_decay": ["--algo.name", "reinforce"],
    **{f"algo.{name}": GRPO for name in ("branch_at", "branch_budget", "branch_continue")},
    "algo.correction_of": ["--algo.name", "tppo"],
    **{f"algo.{name}": DISTILL for name in ("credit", "normalize", "kl_coef", "overlong_buffer")},
    **{f"algo.{name}": DISTILL for name in ("reward_bias", "reward_scale", "reward_clip")},
    "algo.overlong_penalty": [*DISTILL, "--algo.overlong_buffer", "4"],
    "algo.entropy_target": GRPO,
    "algo.kl_reference_every": ["--algo.kl_reference", "start"],
    "algo.step_reward": ["--algo.credit", "per_step", "--team.file", "{tmp}/paid.yaml"],
    "rollout.lag": IMITATES,
    "mesh.process": ["--mesh.coordinator", "auto"],
    "mesh.rollout": IMITATES,
    "eval.data": EVERY,
    "guard.lr_factor": ["--guard.rollbacks", "0"],
    **{f"guard.{name}": IMITATES for name in ("max_kl", "min_entropy", "reward_drop")},
}
"""Where a setting is not read; without a line, in the quickstart."""
EVERYTHING = """
agents:
  - {name: a, max_new_tokens: 9, temperature: 0.5, top_p: 0.5, top_k: 3, min_p: 0.1, stop: x,
     answers: true}
"""
FORM = "agents: [{name: a, answers: true, format: {type: array, uniqueItems: true}}]"
PAST = "agents: [{name: a, answers: true}, {name: b, past: a}]"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "an_env.py").write_text("class Env:\n    reset = step = None\n")
    (tmp_path / "all.yaml").write_text(EVERYTHING)
    (tmp_path / "paid.yaml").write_text(EVERYTHING.replace("stop: x", "reward: solver"))
    (tmp_path / "past.yaml").write_text(PAST)
    (tmp_path / "form.yaml").write_text(FORM)
    return tmp_path


def other_value(key: str, flags: list[str]) -> str:
    """A value that is not the default of a command line with these flags."""
    section, name = key.split(".")
    schema = setting.properties(type(getattr(cli.parse(flags), section)))[name]
    default, kind = schema["default"], schema.get("anyOf", [schema])[0]
    kind = kind.get("items", kind)
    if "enum" in kind:
        return next(word for word in kind["enum"] if word not in (default, "none"))
    if kind["type"] == "boolean":
        return str(not default).lower()
    if kind["type"] == "integer":
        return str((default if isinstance(default, int) else 3) + 1)
    if kind["type"] == "number":
        return str((kind.get("minimum") or kind.get("exclusiveMinimum") or 0) + 0.625)
    return "arithmetic" if key == "eval.benchmarks" else "x=1"


def families() -> dict[str, dict[str, type]]:
    return {"env": {name: envs.settings_type(name) for name in envs.BUILT_IN}, "algo": SETTINGS}


def needing() -> list[str]:
    """Each setting that needs another one, of every environment and algorithm."""
    kinds = [(one.name, type(one.default)) for one in dataclasses.fields(config_lib.Config)]
    kinds += [(section, kind) for section, some in families().items() for kind in some.values()]
    return sorted(
        {
            f"{section}.{field.name}"
            for section, kind in kinds
            if dataclasses.is_dataclass(kind)
            for field in dataclasses.fields(kind)
            if field.metadata.get("needs")
        }
    )


@pytest.mark.parametrize("key", READ)
def test_a_setting_is_named_where_nothing_reads_it_and_taken_where_it_is_read(key, here):
    reads = [word.format(tmp=here) for word in READ[key]]
    given = [f"--{key}", other_value(key, reads)]
    taken = cli.parse([*reads, *given])
    assert setting.get(taken, key) != setting.get(cli.parse(reads), key)
    assert unused_settings.warning(taken) == ""
    flags = [word.format(tmp=here) for word in UNREAD.get(key, [])]
    warning = unused_settings.warning(cli.parse([*flags, *given]))
    assert warning.startswith("this run does not read ") and "\n" not in warning
    assert f"--{key} {given[1]} (it needs " in warning and len(warning) < 300


def test_each_setting_that_needs_another_is_asked_about():
    assert needing() == sorted(READ)


def test_keys_of_a_team_file_that_nothing_reads_are_named(here):
    (here / "keys.yaml").write_text(
        "judge: b\nnodes: [{id: p, role: a}]\nagents:\n"
        "  - {name: a, adapter: x, reward: solver}\n  - {name: b, adapter: x, answers: true}\n"
    )
    flags = ["--team.file", str(here / "keys.yaml"), "--lora.mode", "shared"]
    warning = unused_settings.warning(cli.parse(flags))
    keys = "the team file's nodes", "the team file's judge", "agent a's adapter", "agent a's reward"
    assert all(f"{key} (it needs --" in warning for key in keys)
    reads = "--team.workflow mine:flow --algo.credit per_step --lora.mode per_agent".split()
    assert unused_settings.warning(cli.parse([*flags, *reads])) == ""
    assert unused_settings.warning(cli.parse([*flags, "--algo.name", "imitation"])) == ""


COMMANDS = {
    "train": cli.parse_training,
    "imitate": lambda flags: cli.parse_training([*flags, "--algo.name", "imitation"]),
    "plan": cli.parse,
    **dict.fromkeys(("evaluate", "chat", "serve"), lambda flags: cli.parse_run(None, None, flags)),
}
SHIPPED = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_takes_each_shipped_file_and_names_once_what_it_does_not_read(
    command, file, caplog
):
    plays, flags = command in ("evaluate", "chat", "serve"), ["--config", str(file)]
    flags += ["--algo.kl_reference_every", "3"] if command != "imitate" else ["--rollout.lag", "1"]
    unused_settings.log("" if plays else unused_settings.warning(COMMANDS[command](flags)))
    if plays:
        COMMANDS[command](flags)
    [record] = caplog.records
    wanted = "--algo.kl_reference_every 3 (it needs --algo.kl_reference start)"
    wanted = wanted if command != "imitate" else "--rollout.lag 1 (it needs --algo.name not imit"
    assert record.message.count(wanted) == 1 and record.levelname == "WARNING"


def test_settings_of_a_critic_are_named_for_an_algorithm_of_ones_own_without_one(here):
    (here / "mine.py").write_text(
        "from marft_jax.settings.config import Algo\n\n\nclass PLAIN:\n    settings = Algo\n"
    )
    config = cli.parse(["--algo.name", "mine:PLAIN", "--critic.lr", "0.1"])
    warning = unused_settings.warning(config)
    assert "--critic.lr 0.1 (it needs algo.has_critic)" in warning


@pytest.mark.parametrize("base", ["tiny", "m.gguf", "Qwen/Qwen3-4B"])
@pytest.mark.parametrize("command", COMMANDS)
def test_agents_that_set_everything_themselves_leave_nothing_to_name(command, base, here, caplog):
    """The length of actions follows from the base, so that nobody gave it."""
    flags = ["--model.base", base, "--team.file", str(here / "all.yaml")]
    assert unused_settings.warning(COMMANDS[command](flags)) == ""
    given = COMMANDS[command]([*flags, "--team.max_new_tokens", "7", "--team.top_k", "4"])
    assert unused_settings.warning(given).count("(it needs agents.") == 2


@pytest.mark.parametrize("base", ["tiny", "Qwen/Qwen3-4B"])
def test_a_length_that_a_saved_run_had_from_its_base_was_not_given(base, here):
    config = cli.parse(["--model.base", base, "--team.file", str(here / "all.yaml")])
    (here / "config.yaml").write_text(config_lib.dump(config))
    assert unused_settings.warning(cli.parse(["--config", str(here / "config.yaml")])) == ""


def test_the_devices_that_only_play_are_named_where_nothing_is_learned(caplog):
    config = cli.parse_run(None, None, ["--mesh.rollout", "1"])
    assert config.mesh.rollout == () and "--mesh.rollout 1 (it needs a training)" in caplog.text


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


def test_what_a_later_choice_makes_unknown_is_dropped_and_else_it_is_refused(tmp_path):
    file = tmp_path / "maths.yaml"
    file.write_text("env: {name: math, data: [x.jsonl]}\nalgo: {gamma: 0.5}\n")
    config = cli.parse(["--config", str(file), "--env.name", "arithmetic", "--algo.name", "grpo"])
    assert config.env == cli.configure().env and config.algo == cli.parse(GRPO).algo
    assert cli.parse(["--config", str(file)]).env.data == ("x.jsonl",)
    (tmp_path / "lost.yaml").write_text("env: {task: countdown}\n")
    with pytest.raises(BadInput, match=r"env.task: .* it belongs to reasoning_gym"):
        cli.parse(["--config", str(tmp_path / "lost.yaml")])
    before = ["--config", str(tmp_path / "lost.yaml"), "--env.name", "reasoning_gym"]
    assert cli.parse(before).env.task == "countdown"  # read after all
    (tmp_path / "sums.yaml").write_text("env: {difficulty: 4}\n")
    rows = ["--config", str(tmp_path / "sums.yaml"), "--env.data", "x.jsonl"]
    assert cli.parse(rows).env.name == "math"  # rows are of math


def test_an_evaluation_reads_what_evaluations_read():
    config = cli.parse_run(None, None, ["--eval.temperature", "0.7"])
    assert config.eval.temperature == 0.7 and unused_settings.warning(config, evaluates=True) == ""


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
    (folder / "config.yaml").write_text(f"{FIRST_LINE}\n{config_lib.dump(config)}# end\n")
    return folder


def test_a_run_that_continues_takes_its_saved_settings_and_flags_on_top(run):
    config = cli.parse_training(["--run.dir", str(run), "--algo.clip", "0.3"])
    assert (config.run.dir, config.run.steps, config.algo.lr) == (str(run), 7, 0.5)
    assert (config.algo.clip, config.team.rounds) == (0.3, 3)
    assert config.team.file == str(run / "team.yaml")
    assert config.mesh == config_lib.Mesh()  # who computes with whom is not the run's
    changed = cli.parse_training(["--run.dir", str(run), "--team.workflow", "sequential"])
    assert "--team.rounds 3 (it needs --team.workflow debate" in unused_settings.warning(changed)
    other = ["--algo.name", "reinforce", "--algo.baseline", "role"]
    assert cli.parse_training(["--run.dir", str(run), *other]).algo.lr == 0.5


def test_a_directory_without_checkpoints_is_a_run_with_its_settings(run):
    (run / "checkpoints" / "3").rmdir()
    assert cli.parse_training(["--run.dir", str(run)]).run.steps == 7


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


@pytest.mark.slow
def test_whatever_is_accepted_is_resolved_to_what_loads_again(tmp_path):
    chance, file, accepted = random.Random(0), tmp_path / "config.yaml", 0
    contexts = [*READ.values(), *UNREAD.values(), []]
    for _ in range(300):
        flags = [word for word in chance.choice(contexts) if "{tmp}" not in word]
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
            if not config.algo.has_critic:  # what nobody reads is not saved
                config = dataclasses.replace(config, critic=config_lib.Critic())
            assert cli.parse(["--config", str(file)]) == config
    assert accepted > 30
