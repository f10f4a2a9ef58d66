"""Rotary position embeddings: tables of angles, and queries and keys turned by them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from marft_jax.models.ops.remat import once


class RopeScaling(NamedTuple):
    """Rotary frequencies stretched for long contexts (Llama 3.1, section 3.4.2 of its report)."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


class Rope(NamedTuple):
    """Cosines and signed sines of the rotation, ``float32 [rows, 1, tokens, channels]``."""

    cos: Array
    sin: Array


def rope_tables(
    channels: int, theta: float, scaling: RopeScaling | None, positions_BT: Array
) -> Rope:
    """Rotary position embedding (Su et al. 2021), angle = position * theta^(-2i/C)."""
    inverse = theta ** (-np.arange(0, channels, 2, dtype=np.float64) / channels)
    if scaling is not None:
        inverse = _stretch(inverse, scaling)
    inverse = jnp.asarray(inverse, jnp.float32)[None, None, None, :]
    angles = positions_BT.astype(jnp.float32)[:, None, :, None] * inverse
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    both = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
    return Rope(*once(both))


def _stretch(inverse: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Slow frequencies are divided by the factor, fast ones kept, those between blended."""
    if scaling.kind == "linear":
        return inverse / scaling.factor
    turns = scaling.original_max_position * inverse / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return inverse * (keep + (1 - keep) / scaling.factor)


def rotate(x_BHTC: Array, rope: Rope, scale: float = 1.0) -> Array:
    """Rotates channel pairs (i, i + C/2), the Hugging Face layout; then multiplies by ``scale``."""
    x = x_BHTC.astype(jnp.float32)
    rotated = x * rope.cos + jnp.roll(x, x.shape[-1] // 2, axis=-1) * rope.sin
    rotated = rotated if scale == 1 else rotated * scale
    return rotated.astype(x_BHTC.dtype)
