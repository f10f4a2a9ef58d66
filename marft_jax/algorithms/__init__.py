"""The registry: an algorithm is where decisions live, and two pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from marft_jax import config as config_lib
from marft_jax.algorithms.advantages import gae
from marft_jax.algorithms.losses import clipped_policy_loss


class Algorithm(NamedTuple):
    """How a batch of episodes becomes a policy gradient.

    Attributes:
        level: ``action``: ratio, value and advantage per turn; ``token``: per action token.
        advantages: (config, rewards_EJ, values_EJ, next_values_EJ, continues_EJ) to
            (advantages_EJ, returns_EJ).
        policy_loss: (config, logprobs, old_logprobs, advantages) to one loss per decision.
    """

    level: Literal["action", "token"]
    advantages: Callable[..., Any]
    policy_loss: Callable[..., Any]


def _gae(config: config_lib.Algo, rewards_EJ, values_EJ, next_values_EJ, continues_EJ):
    discounts_EJ = config.gamma * continues_EJ
    return gae(rewards_EJ, values_EJ, next_values_EJ, discounts_EJ, config.gae_lambda)


def _clipped(config: config_lib.Algo, logprobs, old_logprobs, advantages):
    return clipped_policy_loss(logprobs, old_logprobs, advantages, config.clip)


ALGORITHMS: dict[str, Algorithm] = {
    "appo": Algorithm("action", _gae, _clipped),
    "tppo": Algorithm("token", _gae, _clipped),
}


def find_algorithm(name: str) -> Algorithm:
    """The algorithm of that name.

    Raises:
        BadInput: there is none.
    """
    if name not in ALGORITHMS:
        raise config_lib.BadInput(f"--algo.name: expected {', '.join(ALGORITHMS)}, got {name!r}")
    return ALGORITHMS[name]
