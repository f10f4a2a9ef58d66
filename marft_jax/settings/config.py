"""Settings that all runs share, with defaults that are the quickstart, and their bounds.

Of the sections ``env`` and ``algo`` only what others read is here: each environment and each
algorithm declares its own settings beside its code (``envs/``, ``learning/settings.py``). So may a
sampler of the user.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Container
from typing import Annotated, ClassVar, Literal, TypeVar

import yaml
from pydantic import AfterValidator, Field
from pydantic_core import to_jsonable_python

from marft_jax.errors import BadInput
from marft_jax.settings.setting import (
    LARGEST,
    NUMBER,
    Count,
    Derived,
    Fraction,
    Natural,
    NonNegative,
    PathText,
    Positive,
    Section,
    check_local,
    get,
    replaced,
    setting,
    settings,
)


def _finite_logits(temperature: float) -> float:
    """Checks that logits divided by a temperature are finite in float32."""
    if 0 < temperature < 1e-30:
        raise ValueError("0, or a number from 1e-30 to 1e30")
    return temperature


Temperature = Annotated[float, Field(ge=0, le=1e30), AfterValidator(_finite_logits), NUMBER]
Share = Annotated[float, Field(gt=0, le=1), NUMBER]
Stops = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=1000)], ...], Field(max_length=16)
]
Axis = Annotated[int, Field(ge=-1, le=LARGEST)]
_S = TypeVar("_S")
_WITH_CRITIC = "algo.has_critic"
SAMPLED = "algo.name not imitation"
CORRECTED = (
    "rollout.lag or rollout.sampler not engine or algo.correction decoupled or truncated and "
    "algo.correction not none"
)


@dataclasses.dataclass(frozen=True)
class Run(Section):
    decides: ClassVar[str] = "nothing"

    dir: PathText = setting("runs/quickstart", decides="start")
    """Directory of the run. Starting again in the same directory continues the run."""
    steps: Count = 25
    """Training steps in total, including those of earlier starts."""
    seed: Natural = setting(0, decides="arrays answers")
    """Seed of the order of tasks, of sampling, and of new adapters and value heads."""
    save_every: Count = 10
    """Steps between checkpoints. The last step is always saved."""
    save_minutes: NonNegative = 15.0
    """Also saves a step that ends this many minutes after the last checkpoint; 0: never."""
    keep: Count = 3
    """Number of newest checkpoints that are kept, besides the best one."""
    best_metric: str | None = "reward/mean"
    """Metric whose highest value marks the best checkpoint, which is kept; none: keeps no best
    one."""
    transcripts_every: Natural = 5
    """Steps between written transcripts; 0: writes none."""
    loggers: tuple[str, ...] = ("tensorboard",)
    """Loggers of metrics: tensorboard, wandb, trackio, mlflow, or your own as package.module:Class.
    wandb and mlflow log offline unless their own settings name a server."""
    state_parts: tuple[str, ...] = setting((), decides="answers")
    """Parts that package.module:function adds to the training state; they are saved with it."""


@dataclasses.dataclass(frozen=True)
class Model(Section):
    decides: ClassVar[str] = "answers"

    base: PathText = setting("tiny", path=os.path.exists)
    """Base model: `tiny` (built in), a directory with config.json, safetensors and tokenizer, a hub
    id, or a .gguf file."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the frozen base and its activations. Adapters and critic are always float32."""
    quantize: Literal["none", "int8", "int4", "nf4"] = setting("none", decides="run answers")
    """Quantises the matrices of the base to 8 or 4 bits, which saves memory but no time. Adapters
    stay in float32."""
    context: Annotated[int, Field(ge=8, le=LARGEST)] = 256
    """Longest prompt plus action, in tokens; default for any other base than tiny: 1024, or
    what the base was trained for, if that is less."""
    thinking: bool | Literal["minimal", "low", "medium", "high", "xhigh", "max"] = setting(
        False, needs="model.base not tiny"
    )
    """Lets a model think before it answers, if its chat template has such a mode (Qwen3): true,
    false, or a level of effort that the template knows (gpt-oss: low, medium, high)."""
    calls: str = "auto"
    """Form in which the model calls tools. auto: that of its chat template; else a name of the
    table in tools/README.md, or your own as package.module:FORM."""
    layers: Literal["auto", "stacked", "unrolled"] = "auto"
    """Layout of the layers. stacked: one array per kind of matrix, so that compilation takes no
    longer with more layers. unrolled: one array per layer. auto: stacked on TPUs, unrolled on
    CPUs and GPUs."""
    remat: Literal["none", "products", "block"] = setting("products", decides="nothing")
    """What the backward pass recomputes. none: nothing. products: all but the matrix products of
    the base. block: whole blocks."""


