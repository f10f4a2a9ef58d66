"""Rotary position embeddings: tables of angles, rotation, and the settings of config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from marft_jax.errors import BadInput
from marft_jax.models.ops.remat import once


class RopeScaling(NamedTuple):
    """Rotary frequencies stretched for long contexts.

    ``llama3`` is section 3.4.2 of Llama 3.1's report, ``yarn`` is Peng et al. 2023, ``longrope`` is
    Ding et al. 2024. ``proportional`` rotates the first pairs of channels (Gemma 4). ``none`` turns
    rotation off.

    Attributes:
        low_freq_factor, high_freq_factor: turns within ``original_max_position`` below which a
            frequency is stretched, and above which it is kept (YaRN: beta_slow and beta_fast).
        magnitude: factor of rotated queries and keys.
        whole_channels: YaRN's blending begins and ends at whole channels.
        query_beta: β of the factor 1 + β ln(1 + ⌊position / original_max_position⌋) of queries.
        divisors: of each frequency (LongRoPE).
        share: of the pairs of channels that are rotated (proportional).
    """

    kind: Literal["linear", "llama3", "yarn", "longrope", "proportional", "none"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    magnitude: float = 1.0
    whole_channels: bool = True
    query_beta: float = 0.0
    divisors: tuple[float, ...] = ()
    share: float = 1.0


NO_ROTATION = RopeScaling("none", 1.0)


class Rope(NamedTuple):
    """Cosines and signed sines of the rotation, ``float32 [rows, 1, tokens, channels]``.

    ``query_scale [rows, 1, tokens, 1]`` multiplies queries; None for 1.
    """

    cos: Array
    sin: Array
    query_scale: Array | None = None


_SCALINGS = "linear", "llama3", "yarn", "longrope", "proportional"


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
    if scaling is not None and scaling.magnitude != 1:
        cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
    both = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
    if scaling is None or not scaling.query_beta:
        return Rope(*once(both))
    times = jnp.log1p(positions_BT // scaling.original_max_position) * scaling.query_beta
    return Rope(*once((*both, 1 + times[:, None, :, None])))


def _stretch(inverse: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Divides slow frequencies by the factor, keeps fast ones and blends those between."""
    if scaling.kind == "none":
        return 0 * inverse
    if scaling.kind == "linear":
        return inverse / scaling.factor
    if scaling.kind == "proportional":
        rotated = np.arange(len(inverse)) < int(scaling.share * len(inverse))
        return np.where(rotated, inverse / scaling.factor, 0)
    if scaling.kind == "longrope":
        return inverse / np.asarray(scaling.divisors)
    turns = scaling.original_max_position * inverse / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if scaling.kind == "llama3":
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    else:
        keep = _kept_by_yarn(turns, low, high, scaling.whole_channels)
    return inverse * (keep + (1 - keep) / scaling.factor)


def _kept_by_yarn(turns: np.ndarray, low: float, high: float, whole: bool) -> np.ndarray:
    """Shares of frequencies that are kept: a ramp over channels, from 1 at ``high`` turns to 0 at
    ``low``."""
    per_channel = np.log(turns[0] / turns[1])
    first, last = (np.log(turns[0] / n) / per_channel for n in (high, low))
    if whole:
        first, last = np.floor(first), np.ceil(last)
    first, last = max(first, 0.0), min(last, 2 * len(turns) - 1.0)
    return 1 - np.clip((np.arange(len(turns)) - first) / (last - first or 0.001), 0.0, 1.0)


