"""Settings that all runs share, with defaults that are the quickstart, and their bounds.

Of the sections ``env`` and ``algo`` only the base classes are here: each environment and each
algorithm declares its own settings beside its code (``envs/``, ``learning/settings.py``).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Container
from typing import Annotated, ClassVar, Literal

import yaml
from pydantic import Field
from pydantic_core import to_jsonable_python

from marft_jax.errors import BadInput
from marft_jax.setting import (
    LARGEST,
    Count,
    Fraction,
    Natural,
    NonNegative,
    Positive,
    Section,
    check_local,
    replaced,
    setting,
    unmet_needs,
)

HOTTEST = 1e30  # temperature of sampling: logits divided by it are finite in float32
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")  # matrices that may have an adapter

Temperature = Annotated[float, Field(ge=0, le=HOTTEST)]
Axis = Annotated[int, Field(ge=-1, le=LARGEST)]


@dataclasses.dataclass(frozen=True)
class Run(Section):
    dir: str = "runs/quickstart"
    """Directory of the run; starting again in the same one continues."""
    steps: Count = 25
    """Training steps in all, those of earlier starts included."""
    seed: Natural = 0
    """Seeds the order of tasks, the sampling, the initial adapters and the critic."""
    save_every: Count = 10
    """Steps between checkpoints; the last step is always saved."""
    save_minutes: NonNegative = 15.0
    """A step that ends so long after the last checkpoint is saved too; 0 counts steps only."""
    keep: Count = 3
    """Newest checkpoints that stay, beside the best."""
    best_metric: str | None = "reward/mean"
    """Metric by whose highest value one checkpoint stays too; none keeps no best."""
    transcripts_every: Natural = 5
    """Steps between written transcripts; 0 writes none."""
    loggers: tuple[str, ...] = ("tensorboard",)
    """tensorboard, wandb, trackio, mlflow, package.module:Class; wandb and mlflow work
    offline unless their own settings name a server."""
    state_parts: tuple[str, ...] = ()
    """Parts that package.module:function adds to the training state; they are saved with it."""


@dataclasses.dataclass(frozen=True)
class Model(Section):
    base: str = setting("tiny", path=os.path.exists)
    """`tiny`, a directory (config.json + safetensors + tokenizer), a hub id, or a .gguf file."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the frozen base and its activations; adapters and critic are always float32."""
    quantize: Literal["none", "int8", "int4", "nf4"] = "none"
    """Matrices of the base in 8 or 4 bits: less memory, not more speed; adapters are as ever."""
    context: Annotated[int, Field(ge=8, le=LARGEST)] = 256
    """Longest prompt plus action, in tokens; on another base than tiny 1024 by default."""
    thinking: bool = False
    """Let a model whose chat template has such a mode think before it answers (Qwen3)."""
    layers: Literal["auto", "stacked", "unrolled"] = "auto"
    """Stacked layers compile in a time without depth; auto: on GPUs and TPUs, not on CPUs."""
    remat: Literal["none", "products", "block"] = "products"
    """The update computes again nothing, all but the base's products, or whole blocks."""


