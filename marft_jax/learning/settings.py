"""Settings of each algorithm, beside ``algorithms.py``, and what a learner makes of them.

Nothing here imports JAX, so that help and errors come at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from marft_jax.errors import BadInput
from marft_jax.learning.credit import CREDITS
from marft_jax.plugins import load_plugin, settings_of
from marft_jax.settings.config import (
    CORRECTED,
    Algo,
    Branching,
    Config,
    Critic,
    Lora,
    Rollout,
    Update,
)
from marft_jax.settings.setting import Count, Fraction, Natural, NonNegative, Positive, setting
from marft_jax.types import MAIN

if TYPE_CHECKING:
    from marft_jax.models.decoder_config import DecoderConfig

_TINY_LR = 1e-3
_PAID = "algo.reward_coef"


@dataclasses.dataclass(frozen=True)
class Clipped(Algo):
    """An algorithm whose ratios are clipped."""

    clip: NonNegative = 0.2
    """Lower clip of the ratio: it counts as at least 1 - clip."""
    clip_high: NonNegative | None = None
    """Upper clip of the ratio: it counts as at most 1 + clip_high; none: the same as clip."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bounds the loss of a negative advantage at this multiple of the advantage; none: off."""
    imitation_coef: NonNegative = 0.0
    """Weight of an added cross-entropy on decisions with a positive advantage."""
    mask_truncated: bool = False
    """Leaves out actions that stopped at their token limit."""
    entropy_target: NonNegative | None = setting(None, needs="algo.entropy_coef")
    """Gives the entropy bonus only to agents whose sampled entropy is below this, in nats per
    token; none: to all."""

    @property
    def ratios(self) -> tuple[float, float]:
        """Least and greatest ratio: 1 − ε and 1 + ε_high (clip-higher: DAPO, Yu et al. 2025)."""
        return 1 - self.clip, 1 + (self.clip if self.clip_high is None else self.clip_high)


@dataclasses.dataclass(frozen=True)
class TokenLevel:
    """Settings of an algorithm with a ratio for each token."""

    loss_mean: Count | Literal["token", "sequence"] = "token"
    """Mean of the loss. token: over all tokens. sequence: over each action's tokens first. A
    number: the sum over each action's tokens divided by this number, then over the actions."""
    correction_of: Literal["token", "sequence"] = setting("token", needs=CORRECTED)
    """Weight of a stale sample. token: one for each token. sequence: one for the whole action."""


@dataclasses.dataclass(frozen=True)
class WithCritic(Clipped):
    """An algorithm with a critic and generalised advantages."""

    has_critic: ClassVar[bool] = True
    normalize: str = "batch"
    entropy_coef: float = 0.01
    gamma: Fraction = 0.99
    """Discount from one decision to the next."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalised advantage estimation."""
    returns_lambda: Fraction | None = None
    """Lambda of the returns that the critic learns; none: the same as gae_lambda."""
    value_clip: NonNegative = 0.2
    """Clips a new value to the old value ± this."""
    huber_delta: Positive | None = 10.0
    """Value error from which the loss grows linearly; none: it is always squared."""


@dataclasses.dataclass(frozen=True)
class Appo(WithCritic):
    """MARFT-A: ratio, value and advantage of each action."""

    name: str = "appo"
    ratio: Literal["sum", "token", "word"] = "sum"
    """Log-prob of an action in the ratio. sum: the sum over its tokens. token: the mean over its
    tokens. word: the sum divided by its number of words."""


@dataclasses.dataclass(frozen=True)
class Tppo(TokenLevel, WithCritic):
    """MARFT-T: ratio, value and advantage of each token. Those discounts of an action would leave
    0.2 % after 100 tokens."""

    name: str = "tppo"
    gamma: Fraction = 1.0
    gae_lambda: Fraction = 1.0