def rotate(x_BHTC: Array, rope: Rope, scale: float | Array = 1.0) -> Array:
    """Rotates channel pairs (i, i + R/2) of the first R channels, the Hugging Face layout, where R
    is the width of the tables; then multiplies by ``scale``."""
    x, r = x_BHTC.astype(jnp.float32), rope.cos.shape[-1]
    turned, rest = (x, None) if r == x.shape[-1] else (x[..., :r], x[..., r:])
    rotated = turned * rope.cos + jnp.roll(turned, r // 2, axis=-1) * rope.sin
    rotated = rotated if rest is None else jnp.concatenate([rotated, rest], axis=-1)
    rotated = rotated if isinstance(scale, float) and scale == 1.0 else rotated * scale
    return rotated.astype(x_BHTC.dtype)


class RopeSettings(NamedTuple):
    """Rotary settings of config.json.

    Attributes:
        local_theta: theta of layers that slide, which then have no scaling; None where it is that
            of the others.
        share: of a head's channels that are rotated.
    """

    theta: float
    scaling: RopeScaling | None
    local_theta: float | None
    share: float


def rope_settings(config: Mapping[str, Any], source: str) -> RopeSettings:
    """Reads the rotary settings.

    Raises:
        BadInput: settings that contradict each other, or that the decoder does not have.
    """
    rope = _full_rope(config, source)
    local = _local_theta(config, source)
    share = float(rope["partial_rotary_factor"])
    if not 0 < share <= 1:
        raise BadInput(
            f"{source}: expected a partial_rotary_factor above 0 and up to 1, got {share:g}"
        )
    theta, scaling = float(rope.get("rope_theta", 1e4)), rope_scaling(rope, config, source)
    if scaling and scaling.kind == "proportional":
        share = 1.0  # the scaling has a share of its own
    return RopeSettings(theta, scaling, local, share)


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
    local = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    if (kind := local.get("rope_type", "default")) != "default":
        raise BadInput(
            f"{source}: rotary embedding of type {kind!r} in layers that slide is not supported; "
            "supported: default"
        )
    theta = local.get("rope_theta", config.get("rope_local_base_freq"))
    return None if theta is None else float(theta)


def rope_scaling(
    rope: Mapping[str, Any], config: Mapping[str, Any], source: str
) -> RopeScaling | None:
    """Reads the scaling.

    Args:
        rope: ``rope_parameters`` of config.json, with ``rope_type``.
        config: lengths of contexts that ``rope`` may leave out.

    Raises:
        BadInput: a type that the decoder does not have, or a setting that is missing.
    """
    kind = rope.get("rope_type", "default")
    kind = "longrope" if "short_factor" in rope else kind  # which Phi also calls su and yarn
    if kind == "default":
        return None
    if kind not in _SCALINGS:
        raise BadInput(
            f"{source}: rotary embedding of type {kind!r} is not supported; "
            f"supported: types default, {', '.join(_SCALINGS)}"
        )
    long = config.get("max_position_embeddings")
    original = config.get("original_max_position_embeddings")
    original = original or rope.get("original_max_position_embeddings") or long
    try:
        return _scaling(kind, rope, original, long)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise BadInput(f"{source}: rope scaling {kind!r} lacks a usable {error}") from error


def _scaling(kind: str, rope: Mapping[str, Any], original: Any, long: Any) -> RopeScaling:
    """Reads a scaling of this kind.

    Args:
        original, long: the longest contexts before and after stretching.
    """
    match kind:
        case "linear":
            return RopeScaling("linear", float(rope["factor"]))
        case "llama3":
            low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
            return RopeScaling("llama3", float(rope["factor"]), low, high, int(original))
        case "proportional":
            share = float(rope["partial_rotary_factor"])
            return RopeScaling("proportional", float(rope.get("factor") or 1), share=share)
        case "yarn":
            return _yarn(rope, int(original))
    # longrope: of positions up to ``original`` alone, which have divisors of their own
    factor, magnitude = float(rope.get("factor") or long / original), rope.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(max(factor, 1)) / math.log(original))
    return RopeScaling(
        "longrope",
        factor,
        original_max_position=int(original),
        magnitude=float(magnitude),
        divisors=tuple(float(x) for x in rope["short_factor"]),
    )


def _yarn(rope: Mapping[str, Any], original: int) -> RopeScaling:
    factor, magnitude = float(rope["factor"]), rope.get("attention_factor")

    def grown(by: float) -> float:
        return 1 + 0.1 * by * math.log(factor) if factor > 1 else 1.0

    if magnitude is None:
        scale, of_all = (float(rope.get(name) or 0) for name in ("mscale", "mscale_all_dim"))
        magnitude = grown(scale) / grown(of_all) if scale and of_all else grown(1)
    return RopeScaling(
        "yarn",
        factor,
        float(rope.get("beta_slow") or 1),
        float(rope.get("beta_fast") or 32),
        original,
        float(magnitude),
        bool(rope.get("truncate", True)),
        float(rope.get("llama_4_scaling_beta") or 0),
    )