@dataclasses.dataclass(frozen=True)
class Team(Section):
    file: str | None = None
    """A team file (see configs/teams/); without one, the built-in planner and solver."""
    workflow: str | None = None
    """Order in which agents act: sequential, dag, orchestrated, debate, solo, players (of a game),
    program or package.module:function; none is what the team file says, or else sequential."""
    context: Literal["own", "shared"] = "own"
    """Each agent's own prompt with the actions it may see, or one growing conversation."""
    anonymous: bool = False
    """No names and no system prompts: agents do not know which one they are."""
    rounds: Count = 2
    """debate: rounds in which everyone speaks."""
    max_steps: Count = 10
    """orchestrated: calls of agents in a step, at most."""
    max_tool_calls: Natural = 4
    """Calls of tools in one turn, where the environment has tools."""
    max_new_tokens: Count = 24
    """Longest action, in tokens; on another base than tiny a quarter of `model.context` by default.
    A profile may say otherwise, here and below."""
    temperature: Temperature = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens with this much of what top_k keeps; 1 is off."""
    top_k: Natural = 0
    """Sample from this many likeliest tokens; 0 is off."""
    min_p: Fraction = 0.0
    """Sample from tokens at least this fraction as likely as the likeliest; 0 is off."""
    stop: tuple[str, ...] = ()
    """Texts that end an action, as its end-of-turn token does; its text ends before them."""


@dataclasses.dataclass(frozen=True)
class EnvSettings(Section):
    """Settings of an environment; each has more of its own."""

    name: str = "arithmetic"
    """arithmetic, math, code, judged, reasoning_gym, open_spiel, pettingzoo, textarena, or your own
    as package.module:Class."""
    curriculum: ClassVar[float | None] = None
    horizon: ClassVar[int] = 1
    data: ClassVar[tuple[str, ...]] = ()
    eval_data: ClassVar[tuple[str, ...]] = ()
    metrics: ClassVar[tuple[str, ...]] = ()


@dataclasses.dataclass(frozen=True)
class Lora(Section):
    mode: Literal["per_agent", "shared"] = "per_agent"
    """An adapter for each agent, or a single one for all."""
    rank: Count = 8
    alpha: Positive = 16.0
    """The correction is scaled by alpha / rank."""
    targets: tuple[str, ...] = TARGETS
    """Matrices with an adapter, any of q, k, v, o, gate, up, down: attention alone learns less,
    even with as many parameters (Schulman et al. 2025, LoRA Without Regret)."""
    init: str | None = setting(None, path=os.path.exists)
    """Adapters to start from: a run directory, an export, hub:owner/name, or MARFT's steps_NNNN."""


@dataclasses.dataclass(frozen=True)
class Critic(Section):
    mode: Literal["shared", "heads", "lora", "none"] = "shared"
    """A value head over the frozen base; a head per agent; a head over an adapter per agent. An
    algorithm without a critic has none, whatever stands here."""
    lr: NonNegative = 5e-4
    hidden: tuple[Count, ...] = (1024, 512)
    """Widths of a value head's hidden layers."""
    warmup_steps: Natural = 0
    """Training steps in which only the critic learns."""