@dataclasses.dataclass(frozen=True)
class Team(Section):
    decides: ClassVar[str] = "answers"

    file: PathText | None = setting(None, decides="start")
    """Team file (examples: configs/teams/); none: the built-in planner and solver."""
    workflow: str | None = None
    """Order in which agents act: sequential, dag, orchestrated, debate, solo, players (a game),
    program, or your own as package.module:function; none: as the team file says, or else
    sequential."""
    context: Literal["own", "shared"] = "own"
    """What an agent is shown. own: its own prompt with the actions that it may see. shared: one
    growing conversation of the team."""
    anonymous: bool = False
    """Hides names and system prompts, so that agents do not know which one they are."""
    rounds: Count = setting(2, needs="team.workflow debate or your own")
    """Rounds of a debate. Every agent speaks once in each round."""
    max_steps: Count = setting(10, needs="team.workflow orchestrated or your own")
    """Most calls that an orchestrator may make in one step."""
    max_tool_calls: Natural = setting(4, needs="agents.tools or env.name your own")
    """Most tool calls of an agent in one turn."""
    format_rest: Literal["checked", "refused"] = setting("checked", needs="agents.format")
    """Keywords of a schema that no grammar holds: uniqueItems, patterns with look-ahead,
    look-behind or \\b. checked: the environment is given an empty text in place of one that breaks
    them. refused: such a schema is refused, with the path of the keyword."""
    max_new_tokens: Count = setting(24, needs="agents.max_new_tokens none")
    """Longest action, in tokens; default for any other base than tiny: a quarter of model.context.
    An agent's profile may override this setting and those below."""
    temperature: Temperature = setting(1.0, needs="agents.temperature none")
    """Sampling temperature; 0: greedy."""
    top_p: Share = setting(1.0, needs="agents.top_p none")
    """Samples from the fewest tokens whose probabilities add up to this, after top_k; 1: off."""
    top_k: Natural = setting(0, needs="agents.top_k none")
    """Samples from this many most likely tokens; 0: off."""
    min_p: Fraction = setting(0.0, needs="agents.min_p none")
    """Samples from tokens at least this fraction as likely as the likeliest one; 0: off."""
    stop: Stops = setting((), needs="agents.stop none")
    """Texts that end an action, as the end-of-turn token does. They are not part of the action's
    text."""


@dataclasses.dataclass(frozen=True)
class EnvSettings(Section):
    """Settings of an environment; each has more of its own."""

    decides: ClassVar[str] = "answers"

    name: str = setting("arithmetic", decides="run answers")
    """Environment: arithmetic, math, code, judged, reasoning_gym, open_spiel, pettingzoo,
    verifiers, or your own as package.module:Class."""
    curriculum: ClassVar[float | None] = None
    horizon: ClassVar[int] = 1
    data: ClassVar[tuple[str, ...]] = ()
    eval_data: ClassVar[tuple[str, ...]] = ()
    metrics: ClassVar[tuple[str, ...]] = ()


@dataclasses.dataclass(frozen=True)
class Lora(Section):
    decides: ClassVar[str] = "arrays answers"

    mode: Literal["per_agent", "shared"] = "per_agent"
    """per_agent: one adapter for each agent. shared: one adapter for all agents."""
    rank: Count = 8
    """Rank of the adapters."""
    alpha: Positive = 16.0
    """Scale of the adapters: their product is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("all-linear",)
    """Matrices with an adapter, such as q v. all-linear: all but those of routed experts, as in
    peft. Adapters on attention alone (q, k, v, o) learn less, even with as many parameters
    (Schulman et al. 2025, LoRA Without Regret). ``experts`` adapts the routed experts of a mixture,
    with a pair of matrices for each expert, ``unembed`` the matrix to logits."""
    init: PathText | None = setting(None, path=os.path.exists, decides="nothing")
    """Adapters to start from: a run directory, an export, hub:owner/name, or a steps_NNNN folder of
    MARFT; none: new adapters."""


@dataclasses.dataclass(frozen=True)
class Critic(Section):
    decides: ClassVar[str] = "nothing"

    mode: Literal["shared", "heads", "lora", "none"] = setting(
        "shared", needs=_WITH_CRITIC, decides="arrays"
    )
    """What estimates values. shared: one head on the frozen base. heads: one head per agent. lora:
    a head on the base with an adapter per agent. none: nothing, for algorithms without a critic."""
    lr: NonNegative = setting(5e-4, needs=_WITH_CRITIC)
    """Adam's learning rate of the critic."""
    hidden: tuple[Count, ...] = setting((1024, 512), needs=_WITH_CRITIC, decides="arrays")
    """Widths of the hidden layers of a value head."""
    warmup_steps: Natural = setting(0, needs=_WITH_CRITIC)
    """First training steps, in which only the critic learns."""


