"""What an algorithm minimises, as the policy's and the critic's passes take it."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from marft_jax.learning.algorithms import Algorithm
from marft_jax.learning.settings import Clipped, LearnerSettings, TokenLevel, WithCritic
from marft_jax.plugins import called
from marft_jax.policy import losses
from marft_jax.policy.critic import CriticSpec
from marft_jax.policy.logprobs import Graph
from marft_jax.policy.objective import Objective, check_loss
from marft_jax.settings.config import Algo


def objective_of(settings: LearnerSettings, algorithm: Algorithm) -> Objective:
    """What a team's algorithm minimises."""
    update = settings.algo
    algo, kind = update.part(Algo), settings.correction
    has_kl = algo.kl_in == "loss" and settings.reference != "none"

    def loss(logprobs: jax.Array, inputs: Mapping[str, jax.Array]) -> jax.Array:
        what = f"--algo.name {update.name}: policy_loss"
        read = logprobs, inputs["old"], inputs["advantages"]
        return check_loss(called(what, algorithm.policy_loss, update, *read), logprobs, what)

    return Objective(
        algorithm.level,
        loss,
        clip=update.ratios if isinstance(update, Clipped) else None,
        correction=None if kind == "none" else (kind, algo.correction_cap, algo.correction_floor),
        corrects_turns=update.part(TokenLevel).correction_of == "sequence",
        kl=(algo.kl_coef, algo.estimator) if has_kl else None,
    )


def critic_of(
    settings: LearnerSettings, algorithm: Algorithm, graphdef: Graph, agents: int
) -> CriticSpec:
    """How a team's critic reads a base, and what it minimises."""
    algo = settings.algo.part(WithCritic)

    def loss(values: jax.Array, inputs: Mapping[str, jax.Array]) -> jax.Array:
        before, returns = inputs["values"], inputs["returns"]
        return losses.value_loss(values, before, returns, algo.value_clip, algo.huber_delta)

    frozen = settings.has_frozen_critic
    return CriticSpec(
        graphdef,
        algorithm.level,
        loss,
        agents,
        frozen,
        settings.lora.alpha / settings.lora.rank,
        with_logprobs=frozen and settings.reference == "base",
    )