@dataclasses.dataclass(frozen=True)
class Grpo(TokenLevel, Branching, Clipped):
    """Samples of a task are compared; a ratio for each token (Shao et al. 2024)."""

    compares: ClassVar[bool] = True
    name: str = "grpo"
    group_size: Count = 8
    normalize: str = "group"


@dataclasses.dataclass(frozen=True)
class Cispo(Grpo):
    """``grpo`` with clipped ratios as weights of the score function: no token loses its gradient
    (MiniMax-M1, arXiv 2506.13585, equation 4; no lower clip, as there)."""

    name: str = "cispo"
    clip: NonNegative = 1.0
    clip_high: NonNegative | None = 4.0
    dual_clip: ClassVar[None] = None
    imitation_coef: ClassVar[float] = 0.0


@dataclasses.dataclass(frozen=True)
class Gspo(Branching, Clipped):
    """``grpo`` with one ratio for an action, the geometric mean of its tokens' (Zheng et al.
    2025, arXiv 2507.18071; section 5.1 has the clip, which suits ratios so near 1)."""

    compares: ClassVar[bool] = True
    ratio: ClassVar[str] = "token"
    name: str = "gspo"
    group_size: Count = 8
    normalize: str = "group"
    clip: NonNegative = 3e-4
    clip_high: NonNegative | None = 4e-4


