"""Every setting, with defaults that are the quickstart.

YAML files are flattened into flags and parsed together with the command line in one go, files
first, so that what comes later wins and a setting means the same wherever it is written:

    python -m marft_jax.train --config configs/gsm8k_smollm2.yaml --algo.lr 3e-5
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import tyro
import yaml

from marft_jax.lora import TARGETS


class BadInput(ValueError):
    """Wrong configuration or data: reported as one line, exit code 2."""


@dataclasses.dataclass(frozen=True)
class Run:
    dir: str = "runs/quickstart"
    """Where the run lives; starting again in the same directory continues."""
    steps: int = 50
    """Training steps in all, those of earlier starts included."""
    seed: int = 0
    """Seeds the order of tasks, the sampling, the initial adapters and the critic."""
    save_every: int = 10
    """Steps between checkpoints; the last step is always saved."""
    save_minutes: float = 15.0
    """A step that ends so long after the last checkpoint is saved too; 0 counts steps only."""
    keep: int = 3
    """How many of the newest checkpoints stay, beside the best."""
    best_metric: str | None = "reward/mean"
    """The checkpoint with the highest value of this metric stays too; none keeps no best."""
    transcripts_every: int = 5
    """Steps between written transcripts; 0 writes none."""
    tensorboard: bool = True
    """Also write TensorBoard event files."""


@dataclasses.dataclass(frozen=True)
class Model:
    base: str = "tiny"
    """`tiny`, a directory (config.json + safetensors + tokenizer), a hub id, or a .gguf file."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the frozen base and its activations; adapters and critic are always float32."""
    context: int = 256
    """The longest prompt plus action, in tokens."""
    thinking: bool = False
    """Let a model whose chat template has such a mode think before it answers (Qwen3)."""
    remat: Literal["none", "products", "block"] = "products"
    """What the update computes again instead of keeping it: nothing, all but the products with the
    base's matrices, or each block from its input (least memory, a third more work)."""


@dataclasses.dataclass(frozen=True)
class Team:
    file: str | None = None
    """A team file (see configs/teams/); without one, the built-in planner and solver."""
    workflow: str | None = None
    """Who acts when: sequential, dag, orchestrated, debate, solo, or your own as
    package.module:function; none is what the team file says, or else sequential."""
    context: Literal["own", "shared"] = "own"
    """Each agent's own prompt with the actions it may see, or one growing conversation."""
    anonymous: bool = False
    """No names and no system prompts: agents cannot tell who they are."""
    rounds: int = 2
    """debate: how often everyone speaks."""
    max_steps: int = 10
    """orchestrated: how often the orchestrator may call an agent in a step."""
    max_tool_calls: int = 4
    """How often an agent may call a tool in one turn, where the environment has tools."""
    max_new_tokens: int = 24
    """The longest action, in tokens; a profile may say otherwise, here and below."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this much of what top_k keeps; 1 is off."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0 is off."""
    min_p: float = 0.0
    """Sample from tokens at least this fraction as likely as the likeliest; 0 is off."""


