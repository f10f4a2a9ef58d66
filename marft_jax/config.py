"""Every setting, with defaults that are the quickstart, its bounds and what reads it beside it."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Iterator
from typing import Any, Literal

import yaml

from marft_jax.errors import BadInput
from marft_jax.setting import LEARNS, OWN, fault, graded, left_open, off, on, only, setting, unless

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")  # matrices that may have an adapter
WITH_CRITIC = ("appo", "tppo")  # built-in algorithms that have one
_ROWS = ("math", "code")
_BUILT_IN = ("arithmetic", *_ROWS, "reasoning_gym")
_FROM_FILES = only("env.name", *_ROWS)
_HELD_OUT = (only("env.name", *_BUILT_IN), off("env.eval_data"))
_VALUES = only("algo.name", *WITH_CRITIC, OWN)
_CRITIC = _VALUES._replace(key="critic.mode", fits=lambda mode: mode != "none")


@dataclasses.dataclass(frozen=True)
class Run:
    dir: str = "runs/quickstart"
    """Where the run lives; starting again in the same directory continues."""
    steps: int = 50
    """Training steps in all, those of earlier starts included."""
    seed: int = 0
    """Seeds the order of tasks, the sampling, the initial adapters and the critic."""
    save_every: int = setting(10, least=1)
    """Steps between checkpoints; the last step is always saved."""
    save_minutes: float = setting(15.0, least=0)
    """A step that ends so long after the last checkpoint is saved too; 0 counts steps only."""
    keep: int = setting(3, least=1)
    """Newest checkpoints that stay, beside the best."""
    best_metric: str | None = "reward/mean"
    """The checkpoint with the highest value of this metric stays too; none keeps no best."""
    transcripts_every: int = 5
    """Steps between written transcripts; 0 writes none."""
    loggers: tuple[str, ...] = ("tensorboard",)
    """tensorboard, wandb, trackio, mlflow, package.module:Class; offline unless they are told."""


@dataclasses.dataclass(frozen=True)
class Model:
    base: str = "tiny"
    """`tiny`, a directory (config.json + safetensors + tokenizer), a hub id, or a .gguf file."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the frozen base and its activations; adapters and critic are always float32."""
    quantize: Literal["none", "int8", "int4", "nf4"] = "none"
    """The base's matrices in 8 or 4 bits: less memory, not more speed; adapters are as ever."""
    context: int = setting(256, least=8)
    """The longest prompt plus action, in tokens."""
    thinking: bool = setting(False, read=unless("model.base", "tiny"))
    """Let a model whose chat template has such a mode think before it answers (Qwen3)."""
    layers: Literal["auto", "stacked", "unrolled"] = "auto"
    """Stacked layers compile in a time without depth; auto: on GPUs and TPUs, not on CPUs."""
    remat: Literal["none", "products", "block"] = "products"
    """The update computes again nothing, all but the base's products, or whole blocks."""


@dataclasses.dataclass(frozen=True)
class Team:
    file: str | None = None
    """A team file (see configs/teams/); without one, the built-in planner and solver."""
    workflow: str | None = None
    """Who acts when: sequential, dag, orchestrated, debate, solo, muted (sequential, but nobody is
    heard), or package.module:function; none is what the team file says, or else sequential."""
    context: Literal["own", "shared"] = "own"
    """Each agent's own prompt with the actions it may see, or one growing conversation."""
    anonymous: bool = False
    """No names and no system prompts: agents do not know which one they are."""
    rounds: int = setting(2, least=1, read=only("team.workflow", "debate", OWN))
    """debate: rounds in which everyone speaks."""
    max_steps: int = setting(10, least=1, read=only("team.workflow", "orchestrated", OWN))
    """orchestrated: calls of agents in a step, at most."""
    max_tool_calls: int = setting(4, read=only("env.name", OWN))
    """Calls of tools in one turn, where the environment has tools."""
    max_new_tokens: int = setting(24, least=1, read=left_open("max_new_tokens"))
    """The longest action, in tokens; a profile may say otherwise, here and below."""
    temperature: float = setting(1.0, least=0, read=left_open("temperature"))
    """Sampling temperature; 0 is greedy."""
    top_p: float = setting(1.0, above=0, most=1, read=left_open("top_p"))
    """Sample from the smallest set of tokens with this much of what top_k keeps; 1 is off."""
    top_k: int = setting(0, read=left_open("top_k"))
    """Sample from this many likeliest tokens; 0 is off."""
    min_p: float = setting(0.0, least=0, most=1, read=left_open("min_p"))
    """Sample from tokens at least this fraction as likely as the likeliest; 0 is off."""


