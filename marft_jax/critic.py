"""The shared critic: a value head over features of the frozen base (CTDE).

The trunk is the base without any adapter, so the features of a batch are computed once and serve
every epoch. The head is a bias-free MLP with ReLU, in float32, as in the first MARFT release.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

Critic = list[jax.Array]


def init(key: jax.Array, d_model: int, hidden: Sequence[int]) -> Critic:
    """He-normal hidden layers and a small last one, so that first values are near zero."""
    widths = [d_model, *hidden, 1]
    critic = []
    for i, (d_in, d_out) in enumerate(itertools.pairwise(widths)):
        scale = (2 / d_in) ** 0.5 if i < len(hidden) else 0.1 * d_in**-0.5
        critic.append(scale * jax.random.normal(jax.random.fold_in(key, i), (d_in, d_out)))
    return critic


def values(critic: Critic, features):
    """``[..., D] -> float32 [...]``."""
    x = features.astype(jnp.float32)
    for kernel in critic[:-1]:
        x = jax.nn.relu(x @ kernel)
    return (x @ critic[-1])[..., 0]