@dataclasses.dataclass(frozen=True)
class Algo(Section):
    """Settings of an algorithm; each has more of its own, among them what is a constant here.

    Attributes:
        recorded: it learns from demonstrations, not from samples of the team.
        has_critic: its advantages read values.
        compares: its advantages are differences to other samples of the same task.
        baseline: ``moving`` or ``role`` where returns are compared with a moving mean, a state.
        ratio: what an action's log-prob is divided by: nothing, its tokens or its words.
        clip, clip_high: bounds of the metric ``clip_fraction``, where nothing else is clipped.
    """

    name: str = "appo"
    """appo (MARFT-A, a decision per action), tppo (MARFT-T, per token), grpo, gspo, cispo,
    reinforce, or your own as package.module:NAME."""
    episodes: Count = 64
    """Episodes per training step."""
    group_size: Count = 1
    """Episodes that share a task: samples that can be compared."""
    lr: NonNegative | Literal["auto"] = "auto"
    """Adam's learning rate for the adapters. auto: 1e-3 for tiny, of a real model by its width."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rates, the critic's too, do after their warm-up: nothing, or fall to 0 at
    `run.steps`."""
    lr_warmup: Natural = 0
    """Training steps over which the learning rates rise to their height."""
    weight_decay: NonNegative = 0.0
    """Share of each adapter that a step takes off, times the learning rate (AdamW)."""
    epochs: Count = 2
    """Passes over each batch."""
    minibatches: Count = 2
    """Optimiser steps per pass."""
    microbatch_tokens: Count = 8192
    """Tokens in one forward-backward pass; gradients accumulate up to a minibatch."""
    reuse: bool = True
    """Turns that stand in one row share what they begin with."""

    credit: Literal["last", "equal", "step_discount", "per_step"] = "last"
    """Share of turns in a reward: all for a step's last one; the same, but each agent is logged
    with all; reward * credit_discount^(N-1-k) for turn k of N; or each by its own step reward."""
    credit_discount: Fraction = setting(1.0, needs="algo.credit step_discount")
    """step_discount: how much less each earlier turn of a step is paid."""
    step_reward: str | None = setting(None, needs="algo.credit per_step or tree")
    """per_step, tree: planner, solver, verifier, code_planner, coder, debugger, judge or
    package.module:function; an agent's own `reward` comes first."""
    reward_bias: float = 0.0
    """A reward becomes (reward + bias) * scale, clipped; one for a single agent has no bias."""
    reward_scale: float = 1.0
    reward_clip: Positive | None = None
    """Shaped rewards are clipped to ± this."""
    overlong_buffer: Natural = 0
    """Tokens before its limit over which an action's length penalty grows from 0; 0 is off."""
    overlong_penalty: NonNegative = setting(1.0, needs="algo.overlong_buffer")
    """Penalty of an action as long as its limit."""

    normalize: str = "none"
    """Advantages to mean 0 and deviation 1 over the batch, each agent's, each group, each agent's
    n-th turn in a group, each agent's in a group (batch, agent, group, group_turn, group_agent), or
    none; or package.module:function."""
    dynamic_sampling: bool = False
    """Drop groups whose samples earned the same, and play further tasks in their place."""
    max_refills: Natural = setting(3, needs="algo.dynamic_sampling")
    """Such rounds of a training step, at most."""

    correction: Literal["auto", "none", "decoupled", "truncated"] = "auto"
    """Ratios to the policy at the start of the update, weighed by its own ratio to the policy that
    sampled: those over the cap count 0, or are cut to it. auto: decoupled with a lag, else none."""
    correction_cap: Annotated[float, Field(ge=1)] = 5.0
    correction_floor: Fraction = 0.0
    """Weights below this count 0, too (IcePop: 0.5)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL to a reference; 0 is off."""
    kl_in: Literal["reward", "loss"] = setting("reward", needs="algo.kl_coef")
    """Subtract it from each token's reward, or add its mean over an action's tokens to the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = setting(None, needs="algo.kl_coef")
    """none: k1 in the reward, k3 in the loss, where k1 has no gradient on average."""
    kl_reference: Literal["base", "start"] = setting("base", needs="algo.kl_coef")
    """Base without adapters, or the adapters that the run began with (`lora.init`): a KL to the
    base pulls a team off its supervised start."""
    kl_moves: Natural = setting(0, needs="algo.kl_reference start")
    """k > 0: every k steps the present adapters become the reference. In self-play this goes to an
    equilibrium, from which one reference keeps its distance (R-NaD, arXiv 2206.15378)."""
    max_kl: NonNegative | None = None
    """An agent whose approximate KL exceeds this in a minibatch is not updated by it."""
    max_grad_norm: NonNegative = 0.5
    """Each adapter's and each value head's gradient is clipped to this norm."""
    agent_interval: Natural = 0
    """k > 0 trains one agent at a time, in turn, k steps each; 0 trains all together."""

    recorded: ClassVar[bool] = False
    branches: ClassVar[int] = 0
    branch_at: ClassVar[str] = "random"
    branch_continue: ClassVar[str] = "end"
    branch_budget: ClassVar[str] = "none"
    has_critic: ClassVar[bool] = False
    compares: ClassVar[bool] = False
    baseline: ClassVar[str | None] = None
    ratio: ClassVar[str] = "sum"
    clip: ClassVar[float] = 0.2
    clip_high: ClassVar[float | None] = None
    value_clip: ClassVar[float] = 0.2
    huber_delta: ClassVar[float | None] = 10.0
    baseline_decay: ClassVar[float] = 0.9
    loss_mean: ClassVar[int | str] = "token"
    mask_truncated: ClassVar[bool] = False
    entropy_target: ClassVar[float | None] = None
    correction_of: ClassVar[str] = "token"

    @property
    def estimator(self) -> str:
        """Estimator of the KL to the reference."""
        return self.kl_estimator or ("k1" if self.kl_in == "reward" else "k3")


@dataclasses.dataclass(frozen=True)
class Rollout(Section):
    slots: Count = 64
    """Rows of the key-value cache: how many agents act at the same time."""
    chunk: Count = 16
    """Decode steps on the device between two looks of the host."""
    reuse: bool = True
    """Prefix cache: what prompts of one adapter begin with is computed once."""
    step_seconds: Annotated[float, Field(ge=0.001)] = 600.0
    """An episode whose environment or workflow takes longer to answer has failed."""
    max_turns: Annotated[int, Field(ge=1, le=65535)] = 128
    """An episode that wants more turns ends there, with what it has earned."""
    lag: Annotated[int, Field(ge=0, le=64)] = 0
    """Step s is sampled with the adapters after s - lag updates, and played while others learn."""
    max_failed_fraction: Fraction = 0.25
    """Failed episodes are dropped and counted; more of them than this stop the run."""
    past_every: Count = 10
    """Steps between versions for agents with `past` in the team file, who play as earlier ones."""
    past_kept: Count = 8
    """So many versions are kept, each of those so far as likely as another."""
    past_choice: Literal["random", "strong"] = "random"
    """Which of them plays a step: any, or rather one that wins."""


@dataclasses.dataclass(frozen=True)
class Mesh(Section):
    data: Axis = -1
    """Devices along the batch; -1 takes all that the other axes leave."""
    fsdp: Axis = 1
    """Devices that share each matrix's rows, and the batch."""
    tensor: Axis = 1
    """Devices that share each matrix's columns."""
    rollout: tuple[Count, ...] = ()
    """So many devices play, and the others learn: their number, or data, fsdp and tensor."""
    coordinator: str | None = None
    """Of several processes: HOST:PORT of the first, or auto (TPU pods, SLURM, MPI, Kubernetes)."""
    processes: Count | None = None
    """Number of processes, with HOST:PORT."""
    process: Natural | None = None
    """Number of this process, from 0, with HOST:PORT."""
    wait_seconds: Annotated[float, Field(ge=1)] = setting(60.0, needs="mesh.coordinator")
    """Processes give up after waiting so long for one that has not come, or has gone."""


