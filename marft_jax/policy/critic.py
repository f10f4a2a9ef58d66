"""Critic: value heads over features of the frozen base (CTDE), one more reader of packed data.

    shared   one head; features of the base without any adapter
    heads    one head per label over the same features
    lora     one head; features of the base with an adapter per label, which learns with it

A label is that of the data: an agent, in a team. Without adapters the features of a batch are
computed once, for all epochs. A head is an MLP with ReLU and without bias, in float32, as in the
first MARFT release.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marft_jax.models import lora
from marft_jax.models.decoder import Base
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.policy import logprobs
from marft_jax.policy.logprobs import Graph
from marft_jax.policy.rows import Rows
from marft_jax.types import Level

ValueLoss = Callable[[jax.Array, Mapping[str, jax.Array]], jax.Array]
"""(values of units, numbers of units by name) to one loss for each unit. The names are those that
the data carry."""


class Critic(NamedTuple):
    """Parameters of the critic, or a pytree for each of its two parts."""

    # kernels ``[M, in, out]`` of M heads; M is 1, the number of labels, or the list empty
    head: Any
    adapters: Any  # one per label in mode ``lora``, else empty


class CriticSpec(NamedTuple):
    """Constants of the critic's passes through a base.

    Attributes:
        level: what a unit is.
        loss: of each unit.
        labels: number of labels.
        frozen: it reads the base without adapters.
        scale: alpha/rank of its adapters.
        with_logprobs: the pass through the frozen base also gives log-probs.
    """

    graphdef: Graph
    level: Level
    loss: ValueLoss
    labels: int
    frozen: bool
    scale: float
    with_logprobs: bool = False


class CriticRead(NamedTuple):
    """Results of a critic's pass through a microbatch.

    Attributes:
        values_BX: of each unit.
        features_BXD: input of a critic without adapters, for every epoch; else None.
        logprobs_BA: of learned tokens under the frozen base, where they are asked for.
    """

    values_BX: jax.Array
    features_BXD: jax.Array | None = None
    logprobs_BA: jax.Array | None = None


def init(
    key: jax.Array,
    config: DecoderConfig,
    *,
    mode: str,
    hidden: Sequence[int],
    labels: int,
    rank: int,
    targets: Sequence[str],
) -> Critic:
    """Draws He-normal hidden layers and a small last layer, so that first values are near zero.

    Args:
        mode: ``shared``, ``heads``, ``lora``, or ``none`` for an empty critic.
        hidden: widths of the hidden layers.
        rank, targets: of the adapters in mode ``lora``.
    """
    if mode == "none":
        return Critic([], {})
    widths = [config.d_model, *hidden, 1]
    members = labels if mode == "heads" else 1
    head = []
    for i, (d_in, d_out) in enumerate(itertools.pairwise(widths)):
        scale = (2 / d_in) ** 0.5 if i < len(hidden) else 0.1 * d_in**-0.5
        drawn = jax.random.normal(jax.random.fold_in(key, i), (members, d_in, d_out))
        head.append(scale * drawn)
    if mode != "lora":
        return Critic(head, {})
    drawing = jax.random.fold_in(key, len(widths))
    adapters = lora.init(drawing, config, adapters=range(labels), rank=rank, targets=targets)
    return Critic(head, adapters)


def read(spec: CriticSpec, *, base: Base, critic: Critic, r: Rows[jax.Array]) -> CriticRead:
    """Computes values, and log-probs of the base, from one pass through it."""
    if not spec.frozen:
        return CriticRead(values(spec, base, critic, r, None))
    index_BX = logprobs.decision_index(r, spec.level)
    with jax.named_scope("frozen_base"):
        wanted = [index_BX, *[r.actions.index_BA] * spec.with_logprobs]
        hidden = logprobs.hidden_states(spec.graphdef, base, r, jnp.concatenate(wanted, axis=1))
        features_BXD, hidden_BAD = jnp.split(hidden, [index_BX.shape[1]], axis=1)
        logprobs_BA = None
        if spec.with_logprobs:
            logprobs_BA, _ = logprobs.score_actions(spec.graphdef, base, hidden_BAD, r)
    return CriticRead(values(spec, base, critic, r, features_BXD), features_BXD, logprobs_BA)


def values(
    spec: CriticSpec,
    base: Base,
    critic: Critic,
    r: Rows[jax.Array],
    features_BXD: jax.Array | None,
) -> jax.Array:
    """V of each unit; without given features, from the features of the critic's adapters."""
    with jax.named_scope("critic"):
        if features_BXD is None:
            index_BX = logprobs.decision_index(r, spec.level)
            through = critic.adapters, r.tokens.agents_BT, spec.scale
            features_BXD = logprobs.hidden_states(spec.graphdef, base, r, index_BX, *through)
        return of_heads(critic.head, features_BXD, logprobs.decision_labels(r, spec.level)[1])


def of_heads(head: list[jax.Array], features: jax.Array, labels: jax.Array) -> jax.Array:
    """Computes V of each unit with the head of its label.

    Args:
        features: ``[..., D]``.
        labels: ``int32 [...]``.

    Returns:
        ``float32 [...]``.
    """

    def value(kernels: list[jax.Array]) -> jax.Array:
        x = features.astype(jnp.float32)
        for kernel in kernels[:-1]:
            x = jax.nn.relu(x @ kernel)
        return (x @ kernels[-1])[..., 0]

    by_head = jax.vmap(value)(head)
    if by_head.shape[0] == 1:
        return by_head[0]
    return jnp.take_along_axis(by_head, labels[None], axis=0)[0]


def units_of_parts(critic: Critic, units_P: jax.Array) -> Critic:
    """Counts the units of each head and each adapter, given the units of each label."""
    shared = bool(critic.head) and critic.head[0].shape[0] == 1
    return Critic(units_P.sum(keepdims=True) if shared else units_P, units_P)
