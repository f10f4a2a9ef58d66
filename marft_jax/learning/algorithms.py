"""Registry of algorithms: each is where decisions live, two pure functions, and its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax
import numpy as np

from marft_jax.errors import BadInput
from marft_jax.learning import settings as kinds
from marft_jax.learning.advantages import place_advantage, returns_to_go
from marft_jax.learning.chain import Chain
from marft_jax.learning.credit import CREDITS
from marft_jax.learning.layers import gae_by_layer
from marft_jax.learning.moving import moving_advantage, roles
from marft_jax.learning.normalizers import NORMALIZERS, check_shape, find_normalizer
from marft_jax.learning.siblings import inverse_chances
from marft_jax.plugins import called, load_plugin, shown
from marft_jax.policy import losses
from marft_jax.settings.config import Algo, Branching, Update
from marft_jax.types import Level


class Algorithm(NamedTuple):
    """Two functions that turn a batch of episodes into a policy gradient.

    Attributes:
        level: ``action``: ratio, value and advantage per turn; ``token``: per action token.
        advantages: (settings, chain, values_EJ, baseline_P) to (advantages_EJ, returns_EJ), with
            the rewards in the ``Chain`` and the moving mean of each agent's returns in
            ``baseline_P``; normalisation comes after it.
        policy_loss: (settings, logprobs, old_logprobs, advantages) to one loss per decision.
        settings: a frozen dataclass, ``Algo`` or a subclass with settings and defaults of its own.
    """

    level: Level
    advantages: Callable[..., tuple[np.ndarray, np.ndarray]]
    policy_loss: Callable[..., jax.Array]
    settings: type[Update] = Algo


Estimated = tuple[np.ndarray, np.ndarray]
"""(advantages_EJ, returns_EJ)."""


def _gae(config: kinds.WithCritic, chain: Chain, values_EJ: np.ndarray, _: Any) -> Estimated:
    """GAE through the layers of the chain; ``returns_lambda`` is the λ of the returns."""
    gamma, gae_lambda = config.gamma, config.gae_lambda
    advantages_EJ, returns_EJ = gae_by_layer(chain, values_EJ, gamma, gae_lambda)
    if config.returns_lambda is not None:
        returns_EJ = gae_by_layer(chain, values_EJ, gamma, config.returns_lambda)[1]
    return advantages_EJ, returns_EJ


def _minus_baseline(config: Algo, chain: Chain, _: Any, baseline_P: np.ndarray) -> Estimated:
    """Returns-to-go minus a baseline: of further samples, a moving mean, or the same turns."""
    returns_EJ = returns_to_go(chain)
    rule = CREDITS[config.credit]
    if rule.advantage is not None:
        one_of_all = config.part(Branching).branch_at == "random" and not rule.solo
        return rule.advantage(chain) * (inverse_chances(chain) if one_of_all else 1), returns_EJ
    if (baseline := config.part(kinds.Reinforce).baseline) != "group":
        labels_EJ = roles(chain, baseline)
        return moving_advantage(returns_EJ, chain, labels_EJ, baseline_P), returns_EJ
    return place_advantage(returns_EJ, chain), returns_EJ


def _clipped(
    config: kinds.Clipped, logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array
) -> jax.Array:
    loss = losses.clipped_policy_loss(
        logprobs, old_logprobs, advantages, *config.ratios, config.dual_clip
    )
    if config.imitation_coef:
        loss = loss - config.imitation_coef * (advantages > 0) * logprobs
    return loss


def _cispo(
    config: kinds.Cispo, logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array
) -> jax.Array:
    return losses.cispo(logprobs, old_logprobs, advantages, *config.ratios)


def _score_function(
    config: Update, logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array
) -> jax.Array:
    """−log π · A (Williams 1992); the cross-entropy of recorded tokens, where A is 1."""
    return -logprobs * advantages


def _ones(config: Update, chain: Chain, *_: np.ndarray) -> Estimated:
    return np.ones_like(chain.rewards_EJ), returns_to_go(chain)


ALGORITHMS: dict[str, Algorithm] = {
    algorithm.settings.name: algorithm
    for algorithm in (
        Algorithm("action", _gae, _clipped, kinds.Appo),
        Algorithm("token", _gae, _clipped, kinds.Tppo),
        Algorithm("token", _minus_baseline, _clipped, kinds.Grpo),
        Algorithm("action", _minus_baseline, _clipped, kinds.Gspo),
        Algorithm("token", _minus_baseline, _cispo, kinds.Cispo),
        Algorithm("action", _minus_baseline, _score_function, kinds.Reinforce),
        Algorithm("token", _minus_baseline, _clipped, kinds.Distill),
        Algorithm("token", _ones, _score_function, kinds.Imitation),
    )
}


def find_algorithm(name: str) -> Algorithm:
    """Finds an algorithm by its name; ``package.module:NAME`` is one of a user's own.

    Raises:
        BadInput: there is none, or it is no ``Algorithm``.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    kinds.settings_type(name)  # checks the settings
    plugin = load_plugin(name, "--algo.name", ALGORITHMS, kind="NAME")
    if not isinstance(plugin, Algorithm) or plugin.level not in get_args(Level):
        raise BadInput(
            f"--algo.name {name}: expected a marft_jax.learning.Algorithm of the level action or "
            f"token, got {shown(plugin)}"
        )
    return plugin


def normalized_advantages(
    algo: Update,
    algorithm: Algorithm,
    chain: Chain,
    values_EJ: np.ndarray,
    baseline_P: np.ndarray,
) -> Estimated:
    """Computes (advantages_EJ, returns_EJ), the advantages as the losses use them.

    Agents with an advantage that is not finite have NaN; others are normalised without them.

    Raises:
        BadInput: a user's algorithm or normaliser returned something else.
    """
    what = f"--algo.name {algo.name}"
    both = called(f"{what}: advantages", algorithm.advantages, algo, chain, values_EJ, baseline_P)
    if not isinstance(both, tuple) or len(both) != 2:
        raise BadInput(f"{what}: expected (advantages_EJ, returns_EJ), got {shown(both)}")
    advantages_EJ, returns_EJ = (check_shape(chain.rewards_EJ, x, what) for x in both)
    broken = chain.agent_EJ[(chain.mask_EJ > 0) & ~np.isfinite(advantages_EJ)]
    is_out_EJ = np.isin(chain.agent_EJ, broken)
    chain = chain._replace(weight_EJ=np.where(is_out_EJ, 0, chain.weight_EJ))
    advantages_EJ = np.where(is_out_EJ | (chain.mask_EJ == 0), 0, advantages_EJ)
    name, whole = algo.part(Algo).normalize, advantages_EJ
    more, what = (algo.compares,) if name in NORMALIZERS else (), f"--algo.normalize {name}"
    normal_EJ = called(what, find_normalizer(name), advantages_EJ, chain, *more)
    normal_EJ = check_shape(whole, normal_EJ, what)
    return np.where(is_out_EJ & (chain.mask_EJ > 0), np.nan, normal_EJ), returns_EJ
