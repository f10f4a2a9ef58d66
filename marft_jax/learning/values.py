"""Values, features and reference log-probs of a microbatch, before the update."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from marft_jax.learning import critic as critic_lib
from marft_jax.learning import logprobs
from marft_jax.learning.algorithms import Algorithm
from marft_jax.learning.batch import Level, Rows
from marft_jax.learning.logprobs import Graph
from marft_jax.learning.settings import LearnerSettings
from marft_jax.models import lora
from marft_jax.models.decoder import Base


class Static(NamedTuple):
    """Settings that the compiled functions of a learner are made for; by which they differ."""

    graphdef: Graph
    settings: LearnerSettings
    algorithm: Algorithm
    agents: int


class Scored(NamedTuple):
    """Numbers of one microbatch, None where the settings do not ask for them."""

    values_BX: jax.Array | None = None  # the critic's, of each decision
    features_BXD: jax.Array | None = None  # read by a critic without adapters, in every epoch
    reference_BA: jax.Array | None = None  # log-probs of the base without adapters


def reads_prompts(settings: LearnerSettings, level: Level) -> bool:
    """True where the critic reads what stands before each action and no action: for the value of
    an action as a whole, where nothing else reads the base without adapters."""
    return level == "action" and settings.has_frozen_critic and settings.reference != "base"


def reads_base(settings: LearnerSettings) -> bool:
    """True where there is anything to score before the update."""
    return settings.critic is not None or settings.reference == "base"


def score(static: Static, *, base: Base, critic: critic_lib.Critic, r: Rows[jax.Array]) -> Scored:
    """Computes values and reference log-probs from one pass through the frozen base."""
    graphdef, settings = static.graphdef, static.settings
    index_BX = logprobs.decision_index(r, static.algorithm.level)
    frozen, with_reference = settings.has_frozen_critic, settings.reference == "base"
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
    if settings.critic is None:
        return scored
    with jax.named_scope("critic"):
        values_BX = values(static, base, critic, r, scored.features_BXD)
    return scored._replace(values_BX=values_BX)


def values(
    static: Static,
    base: Base,
    critic: critic_lib.Critic,
    r: Rows[jax.Array],
    features_BXD: jax.Array | None,
) -> jax.Array:
    """V of each decision; without features, from those through the critic's own adapters."""
    level = static.algorithm.level
    if features_BXD is None:
        features_BXD = logprobs.hidden_states(
            static.graphdef,
            base,
            r,
            logprobs.decision_index(r, level),
            critic.adapters,
            r.agents_BT,
            static.settings.lora.alpha,
        )
    return critic_lib.values(critic.head, features_BXD, logprobs.decision_labels(r, level)[1])


def proximal(
    static: Static, *, base: Base, adapters: lora.Adapters, r: Rows[jax.Array]
) -> jax.Array:
    """Log-probs of actions under a policy that stays as it is, ``[B, A]``."""
    with jax.named_scope("proximal"):
        alpha = static.settings.lora.alpha
        return logprobs.action_logprobs(static.graphdef, base, adapters, alpha, r)[0]