@dataclasses.dataclass(frozen=True)
class Env:
    name: str = "arithmetic"
    """arithmetic, math, code, reasoning_gym, or your own as package.module:Class."""
    data: tuple[str, ...] = setting((), read=_FROM_FILES)
    """Tasks to train on: .json, .jsonl, .parquet files, or hub ids owner/name[/subset][:split]."""
    weights: tuple[float, ...] = setting((), above=0, read=(_FROM_FILES, on("env.data")))
    """A share of the training tasks for each of `data`; without them every task is as likely."""
    eval_data: tuple[str, ...] = setting((), read=_FROM_FILES)
    """Tasks to evaluate on; without them, `holdout` of `data` is set aside."""
    holdout: float = setting(0.1, least=0, most=1, read=_HELD_OUT)
    """Fraction of the tasks, chosen by a hash of their text, that training never sees."""
    filters: tuple[str, ...] = setting((), read=_FROM_FILES)
    """Rows to keep, by their fields: `level=Level 4|Level 5`, `source!=x`, `grade<=3`."""
    max_bad_rows: float = setting(0.001, least=0, most=1, read=graded(*_ROWS))
    """Fraction of the rows that may lack a question or an answer; they are left out, reported."""
    question_field: str | None = setting(None, read=graded("math"))
    """Maths: the field of the question, where its name is not one of the usual ones."""
    answer_field: str | None = setting(None, read=graded("math"))
    """Maths: the field of the answer, where its name is not one of the usual ones."""
    horizon: int = setting(1, least=1, read=graded(*_BUILT_IN))
    """Steps per episode: how often the team may try, with feedback in between."""
    difficulty: int = setting(3, least=2, read=only("env.name", "arithmetic"))
    """Arithmetic: how many numbers each problem adds up."""
    curriculum: float | None = setting(None, read=only("env.name", "arithmetic", OWN))
    """Begin with the easiest tasks, and go one level up when the mean reward reaches this."""
    extract: Literal["auto", "boxed", "hashes", "letter", "number", "phrase"] = setting(
        "auto", read=graded("math")
    )
    """Maths: the one way of giving an answer that counts; auto takes the first that is there."""
    grade_seconds: float = setting(10.0, least=0.1, read=graded("math", "reasoning_gym"))
    """Maths: after so long an answer that cannot be graded counts as wrong."""
    workers: int = setting(2, least=1, read=graded(*_ROWS, "reasoning_gym"))
    """Maths and code: how many answers are graded at the same time."""
    reward: Literal["fraction", "all"] = setting("fraction", read=graded("code"))
    """Code: the fraction of tests passed, or 1 for all of them and else 0."""
    tests: int = setting(10, read=graded("code"))
    """Code: how many of a task's tests are run, the first ones; 0 runs all."""
    test_seconds: float = setting(5.0, least=0.1, read=graded("code"))
    """Code: wall time of one test."""
    code_seconds: float = setting(60.0, least=0.1, read=graded("code"))
    """Code: wall time of all tests of a program."""
    memory_mb: int = setting(1024, least=64, read=graded("code"))
    """Code: address space of a program."""
    sandbox: Literal["bubblewrap", "none"] = setting("bubblewrap", read=graded("code"))
    """Code: `none` runs what the model writes as you, with your files and network in its reach."""
    task: str = setting("", read=only("env.name", "reasoning_gym"))
    """reasoning_gym: the name of the task, such as countdown."""
    options: tuple[str, ...] = setting((), read=only("env.name", "reasoning_gym", OWN))
    """reasoning_gym, your own: the task's or your class's own settings, as `name=value`."""


@dataclasses.dataclass(frozen=True)
class Lora:
    mode: Literal["per_agent", "shared"] = "per_agent"
    """An adapter for each agent, or a single one for all."""
    rank: int = setting(8, least=1)
    alpha: float = setting(16.0, above=0)
    """The correction is scaled by alpha / rank."""
    targets: tuple[str, ...] = TARGETS
    """Matrices with an adapter, any of q, k, v, o, gate, up, down: attention alone learns less,
    even with as many parameters (Schulman et al. 2025, LoRA Without Regret)."""
    init: str | None = None
    """Adapters to start from: a run directory, an export, or steps_NNNN of MARFT."""