@dataclasses.dataclass(frozen=True)
class Update(Section):
    """Settings that every algorithm has.

    Attributes:
        recorded: it learns from demonstrations, not from samples of the team.
        has_critic: its advantages read values.
        compares: its advantages are differences to other samples of the same task.
        ratio: what the log-prob of an action is divided by, as of ``appo``.
    """

    decides: ClassVar[str] = "nothing"

    name: str = setting("appo", decides="run")
    """Algorithm: appo (MARFT-A, one decision per action), tppo (MARFT-T, one decision per token),
    grpo, gspo, cispo, reinforce, distill, or your own as package.module:NAME."""
    episodes: Count = 64
    """Episodes per training step."""
    lr: NonNegative | Literal["auto"] = "auto"
    """Adam's learning rate of the adapters; auto: 1e-3 for tiny, else by the width of the model."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rates of adapters and critic after the warmup. linear, cosine: they
    fall to 0 at run.steps."""
    lr_warmup: Natural = 0
    """Training steps over which the learning rates rise from 0."""
    weight_decay: NonNegative = 0.0
    """Weight decay of the adapters (AdamW): a step shrinks each weight by this times the learning
    rate."""
    epochs: Count = 2
    """Passes over each batch."""
    minibatches: Count = 2
    """Optimiser steps per pass."""
    microbatch_tokens: Count = 8192
    """Tokens in one forward and backward pass. Gradients are accumulated over a minibatch."""
    reuse: bool = True
    """Computes a prefix only once where turns in one row share it; up to a multiple of 64 tokens
    where the base has layers with a recurrent state."""
    max_grad_norm: NonNegative = 0.5
    """Clips the gradient of each adapter and of each value head to this norm."""
    agent_interval: Natural = 0
    """Trains one agent at a time, each for this many steps in turn; 0: all agents together."""

    recorded: ClassVar[bool] = False
    has_critic: ClassVar[bool] = False
    compares: ClassVar[bool] = False
    ratio = "sum"

    def part(self, kind: type[_S]) -> _S:
        """These settings as those of a kind; where the algorithm lacks these, the kind's defaults,
        which change nothing."""
        return self if isinstance(self, kind) else kind()