@dataclasses.dataclass(frozen=True)
class Env:
    name: str = "arithmetic"
    """arithmetic, math, code, reasoning_gym, or your own as package.module:Class."""
    data: tuple[str, ...] = ()
    """Tasks to train on: .json, .jsonl, .parquet files, or hub ids owner/name[/subset][:split]."""
    weights: tuple[float, ...] = ()
    """A share of the training tasks for each of `data`; without them every task is as likely."""
    eval_data: tuple[str, ...] = ()
    """Tasks to evaluate on; without them, `holdout` of `data` is set aside."""
    holdout: float = 0.1
    """Fraction of the tasks, chosen by a hash of their text, that training never sees."""
    filters: tuple[str, ...] = ()
    """Rows to keep, by their fields: `level=Level 4|Level 5`, `source!=x`, `grade<=3`."""
    max_bad_rows: float = 0.001
    """Fraction of the rows that may lack a question or an answer; they are left out, reported."""
    question_field: str | None = None
    """Maths: the field of the question, where its name is not one of the usual ones."""
    answer_field: str | None = None
    """Maths: the field of the answer, where its name is not one of the usual ones."""
    horizon: int = 1
    """Steps per episode: how often the team may try, with feedback in between."""
    difficulty: int = 3
    """Arithmetic: how many numbers each problem adds up."""
    curriculum: float | None = None
    """Begin with the easiest tasks, and go one level up when the mean reward reaches this."""
    extract: Literal["auto", "boxed", "hashes", "letter", "number", "phrase"] = "auto"
    """Maths: the one way of giving an answer that counts; auto takes the first that is there."""
    grade_seconds: float = 10.0
    """Maths: after so long an answer that cannot be graded counts as wrong."""
    workers: int = 2
    """Maths and code: how many answers are graded at the same time."""
    reward: Literal["fraction", "all"] = "fraction"
    """Code: the fraction of tests passed, or 1 for all of them and else 0."""
    tests: int = 10
    """Code: how many of a task's tests are run, the first ones; 0 runs all."""
    test_seconds: float = 5.0
    """Code: wall time of one test."""
    code_seconds: float = 60.0
    """Code: wall time of all tests of a program."""
    memory_mb: int = 1024
    """Code: address space of a program."""
    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    """Code: `none` runs what the model writes as you, with your files and network in its reach."""
    task: str = ""
    """reasoning_gym: the name of the task, such as countdown."""
    options: tuple[str, ...] = ()
    """reasoning_gym: the task's own settings, as `name=value`."""


@dataclasses.dataclass(frozen=True)
class Lora:
    mode: Literal["per_agent", "shared"] = "per_agent"
    """One adapter for each agent, or one for all."""
    rank: int = 8
    alpha: float = 16.0
    """The correction is scaled by alpha / rank."""
    targets: tuple[str, ...] = ("q", "v")
    """Matrices with an adapter, any of q, k, v, o, gate, up, down."""
    init: str | None = None
    """A folder with a peft folder per adapter to start from: an export, or steps_NNNN of MARFT."""


@dataclasses.dataclass(frozen=True)
class Critic:
    mode: Literal["auto", "shared", "heads", "lora", "none"] = "auto"
    """A value head for the whole team over the frozen base; a head per agent; one head over an
    adapter per agent; or none. auto: shared, and none for algorithms without a critic."""
    lr: float = 5e-4
    hidden: tuple[int, ...] = (1024, 512)
    """Widths of a value head's hidden layers."""
    warmup_steps: int = 0
    """Training steps in which only the critic learns."""