@dataclasses.dataclass(frozen=True)
class Critic:
    mode: Literal["auto", "shared", "heads", "lora", "none"] = "auto"
    """A value head over the frozen base; a head per agent; a head over an adapter per agent; or
    none. auto: shared, and none for algorithms without a critic."""
    lr: float = setting(5e-4, least=0, read=_CRITIC)
    hidden: tuple[int, ...] = setting((1024, 512), least=1, read=_CRITIC)
    """Widths of a value head's hidden layers."""
    warmup_steps: int = setting(0, read=_CRITIC)
    """Training steps in which only the critic learns."""


@dataclasses.dataclass(frozen=True)
class Algo:
    name: str = "appo"
    """appo (MARFT-A, a decision per action), tppo (MARFT-T, per token), grpo, gspo, reinforce, or
    your own as package.module:NAME."""
    episodes: int = setting(64, least=1)
    """Episodes per training step."""
    group_size: int | None = setting(None, least=1)
    """Episodes that share a task; none: 8 where the algorithm compares them, else 1."""
    lr: float | Literal["auto"] = setting("auto", least=0)
    """Adam's learning rate for the adapters. auto: 1e-3 for tiny, of a real model by its width."""
    epochs: int = setting(2, least=1)
    """Passes over each batch."""
    minibatches: int = setting(2, least=1)
    """Optimiser steps per pass."""
    microbatch_tokens: int = setting(8192, least=1)
    """Tokens in one forward-backward pass; gradients accumulate up to a minibatch."""
    reuse: bool = True
    """Turns that stand in one row share what they begin with (not on TPUs)."""

    credit: Literal["last", "equal", "step_discount", "per_step"] = "last"
    """Who is paid: a step's last turn; the same, but each agent is logged with all of it; turn k of
    N with reward * credit_discount^(N-1-k); or each turn by its own step reward."""
    credit_discount: float = setting(
        1.0, least=0, most=1, read=only("algo.credit", "step_discount")
    )
    """step_discount: how much less each earlier turn of a step is paid."""
    step_reward: str | None = setting(
        None, read=(only("algo.credit", "per_step"), left_open("reward"))
    )
    """per_step: planner, solver, verifier, code_planner, coder, debugger or
    package.module:function; an agent's own `reward` comes first."""
    reward_bias: float = 0.0
    """A reward becomes (reward + bias) * scale, clipped; one for a single agent has no bias."""
    reward_scale: float = 1.0
    reward_clip: float | None = setting(None, above=0)
    """Shaped rewards are clipped to ± this."""
    overlong_buffer: int = 0
    """Tokens before its limit over which an action's length penalty grows from 0; 0 is off."""
    overlong_penalty: float = setting(1.0, least=0, read=on("algo.overlong_buffer", "above 0"))
    """The penalty of an action as long as its limit."""

    gamma: float | Literal["auto"] = setting("auto", least=0, most=1, read=_VALUES)
    """appo, tppo: discount from one decision to the next. auto: 0.99; tppo, by tokens: 1."""
    gae_lambda: float | Literal["auto"] = setting("auto", least=0, most=1, read=_VALUES)
    """appo, tppo: decay of what later decisions tell of an earlier one. auto: 0.95; tppo: 1."""
    normalize: str = "auto"
    """Advantages to mean 0 and deviation 1 over the batch, each agent's, each group, each agent's
    n-th turn in a group (batch, agent, group, group_turn), or none; or package.module:function.
    auto: batch; grpo and gspo: group; reinforce: none."""
    baseline: Literal["auto", "group", "moving"] = setting(
        "auto", read=only("algo.name", "reinforce", OWN)
    )
    """reinforce: returns minus the mean of the same turns in the group, or a moving average."""
    baseline_decay: float = setting(0.9, least=0, most=1, read=only("algo.baseline", "moving"))
    """Share of the moving average that stays in each step."""
    dynamic_sampling: bool = False
    """Drop groups whose samples earned the same, and play further tasks in their place."""
    max_refills: int = setting(3, read=on("algo.dynamic_sampling", "true"))
    """Such rounds of a training step, at most."""

    ratio: Literal["auto", "sum", "token", "word"] = "auto"
    """An action's log-prob is the sum over its tokens, or that per token or per word. auto: sum;
    gspo: token. tppo and grpo have a ratio per token."""
    clip: float = setting(0.2, least=0, read=unless("algo.name", "reinforce"))
    """The ratio is clipped to 1 - this, and above to ..."""
    clip_high: float | None = setting(None, least=0, read=unless("algo.name", "reinforce"))
    """... 1 + this; none: the same."""
    dual_clip: float | None = setting(None, above=1, read=unless("algo.name", "reinforce"))
    """Where the advantage is negative the loss stops at this times it (> 1)."""
    correction: Literal["auto", "none", "decoupled", "truncated"] = "auto"
    """Ratios to the policy at the start of the update, weighed by its own ratio to the policy that
    sampled: those over the cap count 0, or are cut to it. auto: decoupled with a lag, else none."""
    correction_cap: float = setting(5.0, least=1, read=unless("algo.correction", "none"))
    entropy_coef: float | Literal["auto"] = "auto"
    """Weight of the entropy bonus. auto: 0.01, and 0 for grpo, gspo and reinforce."""
    kl_coef: float = setting(0.0, least=0)
    """Weight of the KL to the base without adapters; 0 is off."""
    kl_in: Literal["reward", "loss"] = setting("reward", read=on("algo.kl_coef", "above 0"))
    """Subtract it from each token's reward, or add its mean over an action's tokens to the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = setting("k1", read=on("algo.kl_coef", "above 0"))
    """k1 has no gradient on average: in the loss take k2 or k3."""
    max_kl: float | None = setting(None, least=0)
    """An agent whose approximate KL exceeds this in a minibatch is not updated by it."""
    max_grad_norm: float = setting(0.5, least=0)
    """Each adapter's and each value head's gradient is clipped to this norm."""
    value_clip: float = setting(0.2, least=0, read=_CRITIC)
    """The new value is clipped to the old one ± this."""
    huber_delta: float | None = setting(10.0, above=0, read=_CRITIC)
    """Beyond this the value error counts linearly; none squares it everywhere."""
    agent_interval: int = 0
    """k > 0 trains one agent at a time, in turn, k steps each; 0 trains all together."""


@dataclasses.dataclass(frozen=True)
class Rollout:
    slots: int = setting(64, least=1)
    """Rows of the key-value cache: how many agents act at the same time."""
    chunk: int = setting(16, least=1)
    """Decode steps on the device between two looks of the host."""
    reuse: bool = True
    """Prefix cache: what prompts of one adapter begin with is computed once."""
    step_seconds: float = setting(600.0, least=0.001)
    """An episode whose environment or workflow takes longer to answer has failed."""
    max_turns: int = setting(128, least=1, most=65535)
    """An episode that wants more turns ends there, with what it has earned."""
    lag: int = setting(0, most=64)
    """Step s is sampled with the adapters after s - lag updates, and played while others learn."""
    max_failed_fraction: float = setting(0.25, least=0, most=1)
    """Failed episodes are dropped and counted; more of them than this stop the run."""


@dataclasses.dataclass(frozen=True)
class Mesh:
    data: int = setting(-1, least=-1)
    """Devices along the batch; -1 takes all that the other axes leave."""
    fsdp: int = setting(1, least=-1)
    """Devices that share each matrix's rows, and the batch."""
    tensor: int = setting(1, least=-1)
    """Devices that share each matrix's columns."""
    rollout: tuple[int, ...] = setting((), least=1, read=LEARNS)
    """So many devices play, and the others learn: their number, or data, fsdp and tensor."""
    coordinator: str | None = None
    """Of several processes: HOST:PORT of the first, or auto (TPU pods, SLURM, MPI, Kubernetes)."""
    processes: int | None = setting(None, least=1, read=unless("mesh.coordinator", None, "auto"))
    """Their number, with HOST:PORT."""
    process: int | None = setting(None, read=unless("mesh.coordinator", None, "auto"))
    """The number of this one, from 0, with HOST:PORT."""
    wait_seconds: float = setting(60.0, least=1, read=on("mesh.coordinator"))
    """Processes give up after waiting so long for one that has not come, or has gone."""