@dataclasses.dataclass(frozen=True)
class Algo(Update):
    """Settings of an algorithm that learns from samples of the team; each has more of its own."""

    group_size: Count = 1
    """Episodes per task. They are the samples that can be compared."""
    credit: Literal["last", "equal", "step_discount", "per_step"] = "last"
    """Which turn receives the reward. last: the last turn of a step. equal: the same, but every
    agent is logged with the whole reward. step_discount: turn k of N receives reward *
    credit_discount^(N-1-k). per_step: each turn receives its own step reward."""
    credit_discount: Fraction = setting(1.0, needs="algo.credit step_discount")
    """Discount of the reward for each turn further from the end of the step."""
    step_reward: str | None = setting(
        None, needs="algo.credit per_step or tree and agents.reward none"
    )
    """Step reward: planner, solver, verifier, code_planner, coder, debugger, judge, or your own as
    package.module:function. An agent's `reward` in the team file overrides it."""
    reward_bias: float = 0.0
    """Number that is added to each reward, before reward_scale. The rewards of single agents get no
    bias."""
    reward_scale: float = 1.0
    """Factor of each reward, before reward_clip."""
    reward_clip: Positive | None = None
    """Clips each shaped reward to ± this number; none: off."""
    overlong_buffer: Natural = 0
    """Last tokens before an action's limit, over which its length penalty grows from 0; 0: no
    penalty."""
    overlong_penalty: NonNegative = setting(1.0, needs="algo.overlong_buffer")
    """Length penalty of an action that reaches its limit."""

    normalize: str = "none"
    """Where advantages are normalised to mean 0 and deviation 1: in the batch, for each agent
    (agent), in each group (group), for each agent's n-th turn in a group (group_turn), for each
    agent in a group (group_agent), nowhere (none), or by your own package.module:function."""
    dynamic_sampling: bool = False
    """Drops groups whose samples have the same task reward, whatever penalties, costs and step
    rewards add, and plays further tasks instead."""
    max_refills: Natural = setting(3, needs="algo.dynamic_sampling")
    """Most rounds of further tasks in a training step."""

    correction: Literal["auto", "none", "decoupled", "truncated"] = "auto"
    """Correction of stale samples. The loss takes ratios to the policy at the start of the
    update, and weighs them by the ratio of that policy to the one that sampled. decoupled:
    weights above correction_cap count as 0. truncated: they are cut to it. auto: truncated with
    another sampler than the engine, decoupled with a lag, else none."""
    correction_cap: Annotated[float, Field(ge=1)] = setting(5.0, needs=CORRECTED)
    """Upper limit of a weight in the correction."""
    correction_floor: Fraction = setting(0.0, needs=CORRECTED)
    """Lower limit of a weight in the correction; smaller weights count as 0 (IcePop: 0.5)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL to a reference policy; 0: off."""
    kl_in: Literal["reward", "loss"] = setting("reward", needs="algo.kl_coef")
    """Where the KL enters. reward: it is subtracted from each token's reward. loss: its mean over
    an action's tokens is added to the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = setting(None, needs="algo.kl_coef")
    """Estimator of the KL; none: k1 in the reward, k3 in the loss, where k1 has no gradient on
    average."""
    kl_reference: Literal["base", "start"] = setting("base", needs="algo.kl_coef")
    """Reference policy. base: the base without adapters. start: the adapters that the run began
    with (lora.init); a KL to the base would pull a team away from its supervised start."""
    kl_reference_every: Natural = setting(0, needs="algo.kl_reference start")
    """Steps after which the current adapters become the reference; 0: never. In self-play a
    moving reference leads to an equilibrium, and a fixed one keeps away from it (R-NaD, arXiv
    2206.15378)."""
    max_kl: NonNegative | None = None
    """Skips an agent in a minibatch where its approximate KL is above this; none: never."""

    @property
    def estimator(self) -> str:
        """Estimator of the KL to the reference."""
        return self.kl_estimator or ("k1" if self.kl_in == "reward" else "k3")


@dataclasses.dataclass(frozen=True)
class Branching:
    """Settings of an algorithm that may compare a turn with its siblings."""

    credit: Literal["last", "equal", "step_discount", "per_step", "siblings", "tree", "solo"] = (
        "last"
    )
    """Which turn receives the reward. last, equal, step_discount, per_step: as of appo. siblings: a
    turn receives its value minus the mean value of its siblings, which are further samples of the
    same turn (C3, arXiv 2603.06859); a value is the mean return of what follows. tree: its step
    reward minus theirs (AT-GRPO, arXiv 2510.11062). solo: the team's return minus what the turn's
    agent earns alone on the task (CCPO, arXiv 2603.21563)."""
    branches: Natural = 0
    """Further samples of a turn, with credit siblings or tree; with credit solo, samples of each
    agent alone on a task."""
    branch_at: str = setting("random", needs="algo.credit siblings or tree")
    """Turns that have branches. random: one of each episode. every: all. Or those of the agents
    named, with commas between."""
    branch_continue: Literal["end", "best", "random"] = setting("end", needs="algo.credit tree")
    """How far samples of a turn are played. end: to the end of the episode. best, random: to the
    end of their step, from where the sample with the best step reward, or a random one, goes on."""
    branch_budget: Literal["none", "leaves", "tokens"] = setting("none", needs="algo.branches")
    """Plays fewer tasks, so that a step has no more episodes (leaves) or sampled tokens (tokens)
    than without branches."""


@dataclasses.dataclass(frozen=True)
class RolloutSettings(Section):
    """Settings of playing; a sampler has more of its own."""

    decides: ClassVar[str] = "answers"

    sampler: str = "engine"
    """Who samples: engine, http (servers of vLLM or SGLang), or your own as
    package.module:Class."""
    step_seconds: Annotated[float, Field(ge=0.001)] = 600.0
    """Time limit for an answer of the environment or the workflow, in seconds. An episode that
    exceeds it has failed."""
    max_turns: Annotated[int, Field(ge=1, le=65535)] = 128
    """Most turns of an episode. An episode that wants more ends with what it has earned."""
    lag: Annotated[int, Field(ge=0, le=64)] = setting(0, needs=SAMPLED, decides="arrays")
    """Updates that the sampling adapters are behind: step s is sampled after s - lag updates, while
    other steps are learned; 0: sampling and learning alternate."""
    max_failed_fraction: Fraction = setting(0.25, decides="nothing")
    """Largest fraction of failed episodes. They are dropped and counted; above this fraction the
    run stops."""
    past_every: Count = setting(10, needs="agents.past")
    """Steps between versions for agents with `past` in the team file, which play as earlier
    versions."""
    past_kept: Count = setting(8, needs="agents.past", decides="arrays answers")
    """Number of versions that are kept, a uniform sample of all versions so far."""
    past_choice: Literal["random", "strong"] = setting("random", needs="agents.past")
    """How the version that plays a step is drawn. random: uniformly. strong: weighted by wins."""


@dataclasses.dataclass(frozen=True)
class Rollout(RolloutSettings):
    """Settings of playing with our engine."""

    slots: Count = setting(64, decides="nothing")
    """Rows of the key-value cache: how many agents act at the same time."""
    chunk: Count = setting(16, decides="nothing")
    """Decode steps on the device before the host looks at the rows again."""
    reuse: bool = setting(True, decides="nothing")
    """Keeps a prefix cache: the common beginning of an adapter's prompts is computed once."""


