"""The registry: an algorithm is where decisions live, and two pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

import jax
import numpy as np

from marft_jax.config import Algo, Config
from marft_jax.errors import BadInput
from marft_jax.learning import advantages as adv
from marft_jax.learning import losses
from marft_jax.learning.batch import Chain, Level
from marft_jax.models.decoder import DecoderConfig
from marft_jax.plugins import load_plugin, shown


class Algorithm(NamedTuple):
    """Two functions that turn a batch of episodes into a policy gradient."""

    level: Level  # ``action``: ratio, value and advantage per turn; ``token``: per action token
    # (config, chain, values_EJ, baseline_X) to (advantages_EJ, returns_EJ), with the rewards in the
    # ``Chain``; normalisation comes after it
    advantages: Callable[..., Any]
    # (config, logprobs, old_logprobs, advantages) to one loss per decision
    policy_loss: Callable[..., Any]
    # what ``auto`` or none means for settings of ``algo``; with a ``group_size`` above 1 its
    # advantages are differences to other samples of the same task
    own: Mapping[str, Any]
    has_critic: bool  # whether its advantages read values


def _gae(
    config: Algo, chain: Chain, values_EJ: np.ndarray, baseline_X: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    assert config.gamma != "auto" and config.gae_lambda != "auto"  # settled
    discounts_EJ = config.gamma * chain.continues_EJ
    return adv.gae(
        chain.rewards_EJ, values_EJ, adv.following(values_EJ), discounts_EJ, config.gae_lambda
    )


def _minus_like(
    config: Algo, chain: Chain, values_EJ: np.ndarray, baseline_X: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    returns_EJ = adv.returns_to_go(chain)
    return adv.minus_like(returns_EJ, adv.sizes(chain, values_EJ), chain), returns_EJ


def _minus_baseline(
    config: Algo, chain: Chain, values_EJ: np.ndarray, baseline_X: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    if config.baseline == "group":
        return _minus_like(config, chain, values_EJ, baseline_X)
    returns_EJ = adv.returns_to_go(chain)
    return adv.minus_own(returns_EJ, adv.sizes(chain, values_EJ), chain, baseline_X), returns_EJ


def _clipped(
    config: Algo, logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array
) -> jax.Array:
    return losses.clipped_policy_loss(
        logprobs, old_logprobs, advantages, config.clip, config.clip_high, config.dual_clip
    )


def _score_function(
    config: Algo, logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array
) -> jax.Array:
    """−log π · A (Williams 1992)."""
    return -logprobs * advantages


def _ones(
    config: Algo, chain: Chain, values_EJ: np.ndarray, baseline_X: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    return np.ones_like(chain.rewards_EJ), adv.returns_to_go(chain)


def _cross_entropy(
    config: Algo, logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array
) -> jax.Array:
    """−log π of recorded tokens."""
    return -logprobs


_GAE = {"gamma": 0.99, "gae_lambda": 0.95, "entropy_coef": 0.01}
_PPO = {"normalize": "batch", "ratio": "sum", "group_size": 1, **_GAE}
_TOKENS = _PPO | {"gamma": 1.0, "gae_lambda": 1.0}  # 0.99 * 0.95 leaves 0.2 % after 100 tokens
_GROUP = {"normalize": "group", "ratio": "token", "group_size": 8, "entropy_coef": 0.0}
_PLAIN = _GROUP | {"normalize": "none", "ratio": "sum", "baseline": "group"}
_SAID = {"normalize": "none", "ratio": "token", "group_size": 1, "entropy_coef": 0.0}

_TINY_LR = 1e-3

ALGORITHMS: dict[str, Algorithm] = {
    "appo": Algorithm("action", _gae, _clipped, _PPO, has_critic=True),
    "tppo": Algorithm("token", _gae, _clipped, _TOKENS, has_critic=True),
    "grpo": Algorithm("token", _minus_like, _clipped, _GROUP, has_critic=False),
    "gspo": Algorithm("action", _minus_like, _clipped, _GROUP, has_critic=False),
    "reinforce": Algorithm("action", _minus_baseline, _score_function, _PLAIN, has_critic=False),
    "imitation": Algorithm("token", _ones, _cross_entropy, _SAID, has_critic=False),
}


def find_algorithm(name: str) -> Algorithm:
    """The algorithm of that name, or the ``Algorithm`` that ``package.module:NAME`` names.

    Raises:
        BadInput: there is none.
    """
    return ALGORITHMS[name] if name in ALGORITHMS else _outside(name)


def _outside(name: str) -> Algorithm:
    """An algorithm of a user's own; what its ``own`` leaves out normalises and compares nothing."""
    what = f"--algo.name {name}"
    found = load_plugin(name, "--algo.name", ALGORITHMS, kind="NAME")
    if not isinstance(found, Algorithm):
        raise BadInput(f"{what}: expected a marft_jax.learning.Algorithm, got {shown(found)}")
    if found.level not in get_args(Level):
        raise BadInput(f"{what}: expected the level action or token, got {shown(found.level)}")
    if not (callable(found.advantages) and callable(found.policy_loss)):
        raise BadInput(f"{what}: expected functions as its advantages and policy_loss")
    fields = [field.name for field in dataclasses.fields(Algo)]
    if not isinstance(found.own, Mapping) or set(found.own) - set(fields):
        raise BadInput(f"{what}: own: expected settings of algo, got {shown(found.own)}")

    def advantages(
        config: Algo, chain: Chain, values_EJ: np.ndarray, baseline_X: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        both = found.advantages(config, chain, values_EJ, baseline_X)
        if not isinstance(both, tuple) or len(both) != 2:
            raise BadInput(f"{what}: expected (advantages_EJ, returns_EJ), got {shown(both)}")
        first, second = (adv.like(chain.rewards_EJ, x, what) for x in both)
        return first, second

    ratio = "token" if found.level == "token" else "sum"
    own = {"normalize": "none", "ratio": ratio, "baseline": "auto", "group_size": 1, **_GAE}
    return found._replace(advantages=advantages, own=own | dict(found.own))


def compares_samples(algo: Algo, algorithm: Algorithm) -> bool:
    """True where advantages are differences to other samples of the same task."""
    return algorithm.own["group_size"] > 1 and algo.baseline != "moving"


def normalized_advantages(
    algo: Algo,
    algorithm: Algorithm,
    chain: Chain,
    values_EJ: np.ndarray,
    baseline_X: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """(advantages_EJ, returns_EJ) of a settled config, the advantages as the losses use them."""
    advantages_EJ, returns_EJ = algorithm.advantages(algo, chain, values_EJ, baseline_X)
    compared, sizes_EJ = compares_samples(algo, algorithm), adv.sizes(chain, values_EJ)
    normalizer = adv.find_normalizer(algo.normalize)
    return normalizer(advantages_EJ, chain, sizes_EJ, compared), returns_EJ


def settle(config: Config, model: DecoderConfig | None = None) -> Config:
    """The config with what its algorithm means by ``auto``; a settled config stays as it is.

    Args:
        model: the base's shape, by which the learning rate is chosen; without it that stays.

    Raises:
        BadInput: settings that contradict the algorithm or each other.
    """
    algorithm, algo, mode = find_algorithm(config.algo.name), config.algo, config.critic.mode
    own = dict(algorithm.own)
    if algo.baseline == "moving":
        own["group_size"] = 1
    free = {key: value for key, value in own.items() if getattr(algo, key) in ("auto", None)}
    algo = dataclasses.replace(algo, **free)
    if algo.lr == "auto" and model is not None:
        own_lr = _TINY_LR if config.model.base == "tiny" else adapter_lr(model, algo.name)
        algo = dataclasses.replace(algo, lr=own_lr)
    if algo.correction == "auto":
        algo = dataclasses.replace(algo, correction="decoupled" if config.rollout.lag else "none")
    if mode == "auto":
        mode = "shared" if algorithm.has_critic else "none"
    critic = dataclasses.replace(config.critic, mode=mode)
    adv.find_normalizer(algo.normalize)
    _check(algo, critic.mode, critic.warmup_steps, algorithm)
    return dataclasses.replace(config, algo=algo, critic=critic)


def adapter_lr(model: DecoderConfig, algorithm: str) -> float:
    """Learning rate of LoRA adapters on a real model of width D.

    Supervised 5e-5 · 10 · (2000 / D)^P, P = 0.0775 for Qwen and 0.781 for others: ten times that of
    full fine-tuning. Reinforcement takes a tenth of it: on SmolLM2-135M that learns, and ten times
    as much destroyed the start in four steps (``configs/studies/README.md``).

    Source: tinker-cookbook, ``hyperparam_utils.get_lr``, fitted to Qwen3 and Llama 3 of 1B to 70B;
    Schulman et al. 2025, LoRA Without Regret.
    """
    is_qwen = (model.qkv_bias or model.qk_norm) and not model.post_norms  # as Gemma has
    supervised = 5e-4 * (2000 / model.d_model) ** (0.0775 if is_qwen else 0.781)
    lr = supervised if algorithm == "imitation" else 0.1 * supervised
    return float(f"{lr:.2g}")


def _check(algo: Algo, mode: str, warmup: int, algorithm: Algorithm) -> None:
    size, name = algo.group_size or 1, algo.name
    if algorithm.has_critic and mode == "none":
        raise BadInput(f"--critic.mode: {name} needs a critic, got none; use shared, heads or lora")
    if not algorithm.has_critic and mode != "none":
        raise BadInput(f"--critic.mode: {name} has no critic, got {mode}; leave it out")
    if not algorithm.has_critic and warmup:
        raise BadInput(f"--critic.warmup_steps: {name} has no critic, got {warmup}; set it to 0")
    if algo.ratio != algorithm.own["ratio"] and (algorithm.level == "token" or name == "gspo"):
        raise BadInput(f"--algo.ratio: {name} has its own, got {algo.ratio}; leave it out")
    if algo.baseline != "auto" and "baseline" not in algorithm.own:
        raise BadInput(
            f"--algo.baseline: only reinforce has one, got {algo.baseline}; leave it out"
        )
    for setting, wanted in (
        (f"--algo.name {name}", compares_samples(algo, algorithm)),
        (f"--algo.normalize {algo.normalize}", algo.normalize in ("group", "group_turn")),
        ("--algo.dynamic_sampling", algo.dynamic_sampling),
    ):
        if wanted and size < 2:
            raise BadInput(
                f"--algo.group_size: {setting} compares samples of one task, expected at least 2, "
                f"got {size}; set it to 8, say"
            )
    if algo.episodes % size:
        raise BadInput(
            f"--algo.episodes: expected a multiple of --algo.group_size {size}, got {algo.episodes}"
        )