@dataclasses.dataclass(frozen=True)
class Reinforce(Branching, Algo):
    """−log π · A (Williams 1992). Nothing bounds a step on samples of another policy, so each
    sample is used once."""

    name: str = "reinforce"
    group_size: Count = 8
    epochs: Count = 1
    minibatches: Count = 1
    ratio: Literal["sum", "token", "word"] = "sum"
    """Log-prob of an action in the loss. sum: the sum over its tokens. token: the mean over its
    tokens. word: the sum divided by its number of words."""
    baseline: Literal["group", "moving", "role"] = "group"
    """What is subtracted from returns. group: the mean of the same turns in the group. moving: a
    moving mean of each agent. role: a moving mean of each agent's first turn of an episode, of its
    second, ..."""
    baseline_decay: Fraction = setting(0.9, needs="algo.baseline moving or role")
    """Share of the moving mean that remains after each step."""

    @property
    def compares(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.baseline == "group"


@dataclasses.dataclass(frozen=True)
class Distill(TokenLevel, Clipped):
    """On-policy distillation: the advantage of a sampled token is log p_teacher − log p_student,
    the reverse KL on the student's own samples (Agarwal et al. 2023, arXiv 2306.13649)."""

    name: str = "distill"
    teacher_coef: Positive = 1.0
    """Weight of the teacher's advantages."""
    reward_coef: NonNegative = 0.0
    """Weight of the advantages that the reward gives, as in grpo; 0: nothing is learned from the
    reward."""
    credit: Literal["last", "equal", "step_discount", "per_step"] = setting("last", needs=_PAID)
    normalize: str = setting("none", needs=_PAID)
    reward_bias: float = setting(0.0, needs=_PAID)
    reward_scale: float = setting(1.0, needs=_PAID)
    reward_clip: Positive | None = setting(None, needs=_PAID)
    overlong_buffer: Natural = setting(0, needs=_PAID)
    kl_coef: NonNegative = setting(0.0, needs=f"{_PAID} or algo.kl_in loss")

    @property
    def compares(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.reward_coef > 0


@dataclasses.dataclass(frozen=True)
class Imitation(Update):
    """Cross-entropy of recorded tokens: what is about the team's own samples is no setting."""

    recorded: ClassVar[bool] = True
    name: str = "imitation"


SETTINGS = {
    kind.name: kind for kind in (Appo, Tppo, Grpo, Gspo, Cispo, Reinforce, Distill, Imitation)
}
"""Name to settings of the built-in algorithms."""


def settings_type(name: str) -> type[Update]:
    """Finds the settings of a built-in algorithm, or of one of a user's own.

    Raises:
        BadInput: there is no such algorithm.
    """
    if name in SETTINGS:
        return SETTINGS[name]
    plugin = load_plugin(name, "--algo.name", SETTINGS, kind="NAME")
    return settings_of(plugin, f"--algo.name {name}", Algo)


class LearnerSettings(NamedTuple):
    """Settings of a learner: the sections that it reads, and what follows from its base.

    Attributes:
        critic: None where the algorithm has none.
        lr: of the adapters on each base.
        correction: of stale samples.
        steps: of the whole run.
        lag: versions of the adapters that the state keeps.
    """

    algo: Update
    critic: Critic | None
    lora: Lora
    seed: int
    lag: int
    lr: Mapping[str, float]
    correction: str
    steps: int

    @property
    def reference(self) -> str:
        """``base`` or ``start``, to which a KL is taken, or ``none``."""
        kl = self.algo.part(Algo)
        return kl.kl_reference if kl.kl_coef > 0 else "none"

    @property
    def has_frozen_critic(self) -> bool:
        """True where the critic reads the base without adapters."""
        return self.critic is not None and self.critic.mode != "lora"

    def reads_prompts(self, level: str) -> bool:
        """True where the frozen base is read for the values of whole actions only.

        Such a value needs the tokens before the action, and not the action itself.
        """
        return level == "action" and self.has_frozen_critic and self.reference != "base"

    def rate_factor(self, step: int) -> float:
        """What the learning rates are multiplied with in the training step after ``step``.

        From 1 / (W + 1) to 1 in the W steps of the warm-up; then 1, or 1 - x, or (1 + cos(pi x)) /
        2 where x is the part of the remaining steps that is done.
        """
        algo = self.algo
        if step < algo.lr_warmup:
            return (step + 1) / (algo.lr_warmup + 1)
        done = min((step - algo.lr_warmup) / max(self.steps - algo.lr_warmup, 1), 1.0)
        return {
            "constant": 1.0,
            "linear": 1 - done,
            "cosine": (1 + math.cos(math.pi * done)) / 2,
        }[algo.lr_schedule]


def resolve(
    config: Config,
    models: Mapping[str, tuple[str, DecoderConfig]],
    rates: Mapping[str, float | None] = MappingProxyType({}),
) -> LearnerSettings:
    """Resolves the settings of a learner.

    Args:
        models: name and shape of the model of each base.
        rates: learning rates of bases that have their own.
    """
    algo, lag = config.algo, config.rollout.lag
    correction, lr = algo.part(Algo).correction, dict[str, float]()
    for base, (source, model) in models.items():
        rate = rates.get(base) or algo.lr
        if rate == "auto":
            supervised = algo.name == Imitation.name
            rate = _TINY_LR if source == "tiny" else adapter_lr(model, supervised=supervised)
        lr[base] = rate
    if correction == "auto":
        ours = isinstance(config.rollout, Rollout)  # its log-probs are those of the learner
        correction = ("decoupled" if lag else "none") if ours else "truncated"
    critic = config.critic if algo.has_critic else None
    seed, steps = config.run.seed, config.run.steps
    return LearnerSettings(algo, critic, config.lora, seed, lag, lr, correction, steps)


def resolved(config: Config, learner: LearnerSettings) -> Config:
    """Writes into the config what a base decided, as a run directory keeps it. The learning rate
    stays ``auto`` where several bases decide."""
    known: dict[str, Any] = {"lr": learner.lr[MAIN]} if [*learner.lr] == [MAIN] else {}
    known |= {"correction": learner.correction} if isinstance(config.algo, Algo) else {}
    return dataclasses.replace(config, algo=dataclasses.replace(config.algo, **known))


def adapter_lr(model: DecoderConfig, *, supervised: bool) -> float:
    """Learning rate of LoRA adapters on a real model of width D.

    Supervised 5e-5 · 10 · (2000 / D)^P, P = 0.0775 for Qwen and 0.781 for others: ten times that of
    full fine-tuning. Reinforcement takes a tenth of it: on SmolLM2-135M that learns, and ten times
    as much destroyed the start in four steps (``configs/studies/README.md``).

    Source: tinker-cookbook, ``hyperparam_utils.get_lr``, fitted to Qwen3 and Llama 3 of 1B to 70B;
    Schulman et al. 2025, LoRA Without Regret.
    """
    [mixer, *_] = model.attentions
    others = model.post_norms or mixer.o_bias  # as Gemma, Olmo and gpt-oss have
    is_qwen = (mixer.qkv_bias or mixer.qk_norm) and not others
    lr = 5e-4 * (2000 / model.d_model) ** (0.0775 if is_qwen else 0.781)
    return float(f"{lr if supervised else 0.1 * lr:.2g}")


def validate(algo: Update, critic: Critic) -> None:
    """Checks that group, critic and KL are what the algorithm needs.

    Raises:
        BadInput: the first that is not.
    """
    name, of_samples, branching = algo.name, algo.part(Algo), algo.part(Branching)
    branches, goes_on = branching.branches, branching.branch_continue
    credit, size = of_samples.credit, of_samples.group_size
    is_paid = not isinstance(algo, Distill) or algo.reward_coef
    normalize = of_samples.normalize if is_paid else "none"
    further = CREDITS[credit].advantage is not None
    comparing = "--algo.dynamic_sampling" if of_samples.dynamic_sampling else ""
    comparing = f"--algo.normalize {normalize}" if normalize.startswith("group") else comparing
    comparing = f"--algo.name {name}" if algo.compares else comparing
    faults = {
        f"--critic.mode: {name} needs a critic, got none; use shared, heads or lora": (
            algo.has_critic and critic.mode == "none"
        ),
        f"--algo.branches: credit {credit} compares with further samples, expected at least "
        "1, got 0; set it to 3, say": further and not branches,
        f"--algo.branches: credit {credit} compares with no further samples, expected 0, got "
        f"{branches}; leave it out, or use siblings, tree or solo": branches and not further,
        "--algo.branch_continue: credit siblings compares what follows to the end, expected end, "
        f"got {goes_on}": branching.credit == "siblings" and goes_on != "end",
        f"--algo.credit {credit}: further samples are the baseline; leave "
        "--algo.dynamic_sampling and --algo.baseline out": (
            further and (of_samples.dynamic_sampling or algo.part(Reinforce).baseline != "group")
        ),
        "--algo.branch_at: with --algo.branch_continue best the number of turns is not known "
        "beforehand; expected every, or agents, got random": (
            (branching.credit, goes_on, branching.branch_at) == ("tree", "best", "random")
        ),
        f"--algo.group_size: {comparing} compares samples of one task, expected at "
        f"least 2, got {size}; set it to 8, say": comparing and size < 2 and not branches,
        f"--algo.episodes: --algo.normalize {normalize} compares what episodes earn, expected "
        "at least 2, got 1, with which no adapter ever moves; set it to 8, say": (
            algo.episodes == 1 and normalize in ("batch", "agent") and not algo.compares
        ),
        f"--algo.episodes: expected a multiple of --algo.group_size {size}, got {algo.episodes}": (
            algo.episodes % size
        ),
        "--algo.kl_estimator: k1 has no gradient in the loss; expected k2 or k3, got k1": (
            of_samples.kl_coef and of_samples.kl_in == "loss" and of_samples.estimator == "k1"
        ),
    }
    for fault, is_there in faults.items():
        if is_there:
            raise BadInput(fault)


def reuses_samples(algo: Update) -> str | None:
    """A warning where unclipped steps are taken on samples of an earlier policy."""
    if not isinstance(algo, Reinforce) or algo.epochs * algo.minibatches == 1:
        return None
    return (
        f"{algo.name}: {algo.epochs} epochs x {algo.minibatches} minibatches: all steps but the "
        "first learn from samples of an earlier policy, and nothing bounds them"
    )