@dataclasses.dataclass(frozen=True)
class Eval(Section):
    every: Natural = 0
    """Steps between evaluations on the held-out tasks; 0 never."""
    episodes: Count = setting(128, needs="eval.every")
    """Tasks per evaluation, of each benchmark."""
    temperature: Temperature = setting(0.0, needs="eval.every")
    """Sampling temperature of an evaluation; 0 is greedy."""
    benchmarks: tuple[str, ...] = setting((), needs="eval.every", path=os.path.isfile)
    """Names, as name[:samples][@temperature]; without any, the held-out tasks of `env`."""
    data: str | None = setting(None, needs="eval.benchmarks", path=os.path.exists)
    """Folder with the files of benchmarks; without it they come from the hub."""


@dataclasses.dataclass(frozen=True)
class Guard(Section):
    skips: Count | None = 3
    """So many steps in a row with numbers that are not finite lead to a rollback; none never."""
    patience: Count = 5
    """So many steps in a row outside one of the bounds below lead to a rollback."""
    max_kl: NonNegative | None = 20.0
    """An agent's approximate KL within a step; none is off, here and below."""
    min_entropy: NonNegative | None = 1e-6
    """An agent's entropy per token, once it was above for ``patience`` steps."""
    max_cut: float | None = 0.9
    """Share of an agent's actions cut short or empty, once it was below for ``patience`` steps."""
    reward_drop: NonNegative | None = 1.0
    """Fall of the reward below its best, in standard deviations over the episodes."""
    rollbacks: Natural = 3
    """Rollbacks before a run stops with a report."""
    lr_factor: Fraction = setting(0.1, needs="guard.rollbacks")
    """Each rollback multiplies the learning rates by this."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Fine-tunes a team of language-model agents with reinforcement learning."""

    run: Run = Run()
    """where the run lives, how long it goes on, what it saves"""
    model: Model = Model()
    """the frozen base model"""
    team: Team = Team()
    """who acts when, and how actions are sampled"""
    env: EnvSettings
    """the tasks, and how answers are graded"""
    lora: Lora = Lora()
    """the adapters that are trained"""
    critic: Critic = Critic()
    """what estimates values"""
    algo: Algo
    """how a step learns: credit, advantages, losses"""
    rollout: Rollout = Rollout()
    """episodes side by side, and their limits"""
    mesh: Mesh = Mesh()
    """devices and processes"""
    eval: Eval = Eval()
    """evaluations during training, and of `evaluate`"""
    guard: Guard = Guard()
    """when a run is rolled back"""


