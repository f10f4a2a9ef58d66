"""Critic: value heads over features of the frozen base (CTDE).

    shared   one head; features of the base without any adapter
    heads    one head per agent over the same features
    lora     one head; features of the base with an adapter per agent, which learns with it

Without adapters the features of a batch are computed once, for all epochs. A head is an MLP with
ReLU and without bias, in float32, as in the first MARFT release.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marft_jax.learning.settings import LearnerSettings
from marft_jax.models import lora
from marft_jax.models.decoder_config import DecoderConfig


class Critic(NamedTuple):
    """Parameters of the critic, or a pytree for each of its two parts."""

    # kernels ``[M, in, out]`` of M heads; M is 1, the number of agents, or the list empty
    head: Any
    adapters: Any  # one per agent in mode ``lora``, else empty


def init(
    key: jax.Array, settings: LearnerSettings, decoder_config: DecoderConfig, agents: int
) -> Critic:
    """Draws He-normal hidden layers and a small last layer, so that first values are near zero."""
    if settings.critic is None:
        return Critic([], {})
    mode, hidden = settings.critic.mode, settings.critic.hidden
    widths = [decoder_config.d_model, *hidden, 1]
    members = agents if mode == "heads" else 1
    head = []
    for i, (d_in, d_out) in enumerate(itertools.pairwise(widths)):
        scale = (2 / d_in) ** 0.5 if i < len(hidden) else 0.1 * d_in**-0.5
        drawn = jax.random.normal(jax.random.fold_in(key, i), (members, d_in, d_out))
        head.append(scale * drawn)
    adapters = {}
    if mode == "lora":
        adapters = lora.init(
            jax.random.fold_in(key, len(widths)),
            decoder_config,
            adapters=range(agents),
            rank=settings.lora.rank,
            targets=settings.lora.targets,
        )
    return Critic(head, adapters)


def values(head: list[jax.Array], features: jax.Array, agents: jax.Array) -> jax.Array:
    """Computes V of each decision with its agent's head.

    Args:
        features: ``[..., D]``.
        agents: ``int32 [...]``, who acted.

    Returns:
        ``float32 [...]``.
    """

    def one(kernels: list[jax.Array]) -> jax.Array:
        x = features.astype(jnp.float32)
        for kernel in kernels[:-1]:
            x = jax.nn.relu(x @ kernel)
        return (x @ kernels[-1])[..., 0]

    by_head = jax.vmap(one)(head)
    if by_head.shape[0] == 1:
        return by_head[0]
    return jnp.take_along_axis(by_head, agents[None], axis=0)[0]


def decisions(critic: Critic, decisions_P: jax.Array) -> Critic:
    """Counts the decisions of each head and each adapter, given the decisions of each agent."""
    shared = bool(critic.head) and critic.head[0].shape[0] == 1
    return Critic(decisions_P.sum(keepdims=True) if shared else decisions_P, decisions_P)
