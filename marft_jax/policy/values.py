"""Values, features and reference log-probs of a microbatch, before the update."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from marft_jax.learning.algorithms import Algorithm
from marft_jax.learning.settings import LearnerSettings
from marft_jax.models import lora
from marft_jax.models.decoder import Base
from marft_jax.policy import critic as critic_lib
from marft_jax.policy import logprobs
from marft_jax.policy.logprobs import Graph
from marft_jax.policy.rows import Level, Rows


class CriticSpec(NamedTuple):
    """Constants of what reads a base for a critic.

    Attributes:
        agents: number of agents in the team.
    """

    graphdef: Graph
    settings: LearnerSettings
    algorithm: Algorithm
    agents: int


class Scored(NamedTuple):
    """Numbers of one microbatch, None where the settings do not ask for them."""

    values_BX: jax.Array | None = None  # the critic's value of each decision
    features_BXD: jax.Array | None = None  # input of a critic without adapters, for every epoch
    reference_BA: jax.Array | None = None  # log-probs under a KL's reference
    present_BA: jax.Array | None = None  # log-probs under the adapters before the update


def reads_prompts(settings: LearnerSettings, level: Level) -> bool:
    """True where the frozen base is read for the values of whole actions only.

    Such a value needs the tokens before the action, and not the action itself.
    """
    return level == "action" and settings.has_frozen_critic and settings.reference != "base"


def reads_base(settings: LearnerSettings) -> bool:
    """True where there is anything to score before the update."""
    return settings.critic is not None or settings.reference == "base"


def score(spec: CriticSpec, *, base: Base, critic: critic_lib.Critic, r: Rows[jax.Array]) -> Scored:
    """Computes values and reference log-probs from one pass through the frozen base."""
    graphdef, settings = spec.graphdef, spec.settings
    index_BX = logprobs.decision_index(r, spec.algorithm.level)
    frozen, with_reference = settings.has_frozen_critic, settings.reference == "base"
    scored = Scored()
    if frozen or with_reference:
        with jax.named_scope("frozen_base"):
            wanted = [index_BX] * frozen + [r.actions.index_BA] * with_reference
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
        values_BX = values(spec, base, critic, r, scored.features_BXD)
    return scored._replace(values_BX=values_BX)


def values(
    spec: CriticSpec,
    base: Base,
    critic: critic_lib.Critic,
    r: Rows[jax.Array],
    features_BXD: jax.Array | None,
) -> jax.Array:
    """V of each decision; without given features, from the features of the critic's adapters."""
    level = spec.algorithm.level
    if features_BXD is None:
        index_BX = logprobs.decision_index(r, level)
        scale = lora.scale_of(critic.adapters, spec.settings.lora.alpha)
        features_BXD = logprobs.hidden_states(
            spec.graphdef, base, r, index_BX, critic.adapters, r.tokens.agents_BT, scale
        )
    return critic_lib.values(critic.head, features_BXD, logprobs.decision_labels(r, level)[1])


def forward(
    graphdef: Graph,
    *,
    base: Base,
    adapters: lora.Adapters | None,
    scale: jax.Array | float,
    r: Rows[jax.Array],
) -> jax.Array:
    """Log-probs of the learned tokens under adapters, ``[B, A]``; without any, of the base."""
    with jax.named_scope("forward"):
        return logprobs.action_logprobs(graphdef, base, adapters, scale, r)[0]