def fit_base(config: Config, given: Container[str]) -> Config:
    """Sets the lengths that are not ``given`` (as ``section.name``) to what the base needs: the
    defaults are those of ``tiny``, which writes a few bytes."""
    if config.model.base != "tiny" and "model.context" not in given:
        config = replaced(config, "model.context", 1024)
    if config.model.base != "tiny" and "team.max_new_tokens" not in given:
        config = replaced(config, "team.max_new_tokens", max(1, config.model.context // 4))
    return config


def validate(config: Config) -> None:
    """Checks settings that must fit together, as far as that needs no files.

    Raises:
        BadInput: the first that is off: expected, got, how to fix it.
    """
    check_local("--run.dir", config.run.dir)
    targets, most = config.lora.targets, config.model.context
    if not targets or len(set(targets)) < len(targets) or not set(targets) <= set(TARGETS):
        known = ", ".join(TARGETS)
        raise BadInput(f"--lora.targets: expected distinct ones of {known}, got {targets!s:.80}")
    if (longest := config.team.max_new_tokens) >= most:
        expected = f"expected less than --model.context {most}, got {longest}; raise the context"
        raise BadInput(f"--team.max_new_tokens: {expected}")
    for axis in ("data", "fsdp", "tensor"):
        if not getattr(config.mesh, axis):
            raise BadInput(f"--mesh.{axis}: expected a positive number or -1, got 0")


def find_unread(config: Config, *, evaluates: bool = False) -> dict[str, str]:
    """Finds settings that are given and that this run does not read, with what they need.

    A command that ``evaluates`` needs no ``eval.every``, and learns nothing.
    """
    config = replaced(config, "eval.every", 1) if evaluates else config
    return unmet_needs(config, _between_sections(config, evaluates))


def _between_sections(config: Config, evaluates: bool) -> dict[str, str]:
    """Settings that no run with these other sections reads, with what they need."""
    algo, critic, mesh = config.algo, config.critic, config.mesh
    needs = dict[str, str]()
    if config.model.base == "tiny":
        needs["model.thinking"] = "another --model.base than tiny"
    if config.env.eval_data:
        needs["env.holdout"] = "no --env.eval_data"
    if not algo.has_critic:  # none is true
        names = [f.name for f in dataclasses.fields(critic) if getattr(critic, f.name) != "none"]
        needs |= {f"critic.{name}": "an --algo.name with a critic" for name in names}
    if algo.correction == "none" or algo.correction == "auto" and not config.rollout.lag:
        for name in ("cap", "floor", "of"):
            needs[f"algo.correction_{name}"] = "--algo.correction decoupled or truncated"
    if mesh.coordinator in (None, "auto"):
        needs |= dict.fromkeys(("mesh.processes", "mesh.process"), "--mesh.coordinator HOST:PORT")
    needs |= {"mesh.rollout": "training"} if evaluates else {}
    return needs


def dump(config: Config) -> str:
    """Writes the config as YAML that ``--config`` loads to an equal ``Config``."""
    plain = to_jsonable_python(config)
    if not config.algo.has_critic:
        del plain["critic"]
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