@dataclasses.dataclass(frozen=True)
class Mesh(Section):
    decides: ClassVar[str] = "nothing"

    data: Axis = -1
    """Devices along the batch; -1: all that the other axes leave."""
    fsdp: Axis = 1
    """Devices that share the rows of each matrix, and the batch; -1: all that the other axes
    leave."""
    tensor: Axis = 1
    """Devices that share the columns of each matrix; -1: all that the other axes leave."""
    rollout: tuple[Count, ...] = setting((), needs=SAMPLED)
    """Devices that play while the others learn: their number, or the axes data, fsdp and tensor;
    none: all devices do both."""
    bases: tuple[Count, ...] = ()
    """Gives each base of the team devices of its own for playing: the number of places along data,
    in each process, for each base in the order of the agents; none: all places play all bases."""
    coordinator: str | None = setting(None, decides="start")
    """Address of the first of several processes as HOST:PORT, or auto (TPU pods, SLURM, MPI,
    Kubernetes); none: a single process."""
    processes: Count | None = setting(None, needs="mesh.coordinator not auto", decides="start")
    """Number of processes, with a HOST:PORT."""
    process: Natural | None = setting(None, needs="mesh.coordinator not auto", decides="start")
    """Number of this process from 0, with a HOST:PORT."""
    wait_seconds: Annotated[float, Field(ge=1)] = setting(60.0, needs="mesh.coordinator")
    """Time that processes wait for a missing one before they stop, in seconds."""


@dataclasses.dataclass(frozen=True)
class Eval(Section):
    decides: ClassVar[str] = "answers"

    every: Natural = setting(0, decides="nothing")
    """Steps between evaluations on the held-out tasks; 0: never."""
    episodes: Count = setting(128, needs="eval.every", decides="nothing")
    """Tasks per evaluation, for each benchmark."""
    temperature: Temperature = setting(0.0, needs="eval.every")
    """Sampling temperature of evaluations; 0: greedy."""
    benchmarks: tuple[PathText, ...] = setting(
        (), needs="eval.every", path=os.path.isfile, decides="nothing"
    )
    """Benchmarks, as name[:samples][@temperature]; none: the held-out tasks of `env`."""
    data: PathText | None = setting(
        None, needs="eval.benchmarks", path=os.path.exists, decides="nothing"
    )
    """Folder with the files of benchmarks; none: the hub."""