@dataclasses.dataclass(frozen=True)
class Algo:
    name: str = "appo"
    """appo (MARFT-A, a decision per action), tppo (MARFT-T, per token), grpo, gspo or reinforce."""
    episodes: int = 64
    """Episodes per training step."""
    group_size: int | None = None
    """How many of them share a task; none: 8 where the algorithm compares them, else 1."""
    lr: float = 1e-3
    """Adam's learning rate for the adapters."""
    epochs: int = 2
    """Passes over each batch."""
    minibatches: int = 2
    """Optimiser steps per pass."""
    microbatch_tokens: int = 8192
    """Tokens in one forward-backward pass; gradients accumulate up to a minibatch."""
    reuse: bool = True
    """Turns that stand in one row share what they begin with (not on TPUs)."""

    credit: Literal["last", "equal", "step_discount", "per_step"] = "last"
    """Who is paid: a step's last turn; the same, but each agent is logged with all of it; turn k of
    N with reward * credit_discount^(N-1-k); or each turn by its own step reward."""
    credit_discount: float = 1.0
    """step_discount: how much less each earlier turn of a step is paid."""
    step_reward: str | None = None
    """per_step: planner, solver, verifier, code_planner, coder, debugger or
    package.module:function; an agent's own `reward` comes first."""
    reward_bias: float = 0.0
    """A reward becomes (reward + bias) * scale, clipped; one for a single agent has no bias."""
    reward_scale: float = 1.0
    reward_clip: float | None = None
    """Shaped rewards are clipped to ± this."""
    overlong_buffer: int = 0
    """Tokens before its limit over which an action's length penalty grows from 0; 0 is off."""
    overlong_penalty: float = 1.0
    """What an action as long as its limit loses."""

    gamma: float = 0.99
    """appo, tppo: discount from one decision to the next."""
    gae_lambda: float = 0.95
    normalize: Literal["auto", "batch", "agent", "group", "group_turn", "none"] = "auto"
    """Advantages to mean 0 and deviation 1 over the batch, each agent's, each group, each agent's
    n-th turn in a group, or not at all. auto: batch; grpo and gspo: group; reinforce: none."""
    baseline: Literal["auto", "group", "moving"] = "auto"
    """reinforce: returns minus the mean of the same turns in the group, or a moving average."""
    baseline_decay: float = 0.9
    """How much of the moving average stays in each step."""
    dynamic_sampling: bool = False
    """Drop groups whose samples earned the same, and play further tasks in their place."""
    max_refills: int = 3
    """How often, per training step."""

    ratio: Literal["auto", "sum", "token", "word"] = "auto"
    """An action's log-prob is the sum over its tokens, or that per token or per word. auto: sum;
    gspo: token. tppo and grpo have a ratio per token."""
    clip: float = 0.2
    """The ratio is clipped to 1 - this, and above to ..."""
    clip_high: float | None = None
    """... 1 + this; none: the same."""
    dual_clip: float | None = None
    """Where the advantage is negative the loss stops at this times it (> 1)."""
    correction: Literal["none", "decoupled", "truncated"] = "none"
    """Ratios to the policy at the start of the update, weighed by its own ratio to the policy that
    sampled: those over the cap count 0, or are cut to it."""
    correction_cap: float = 5.0
    entropy_coef: float = 0.01
    kl_coef: float = 0.0
    """Weight of the KL to the base without adapters; 0 is off."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Subtract it from each token's reward, or add its mean over an action's tokens to the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """k1 has no gradient on average: in the loss take k2 or k3."""
    max_kl: float | None = None
    """An agent whose approximate KL exceeds this in a minibatch is not updated by it."""
    max_grad_norm: float = 0.5
    """Each adapter's and each value head's gradient is clipped to this norm."""
    value_clip: float = 0.2
    """The new value is clipped to the old one ± this."""
    huber_delta: float | None = 10.0
    """Beyond this the value error counts linearly; none squares it everywhere."""
    agent_interval: int = 0
    """k > 0 trains one agent at a time, in turn, k steps each; 0 trains all together."""


@dataclasses.dataclass(frozen=True)
class Rollout:
    slots: int = 64
    """Rows of the key-value cache: how many agents act at the same time."""
    chunk: int = 16
    """Decode steps on the device between two looks of the host."""
    reuse: bool = True
    """Take over the beginning of a prompt (a system prompt, a group's task, a conversation) from
    another row, where one has computed it with the same adapter."""
    step_seconds: float = 600.0
    """An episode whose environment or workflow takes longer to answer has failed."""
    max_turns: int = 128
    """An episode that wants more turns ends there, with what it has earned."""
    max_failed_fraction: float = 0.25
    """Failed episodes are dropped and counted; more of them than this stop the run."""


@dataclasses.dataclass(frozen=True)
class Mesh:
    data: int = -1
    """Devices along the batch; -1 takes all that the other axes leave."""
    fsdp: int = 1
    """Devices that share each matrix's rows, and the batch."""
    tensor: int = 1
    """Devices that share each matrix's columns."""
    coordinator: str | None = None
    """Several processes: HOST:PORT of the first one, or auto where the scheduler tells (TPU pods,
    SLURM, Open MPI, Kubernetes)."""
    processes: int | None = None
    """How many, with HOST:PORT."""
    process: int | None = None
    """The number of this one, from 0, with HOST:PORT."""
    wait_seconds: float = 60.0
    """How long processes wait for one that has not come, or has gone, before they give up."""


@dataclasses.dataclass(frozen=True)
class Eval:
    every: int = 0
    """Steps between evaluations on the held-out tasks; 0 never."""
    episodes: int = 128
    """Tasks per evaluation, of each benchmark."""
    temperature: float = 0.0
    """Sampling temperature of an evaluation; 0 is greedy."""
    benchmarks: tuple[str, ...] = ()
    """What is played, as name[:samples][@temperature]; without it the held-out tasks of `env`."""
    data: str | None = None
    """Folder with the files of benchmarks; without it they come from the hub."""


@dataclasses.dataclass(frozen=True)
class Guard:
    skips: int | None = 3
    """So many steps in a row with numbers that are not finite lead to a rollback; none never."""
    patience: int = 5
    """So many steps in a row outside one of the bounds below lead to a rollback."""
    max_kl: float | None = 20.0
    """An agent's approximate KL within a step; none is off, here and below."""
    min_entropy: float | None = 1e-6
    """An agent's entropy per token, for one that had more for ``patience`` steps."""
    max_cut: float | None = 0.9
    """Share of an agent's actions at their token limit or empty, for one that had less for
    ``patience`` steps."""
    reward_drop: float | None = 1.0
    """How far the reward may fall below its best, in standard deviations over the episodes."""
    rollbacks: int = 3
    """How often a run is rolled back before it stops with a report."""
    lr_factor: float = 0.1
    """Each rollback multiplies the learning rates by this."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Fine-tunes a team of language-model agents with reinforcement learning."""

    run: Run = Run()
    model: Model = Model()
    team: Team = Team()
    env: Env = Env()
    lora: Lora = Lora()
    critic: Critic = Critic()
    algo: Algo = Algo()
    rollout: Rollout = Rollout()
    mesh: Mesh = Mesh()
    eval: Eval = Eval()
    guard: Guard = Guard()


def parse(argv: Sequence[str], *, prog: str = "marft_jax.train") -> Config:
    """Command line to a validated ``Config``.

    ``--config FILE`` may stand several times; its settings come before those of the flags, and a
    later one replaces an earlier one.

    Raises:
        BadInput: for an unknown key (with the nearest known one), a wrong type or literal, a file
            that is missing or is not YAML, or settings that contradict each other.
    """
    files, flags = _split_config_flags(argv)
    if {"-h", "--help"} & set(flags):
        tyro.cli(Config, prog=f"python -m {prog}", args=["--help"], config=_TYRO)
    settings: dict[str, list[str]] = {}
    for file in files:
        settings |= _flatten(_read_yaml(file), file)
    settings |= _group_flags(flags)
    known = _known_keys()
    for key in settings:
        if key not in known:
            raise BadInput(f"unknown setting {key!r}{_suggest(key, known)}")
    config = _typed(settings, prog)
    validate(config)
    return config


def validate(config: Config) -> None:
    """Checks that need no files: ranges, and settings that must fit together.

    Raises:
        BadInput: expected, got, and how to fix it, for the first setting that is off.
    """
    for key, low in _AT_LEAST.items():
        value = _get(config, key)
        if value is not None and not value >= low:  # so that nan is refused too
            raise BadInput(f"--{key}: expected at least {low}, got {value}")
    for key, (low, high) in _BETWEEN.items():
        if not low <= (value := _get(config, key)) <= high:
            raise BadInput(f"--{key}: expected a number from {low} to {high}, got {value}")
    if config.team.top_p <= 0:
        raise BadInput(f"--team.top_p: expected 0 < top_p <= 1, got {config.team.top_p}")
    for target in config.lora.targets:
        if target not in TARGETS:
            raise BadInput(f"--lora.targets: expected any of {', '.join(TARGETS)}, got {target!r}")
    if not config.lora.targets or len(set(config.lora.targets)) < len(config.lora.targets):
        raise BadInput(f"--lora.targets: expected distinct targets, got {config.lora.targets}")
    if config.team.max_new_tokens >= config.model.context:
        raise BadInput(
            f"--team.max_new_tokens: expected less than --model.context {config.model.context}, "
            f"got {config.team.max_new_tokens}; raise the context"
        )
    for key in ("algo.huber_delta", "algo.reward_clip"):
        if (value := _get(config, key)) is not None and value <= 0:
            raise BadInput(f"--{key}: expected a number above 0, or none, got {value}")
    if config.algo.dual_clip is not None and not config.algo.dual_clip > 1:
        raise BadInput(f"--algo.dual_clip: expected more than 1, got {config.algo.dual_clip}")
    for axis in ("data", "fsdp", "tensor"):
        size = getattr(config.mesh, axis)
        if size != -1 and size < 1:
            raise BadInput(f"--mesh.{axis}: expected a positive number or -1, got {size}")


def dump(config: Config) -> str:
    """The resolved config as YAML that ``--config`` loads to an equal ``Config``."""
    plain = dataclasses.asdict(config)
    for section in plain.values():
        for key, value in section.items():
            section[key] = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def exit_with(error: BaseException, code: int = 2) -> NoReturn:
    """Prints an error as one line on stderr and leaves; exit code 2 is bad input."""
    print(f"marft_jax: {' '.join(str(error).split())}", file=sys.stderr)
    raise SystemExit(code)


_AT_LEAST = {
    "run.steps": 0,
    "run.save_every": 1,
    "run.save_minutes": 0,
    "run.keep": 1,
    "run.transcripts_every": 0,
    "model.context": 8,
    "team.max_new_tokens": 1,
    "team.temperature": 0,
    "team.rounds": 1,
    "team.max_steps": 1,
    "team.max_tool_calls": 0,
    "team.top_k": 0,
    "env.horizon": 1,
    "env.difficulty": 2,
    "env.grade_seconds": 0.1,
    "env.workers": 1,
    "env.tests": 0,
    "env.test_seconds": 0.1,
    "env.code_seconds": 0.1,
    "env.memory_mb": 64,
    "lora.rank": 1,
    "lora.alpha": 0,
    "critic.lr": 0,
    "critic.warmup_steps": 0,
    "algo.episodes": 1,
    "algo.lr": 0,
    "algo.epochs": 1,
    "algo.minibatches": 1,
    "algo.microbatch_tokens": 1,
    "algo.clip": 0,
    "algo.value_clip": 0,
    "algo.group_size": 1,
    "algo.overlong_buffer": 0,
    "algo.overlong_penalty": 0,
    "algo.max_refills": 0,
    "algo.clip_high": 0,
    "algo.correction_cap": 1,
    "algo.kl_coef": 0,
    "algo.max_grad_norm": 0,
    "algo.max_kl": 0,
    "algo.agent_interval": 0,
    "rollout.slots": 1,
    "rollout.chunk": 1,
    "rollout.step_seconds": 0.001,
    "mesh.processes": 1,
    "mesh.process": 0,
    "mesh.wait_seconds": 1,
    "eval.every": 0,
    "eval.episodes": 1,
    "eval.temperature": 0,
    "guard.skips": 1,
    "guard.patience": 1,
    "guard.max_kl": 0,
    "guard.min_entropy": 0,
    "guard.reward_drop": 0,
    "guard.rollbacks": 0,
}
_BETWEEN = {
    "team.top_p": (0, 1),
    "team.min_p": (0, 1),
    "rollout.max_failed_fraction": (0, 1),
    "rollout.max_turns": (1, 65535),
    "env.holdout": (0, 1),
    "guard.lr_factor": (0, 1),
    "env.max_bad_rows": (0, 1),
    "algo.gamma": (0, 1),
    "algo.gae_lambda": (0, 1),
    "algo.credit_discount": (0, 1),
    "algo.baseline_decay": (0, 1),
}
_TYRO = (tyro.conf.FlagConversionOff,)


def _get(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _known_keys() -> list[str]:
    return [
        f"{section.name}.{field.name}"
        for section in dataclasses.fields(Config)
        for field in dataclasses.fields(section.default)  # type: ignore[arg-type]
    ]


def _suggest(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else "; --help lists them all"


def _split_config_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    files, rest, words = [], [], list(argv)
    while words:
        word = words.pop(0)
        name, _, value = word.partition("=")
        if name != "--config":
            rest.append(word)
        elif value or words:
            files.append(value or words.pop(0))
        else:
            raise BadInput("--config: expected a YAML file, got nothing")
    return files, rest


def _group_flags(words: Sequence[str]) -> dict[str, list[str]]:
    """``--a.b x y --c.d=z`` to ``{"a.b": ["x", "y"], "c.d": ["z"]}``."""
    grouped: dict[str, list[str]] = {}
    values: list[str] | None = None
    for word in words:
        if word.startswith("--"):
            key, _, value = word[2:].partition("=")
            values = grouped[key.replace("-", "_")] = [value] if value else []
        elif values is None:
            raise BadInput(f"expected a flag like --run.steps, got {word!r}; --help lists them")
        else:
            values.append(word)
    return grouped


def _read_yaml(file: str) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"--config {file}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"--config {file}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(loaded or {}, dict):
        raise BadInput(f"--config {file}: expected sections like `run:`, got {loaded!r}")
    return loaded or {}


def _flatten(tree: dict[str, Any], file: str) -> dict[str, list[str]]:
    flat: dict[str, list[str]] = {}
    for section, settings in tree.items():
        if not isinstance(settings, dict):
            raise BadInput(f"{file}: expected settings below {section!r}, got {settings!r}")
        for key, value in settings.items():
            if isinstance(value, dict):
                raise BadInput(f"{file}: expected one value for {section}.{key}, got {value!r}")
            values = value if isinstance(value, list) else [value]
            flat[f"{section}.{key}"] = [str(item) for item in values]
    return flat


def _typed(settings: dict[str, list[str]], prog: str) -> Config:
    """Words to values, by the types of the fields; names the first setting that does not fit."""
    words = {key: _spelled(key, values) for key, values in settings.items()}
    try:
        return _tyro_parse(words, prog)
    except SystemExit:
        for key, values in words.items():
            with contextlib.suppress(SystemExit):
                _tyro_parse({key: values}, prog)
                continue
            got = repr(" ".join(settings[key])) if settings[key] else "nothing"
            raise BadInput(f"--{key}: expected {_expected(key)}, got {got}") from None
        raise


def _tyro_parse(words: dict[str, list[str]], prog: str) -> Config:
    args = [word for key, values in words.items() for word in (f"--{key}", *values)]
    ignored = io.StringIO()
    with contextlib.redirect_stderr(ignored), contextlib.redirect_stdout(ignored):
        return tyro.cli(Config, prog=f"python -m {prog}", args=args, config=_TYRO)


def _spelled(key: str, values: list[str]) -> list[str]:
    """``true``, ``false`` and ``none`` as tyro wants them, where they mean that."""
    kind = _annotation(key)
    means = {"true": "True", "false": "False"} if kind == "bool" else {}
    means |= {"none": "None", "null": "None"} if "None" in kind else {}
    if kind.startswith("tuple") and values in (["none"], ["None"]):
        return []
    return [means.get(value.lower(), value) for value in values]


def _annotation(key: str) -> str:
    section, name = key.split(".")
    types = {field.name: field.type for field in dataclasses.fields(getattr(Config, section))}
    return str(types[name])


def _expected(key: str) -> str:
    """What a setting takes, in words: ``a number or none``."""
    words = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}
    words |= {"None": "none", "tuple[int, ...]": "whole numbers", "tuple[str, ...]": "words"}
    words |= {"tuple[float, ...]": "numbers"}
    kind = _annotation(key)
    if kind.startswith("Literal"):
        return "one of " + kind[len("Literal[") : -1].replace('"', "")
    return " or ".join(words[part] for part in kind.split(" | "))