@dataclasses.dataclass(frozen=True)
class Eval:
    every: int = 0
    """Steps between evaluations on the held-out tasks; 0 never."""
    episodes: int = setting(128, least=1, read=on("eval.every", "above 0"))
    """Tasks per evaluation, of each benchmark."""
    temperature: float = setting(0.0, least=0, read=on("eval.every", "above 0"))
    """Sampling temperature of an evaluation; 0 is greedy."""
    benchmarks: tuple[str, ...] = setting((), read=on("eval.every", "above 0"))
    """Names, as name[:samples][@temperature]; without any, the held-out tasks of `env`."""
    data: str | None = setting(None, read=on("eval.benchmarks"))
    """Folder with the files of benchmarks; without it they come from the hub."""


@dataclasses.dataclass(frozen=True)
class Guard:
    skips: int | None = setting(3, least=1)
    """So many steps in a row with numbers that are not finite lead to a rollback; none never."""
    patience: int = setting(5, least=1)
    """So many steps in a row outside one of the bounds below lead to a rollback."""
    max_kl: float | None = setting(20.0, least=0)
    """An agent's approximate KL within a step; none is off, here and below."""
    min_entropy: float | None = setting(1e-6, least=0)
    """An agent's entropy per token, once it was above for ``patience`` steps."""
    max_cut: float | None = 0.9
    """Share of an agent's actions cut short or empty, once it was below for ``patience`` steps."""
    reward_drop: float | None = setting(1.0, least=0)
    """Fall of the reward below its best, in standard deviations over the episodes."""
    rollbacks: int = 3
    """Rollbacks before a run stops with a report."""
    lr_factor: float = setting(0.1, least=0, most=1, read=on("guard.rollbacks", "above 0"))
    """Each rollback multiplies the learning rates by this."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Fine-tunes a team of language-model agents with reinforcement learning."""

    run: Run = setting(Run(), about="where the run lives, how long it goes on, what it saves")
    model: Model = setting(Model(), about="the frozen base model")
    team: Team = setting(Team(), about="who acts when, and how actions are sampled")
    env: Env = setting(Env(), about="the tasks, and how answers are graded")
    lora: Lora = setting(Lora(), about="the adapters that are trained")
    critic: Critic = setting(Critic(), about="what estimates values")
    algo: Algo = setting(Algo(), about="how a step learns: credit, advantages, losses")
    rollout: Rollout = setting(Rollout(), about="episodes side by side, and their limits")
    mesh: Mesh = setting(Mesh(), about="devices and processes")
    eval: Eval = setting(Eval(), about="evaluations during training, and of `evaluate`")
    guard: Guard = setting(Guard(), about="when a run is rolled back")


