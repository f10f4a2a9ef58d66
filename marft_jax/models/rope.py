"""Rotary position embeddings: tables of angles, rotation, and the settings of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from marft_jax.errors import BadInput
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
    """Divides slow frequencies by the factor, keeps fast ones and blends those between."""
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


def rope_settings(
    config: Mapping[str, Any], source: str
) -> tuple[float, RopeScaling | None, float | None]:
    """Reads theta and scaling of full layers, and theta of layers that slide where it differs.

    Raises:
        BadInput: settings that contradict each other, or that the decoder does not have.
    """
    rope = _full_rope(config, source)
    local = _local_theta(config, source)
    return float(rope.get("rope_theta", 1e4)), _rope_scaling(rope, config, source), local


def _full_rope(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Joins ``rope_parameters``, as transformers 5 writes it, and ``rope_scaling`` of version 4."""
    theta = {"rope_theta": config["rope_theta"]} if config.get("rope_theta") else {}
    partial = config.get("partial_rotary_factor", 1.0)
    new, old = (_own_rope(config.get(key) or {}) for key in ("rope_parameters", "rope_scaling"))
    if differing := sorted(key for key in new.keys() & old.keys() if new[key] != old[key]):
        got = ", ".join(f"{key} {new[key]!r:.40} and {old[key]!r:.40}" for key in differing)
        raise BadInput(
            f"{source}: expected the same in rope_parameters and rope_scaling, got {got}; remove "
            "the one that is wrong"
        )
    return {"partial_rotary_factor": partial, **theta, **old, **new}


def _own_rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    settings = settings.get("full_attention", settings)
    kind = settings.get("rope_type", settings.get("type"))
    return {**settings} if kind is None else {**settings, "rope_type": kind}


def _local_theta(config: Mapping[str, Any], source: str) -> float | None:
    own = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    if (kind := own.get("rope_type", "default")) != "default":
        raise BadInput(
            f"{source}: rotary embedding of type {kind!r} in layers that slide is not supported; "
            "supported: default"
        )
    theta = own.get("rope_theta", config.get("rope_local_base_freq"))
    return None if theta is None else float(theta)


def _rope_scaling(
    rope: Mapping[str, Any], config: Mapping[str, Any], source: str
) -> RopeScaling | None:
    kind = rope.get("rope_type", "default")
    if rope["partial_rotary_factor"] != 1 or kind not in ("default", "linear", "llama3"):
        shown = f"type {kind!r}, partial_rotary_factor {rope['partial_rotary_factor']}"
        raise BadInput(
            f"{source}: rotary embedding of {shown} is not supported; "
            "supported: types default, linear, llama3 over whole heads"
        )
    if kind == "default":
        return None
    try:
        factor = float(rope["factor"])
        if kind == "linear":
            return RopeScaling("linear", factor)
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        original = rope.get("original_max_position_embeddings")
        original = int(original or config["max_position_embeddings"])
        return RopeScaling("llama3", factor, low, high, original)
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{source}: rope scaling {kind!r} lacks a usable {error}") from error