@dataclasses.dataclass(frozen=True)
class Guard(Section):
    decides: ClassVar[str] = "nothing"

    skips: Count | None = 3
    """Steps in a row with non-finite numbers before a rollback; none: never."""
    patience: Count = 5
    """Steps in a row outside one of the bounds below before a rollback."""
    max_kl: NonNegative | None = setting(20.0, needs=SAMPLED)
    """Upper bound of an agent's approximate KL in a step; none: off."""
    min_entropy: NonNegative | None = setting(1e-6, needs=SAMPLED)
    """Lower bound of an agent's entropy per token, after `patience` steps above it; none: off."""
    reward_drop: NonNegative | None = setting(1.0, needs=SAMPLED)
    """Upper bound of the reward's fall below its best, in standard deviations over the episodes;
    none: off."""
    rollbacks: Natural = 3
    """Rollbacks before the run stops with a report."""
    lr_factor: Fraction = setting(0.1, needs="guard.rollbacks")
    """Factor of the learning rates after each rollback."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Fine-tunes a team of language-model agents with reinforcement learning."""

    run: Run = Run()
    """directory, length and checkpoints of the run"""
    model: Model = Model()
    """the frozen base model"""
    team: Team = Team()
    """who acts when, and how actions are sampled"""
    env: EnvSettings
    """the tasks, and how answers are graded"""
    lora: Lora = Lora()
    """the adapters that are trained"""
    critic: Critic = Critic()
    """the estimate of values"""
    algo: Update
    """how a step learns: credit, advantages, losses"""
    rollout: RolloutSettings = Rollout()
    """how episodes are played, and their limits"""
    mesh: Mesh = Mesh()
    """devices and processes"""
    eval: Eval = Eval()
    """evaluations during training, and of `evaluate`"""
    guard: Guard = Guard()
    """when a run is rolled back"""


def fit_base(config: Config, given: Container[str]) -> Config:
    """Sets the lengths that are not ``given`` (as ``section.name``) to what the base needs: the
    defaults are those of ``tiny``, which writes a few bytes."""
    is_tiny = config.model.base == "tiny"
    if "model.context" not in given:
        usual = Model.context if is_tiny else 1024
        config = replaced(config, "model.context", Derived(usual))
    is_long = Team.max_new_tokens >= config.model.context
    if "team.max_new_tokens" not in given and (is_long or not is_tiny):
        config = replaced(config, "team.max_new_tokens", longest_action(config.model.context))
    return config


def with_context(config: Config, context: int) -> Config:
    """Returns the config with the context that its base has, and an action that fits."""
    team = clamp_to_context(config.team, context)
    same_type = type(config.model.context)(context)  # derived, or given
    return dataclasses.replace(replaced(config, "model.context", same_type), team=team)


def clamp_to_context(team: Team, context: int) -> Team:
    """Returns the section with a longest action that fits the context, if none was given."""
    if not isinstance(team.max_new_tokens, Derived):
        return team
    longest = min(team.max_new_tokens, longest_action(context))
    return dataclasses.replace(team, max_new_tokens=longest)


def longest_action(context: int) -> Derived:
    """Longest action by default: a quarter of the context."""
    return Derived(max(1, context // 4))


def validate(config: Config) -> None:
    """Checks settings that must fit together, as far as that needs no files.

    Raises:
        BadInput: the first that is off: expected, got, how to fix it.
    """
    check_local("--run.dir", config.run.dir, is_run=True)
    if max(map(len, config.run.dir.split("/"))) > 255:
        raise BadInput(f"--run.dir: expected a shorter name, got {config.run.dir!r:.60}")
    targets, most = config.lora.targets, config.model.context
    if not targets or len(set(targets)) < len(targets):
        expected = "expected distinct names of matrices, such as q v"
        raise BadInput(f"--lora.targets: {expected}, got {targets!s:.80}")
    if (longest := config.team.max_new_tokens) >= most:
        default = " (its default)" * isinstance(most, Derived)
        expected = f"expected less than --model.context {most}{default}, got {longest}"
        raise BadInput(f"--team.max_new_tokens: {expected}; raise the context")
    for axis in ("data", "fsdp", "tensor"):
        if not getattr(config.mesh, axis):
            raise BadInput(f"--mesh.{axis}: expected a positive number or -1, got 0")


def dump(config: Config, *, several: bool = False) -> str:
    """Writes the config as YAML that ``--config`` loads to an equal ``Config``.

    Args:
        several: the team has several bases, of which each decides its own ``Derived`` numbers: they
            are left out.
    """
    plain = to_jsonable_python(config)
    for key, _ in settings(config):
        if several and isinstance(get(config, key), Derived):
            section, name = key.split(".")
            del plain[section][name]
    if not config.algo.has_critic:
        del plain["critic"]
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