def settings() -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Every setting: ``section.name`` and its field."""
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(section.default):  # type: ignore[arg-type]
            yield f"{section.name}.{field.name}", field


def get(config: Config, key: str) -> Any:
    """The value of ``section.name``."""
    return operator.attrgetter(key)(config)


def replaced(config: Config, key: str, value: Any) -> Config:
    """The config with another value of ``section.name``."""
    section, name = key.split(".")
    changed = dataclasses.replace(getattr(config, section), **{name: value})
    return dataclasses.replace(config, **{section: changed})


def validate(config: Config) -> None:
    """Checks what needs no files, ranges and settings that must fit together; raises ``BadInput``
    (expected, got, how to fix it) for the first that is off."""
    for key, field in settings():
        if wrong := fault(field, get(config, key)):
            raise BadInput(f"--{key}: {wrong}")
    targets = config.lora.targets
    if not targets or len(set(targets)) < len(targets) or not set(targets) <= set(TARGETS):
        known = ", ".join(TARGETS)
        raise BadInput(f"--lora.targets: expected distinct ones of {known}, got {targets!s:.80}")
    if config.team.max_new_tokens >= config.model.context:
        raise BadInput(
            f"--team.max_new_tokens: expected less than --model.context {config.model.context}, "
            f"got {config.team.max_new_tokens}; raise the context"
        )
    for axis in ("data", "fsdp", "tensor"):
        if not getattr(config.mesh, axis):
            raise BadInput(f"--mesh.{axis}: expected a positive number or -1, got 0")


def dump(config: Config) -> str:
    """The resolved config as YAML that ``--config`` loads to an equal ``Config``."""
    plain = json.loads(json.dumps(dataclasses.asdict(config)))  # tuples become lists
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
