"""What the base knows of a microbatch before the update: values, features, reference log-probs."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marft_jax.config import Config
from marft_jax.learning import critic as critic_lib
from marft_jax.learning import logprobs
from marft_jax.learning.batch import Level

FROZEN = ("shared", "heads")  # modes of a critic that reads the base without adapters


class Scored(NamedTuple):
    """Of one microbatch; what the settings do not ask for is None.

    Attributes:
        values_BX: the critic's, of each decision.
        features_BXD: what a critic without adapters reads; it serves every epoch.
        reference_BA: log-probs of the base without adapters.
    """

    values_BX: Any = None
    features_BXD: Any = None
    reference_BA: Any = None


def reads_prompts(config: Config, level: Level) -> bool:
    """True where the critic reads what stands before each action and no action: for the value of
    an action as a whole, where nothing else reads the base without adapters."""
    return level == "action" and config.critic.mode in FROZEN and config.algo.kl_coef == 0


def reads_base(config: Config) -> bool:
    """True where there is anything to score before the update."""
    return config.critic.mode != "none" or config.algo.kl_coef > 0


def score(*, graphdef: Any, config: Config, level: Level, base: Any, critic: Any, r: Any) -> Scored:
    """Values and reference log-probs of a microbatch, from one pass through the frozen base."""
    index_BX = logprobs.unit_index(r, level)
    _, agent_BX, _ = logprobs.unit_labels(r, level)
    frozen, with_reference = config.critic.mode in FROZEN, config.algo.kl_coef > 0
    scored = Scored()
    if frozen or with_reference:
        with jax.named_scope("frozen_base"):
            wanted = [index_BX] * frozen + [r.index_BA] * with_reference
            hidden = logprobs.hidden_states(graphdef, base, r, jnp.concatenate(wanted, axis=1))
            split = index_BX.shape[1] if frozen else 0
            if frozen:
                scored = scored._replace(features_BXD=hidden[:, :split])
            if with_reference:
                reference_BA, _ = logprobs.score_actions(graphdef, base, hidden[:, split:], r)
                scored = scored._replace(reference_BA=reference_BA)
    if config.critic.mode == "none":
        return scored
    with jax.named_scope("critic"):
        features_BXD = scored.features_BXD
        if features_BXD is None:
            features_BXD = trunk_features(graphdef, config, level, base, critic, r)
        return scored._replace(values_BX=critic_lib.values(critic.head, features_BXD, agent_BX))


def trunk_features(
    graphdef: Any, config: Config, level: Level, base: Any, critic: critic_lib.Critic, r: Any
) -> jax.Array:
    """What the head reads of a microbatch, ``[B, X, D]``, through the critic's own adapters."""
    index_BX = logprobs.unit_index(r, level)
    return logprobs.hidden_states(
        graphdef, base, r, index_BX, critic.adapters, r.agents_BT, config.lora.alpha
    )
