"""The registry: an algorithm is where decisions live, two pure functions, and its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax
import numpy as np

from marft_jax.config import Algo
from marft_jax.errors import BadInput
from marft_jax.learning import advantages as adv
from marft_jax.learning import losses
from marft_jax.learning import settings as own
from marft_jax.learning.batch import Chain, Level
from marft_jax.plugins import load_plugin, shown


class Algorithm(NamedTuple):
    """Two functions that turn a batch of episodes into a policy gradient.

    Attributes:
        level: ``action``: ratio, value and advantage per turn; ``token``: per action token.
        advantages: (settings, chain, values_EJ, baseline_X) to (advantages_EJ, returns_EJ), with
            the rewards in the ``Chain``; normalisation comes after it.
        policy_loss: (settings, logprobs, old_logprobs, advantages) to one loss per decision.
        settings: a frozen dataclass, ``Algo`` or a subclass with settings and defaults of its own.
    """

    level: Level
    advantages: Callable[..., Any]
    policy_loss: Callable[..., Any]
    settings: type[Algo] = Algo


def _gae(
    config: own.WithCritic, chain: Chain, values_EJ: np.ndarray, baseline_X: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    discounts_EJ = config.gamma * chain.continues_EJ
    return adv.gae(
        chain.rewards_EJ, values_EJ, adv.following(values_EJ), discounts_EJ, config.gae_lambda
    )


def _minus_like(
    config: Algo, chain: Chain, values_EJ: np.ndarray, baseline_X: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    returns_EJ = adv.returns_to_go(chain)
    return adv.minus_place_mean(returns_EJ, adv.sizes(chain, values_EJ), chain), returns_EJ


def _minus_baseline(
    config: Algo, chain: Chain, values_EJ: np.ndarray, baseline_X: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    if config.baseline == "group":
        return _minus_like(config, chain, values_EJ, baseline_X)
    returns_EJ, sizes_EJ = adv.returns_to_go(chain), adv.sizes(chain, values_EJ)
    return adv.minus_agent_mean(returns_EJ, sizes_EJ, chain, baseline_X), returns_EJ


def _clipped(
    config: own.Clipped, logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array
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


ALGORITHMS: dict[str, Algorithm] = {
    algorithm.settings.name: algorithm
    for algorithm in (
        Algorithm("action", _gae, _clipped, own.Appo),
        Algorithm("token", _gae, _clipped, own.Tppo),
        Algorithm("token", _minus_like, _clipped, own.Grpo),
        Algorithm("action", _minus_like, _clipped, own.Gspo),
        Algorithm("action", _minus_baseline, _score_function, own.Reinforce),
        Algorithm("token", _ones, _cross_entropy, own.Imitation),
    )
}


def find_algorithm(name: str) -> Algorithm:
    """The algorithm of that name, or the ``Algorithm`` that ``package.module:NAME`` names.

    Raises:
        BadInput: there is none.
    """
    return ALGORITHMS[name] if name in ALGORITHMS else _outside(name)


def _outside(name: str) -> Algorithm:
    """An algorithm of a user's own, whose advantages are checked."""
    what = f"--algo.name {name}"
    found = load_plugin(name, "--algo.name", ALGORITHMS, kind="NAME")
    if not isinstance(found, Algorithm):
        raise BadInput(f"{what}: expected a marft_jax.learning.Algorithm, got {shown(found)}")
    if not (isinstance(found.settings, type) and issubclass(found.settings, Algo)):
        kind = shown(found.settings)
        raise BadInput(f"{what}: expected settings that extend marft_jax.config.Algo, got {kind}")
    if found.level not in get_args(Level):
        raise BadInput(f"{what}: expected the level action or token, got {shown(found.level)}")
    if not (callable(found.advantages) and callable(found.policy_loss)):
        raise BadInput(f"{what}: expected functions as its advantages and policy_loss")

    def advantages(
        config: Algo, chain: Chain, values_EJ: np.ndarray, baseline_X: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        both = found.advantages(config, chain, values_EJ, baseline_X)
        if not isinstance(both, tuple) or len(both) != 2:
            raise BadInput(f"{what}: expected (advantages_EJ, returns_EJ), got {shown(both)}")
        first, second = (adv.check_shape(chain.rewards_EJ, x, what) for x in both)
        return first, second

    return found._replace(advantages=advantages)


def normalized_advantages(
    algo: Algo,
    algorithm: Algorithm,
    chain: Chain,
    values_EJ: np.ndarray,
    baseline_X: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """(advantages_EJ, returns_EJ), the advantages as the losses use them."""
    advantages_EJ, returns_EJ = algorithm.advantages(algo, chain, values_EJ, baseline_X)
    normalizer = adv.find_normalizer(algo.normalize)
    sizes_EJ = adv.sizes(chain, values_EJ)
    return normalizer(advantages_EJ, chain, sizes_EJ, algo.compares), returns_EJ
