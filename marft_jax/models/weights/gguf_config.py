"""A decoder's configuration out of the metadata and the tensors of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from marft_jax.errors import BadInput
from marft_jax.formats.foreign import readable
from marft_jax.models import config_json, families
from marft_jax.models.decoder import DecoderConfig
from marft_jax.models.parts.short_conv import ShortConvConfig
from marft_jax.models.rope import RopeScaling
from marft_jax.models.weights.gguf import GGUF, ROPE_FREQS, shape_of, unpack

ARCHITECTURES = {
    "llama": families.FAMILIES["LlamaForCausalLM"],
    "qwen2": families.FAMILIES["Qwen2ForCausalLM"],
    "qwen3": families.FAMILIES["Qwen3ForCausalLM"],
    "qwen3moe": families.FAMILIES["Qwen3MoeForCausalLM"],
    "gemma2": families.FAMILIES["Gemma2ForCausalLM"],
    "gemma3": families.FAMILIES["Gemma3ForCausalLM"],
    "smollm3": families.FAMILIES["SmolLM3ForCausalLM"],
    "granite": families.FAMILIES["GraniteForCausalLM"],
    "olmo2": families.FAMILIES["Olmo2ForCausalLM"],
    "lfm2": families.FAMILIES["Lfm2ForCausalLM"],
}
_WINDOWED = {"gemma2": 2, "gemma3": 6}  # whose window llama.cpp reads, and which layer is full

_Get = Callable[..., Any]


def read_config(file: GGUF) -> DecoderConfig:
    """Reads the decoder that the file's metadata and tensors describe.

    Raises:
        BadInput: an architecture or a setting that the decoder does not have, by name.
    """
    with readable(file.path, "GGUF file"):
        return _read_config(file)


def _read_config(file: GGUF) -> DecoderConfig:
    arch, source, tensors = file.metadata.get("general.architecture"), str(file.path), file.tensors
    if arch not in ARCHITECTURES:
        raise BadInput(
            f"{source}: GGUF architecture {arch!r} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    if (embedding := tensors.get("token_embd.weight")) is None:
        raise BadInput(f"{source}: tensor 'token_embd.weight' is missing")

    def get(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{arch}.{key}", default)

    def size(key: str) -> Any:
        """A size, the largest where there is one for each layer."""
        value = shape_of(embedding)[0] if key == "vocab_size" else get(key)
        return max(value) if isinstance(value, list) else value

    family = ARCHITECTURES[arch]
    sizes = config_json.sizes(size, "gguf", source)
    _refuse_unsupported(arch, get, sizes["head_dim"], source)
    theta = float(get("rope.freq_base", family.defaults.get("rope_theta", 1e4)))
    local = get("rope.freq_base_swa", family.defaults.get("rope_local_base_freq"))
    # only the 27B of Gemma 2 and 3 does not divide scores by √head_dim; no field says so
    other_root = (arch, sizes["n_layers"]) in (("gemma2", 46), ("gemma3", 62))
    settings = sizes | {
        "norm_eps": float(get("attention.layer_norm_rms_epsilon", 1e-5)),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, get, sizes["head_dim"], theta),
        "local_rope_theta": local,
        "query_pre_attn_scalar": sizes["d_model"] // sizes["n_heads"] if other_root else None,
        "tie_embeddings": "output.weight" not in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        "o_bias": "blk.0.attn_output.bias" in tensors,
    }
    if arch in _WINDOWED:
        pattern = get("attention.sliding_window_pattern", _WINDOWED[arch])
        settings |= _windows(sizes, family, pattern, get, local, source)
    return config_json.built(family, source, **settings | _MORE.get(arch, _nothing)(get, sizes))


def _nothing(get: _Get, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {}


def _gemma2(get: _Get, sizes: Mapping[str, int]) -> dict[str, Any]:
    defaults = families.FAMILIES["Gemma2ForCausalLM"].defaults
    return {our: float(get(key, defaults[key])) for key, our in families.SOFT_CAPS.items()}


def _smollm3(get: _Get, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {"rotated": [(i + 1) % 4 != 0 for i in range(sizes["n_layers"])]}  # as llama.cpp


def _granite(get: _Get, sizes: Mapping[str, int]) -> dict[str, Any]:
    names = "attention.scale", "embedding_scale", "residual_scale", "logit_scale"
    by_default = sizes["head_dim"] ** -0.5, 1, 1, 1
    found = (get(name) or own for name, own in zip(names, by_default, strict=True))
    return families.multipliers(*map(float, found))


def _qwen3_experts(get: _Get, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "n_experts": get("expert_count"),
        "n_chosen": get("expert_used_count"),
        "d_expert": get("expert_feed_forward_length"),
        "normalised": True,  # as llama.cpp
        "is_dense": [False] * sizes["n_layers"],
    }


def _lfm2(get: _Get, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "mixer": ShortConvConfig(sizes["d_model"], int(get("shortconv.l_cache"))),
        "is_recurrent": [heads == 0 for heads in get("attention.head_count_kv")],
    }


_MORE = {
    "qwen3moe": _qwen3_experts,
    "gemma2": _gemma2,
    "smollm3": _smollm3,
    "granite": _granite,
    "lfm2": _lfm2,
}


def _windows(
    sizes: Mapping[str, int],
    family: families.Family,
    pattern: Any,
    get: _Get,
    local_theta: float | None,
    source: str,
) -> dict[str, Any]:
    """Reads the window; its pattern is a number or a list by layers."""
    settings = {
        "sliding_window": get("attention.sliding_window", 0),
        "sliding_window_pattern": pattern,
    }
    if isinstance(pattern, list):
        kinds = {True: "sliding_attention", False: "full_attention"}
        settings["layer_types"] = [kinds[bool(slides)] for slides in pattern]
    return config_json.windows(family, settings, sizes, local_theta, source)


def _refuse_unsupported(arch: str, get: _Get, head_dim: int, source: str) -> None:
    window = get("attention.sliding_window")
    narrow = window and arch not in _WINDOWED and window < get("context_length", 0)
    scaling = get("rope.scaling.type", "none")
    refused = {
        "expert_count": (
            ARCHITECTURES[arch].build is families.dense and get("expert_count", 0),
            "0 (no mixture of experts)",
        ),
        "attention.sliding_window": (narrow, "none, or at least the context length"),
        "attention.value_length": (get("attention.value_length", head_dim) != head_dim, head_dim),
        "rope.dimension_count": (get("rope.dimension_count", head_dim) != head_dim, head_dim),
        "rope.scaling.type": (
            scaling not in ("none", "linear"),
            "none, linear, or Llama 3's rope_freqs tensor",
        ),
        **{key: (arch != "gemma2" and get(key), "none") for key in families.SOFT_CAPS},
    }
    cases = {f"{arch}.{key}": case for key, case in refused.items()}
    config_json.refuse(arch, cases, lambda key: get(key.partition(".")[2]), source)


def _rope_scaling(file: GGUF, get: _Get, head_dim: int, theta: float) -> RopeScaling | None:
    """Reads linear scaling from metadata, Llama 3's from a tensor of divisors."""
    factor = float(get("rope.scaling.factor", get("rope.scale_linear", 1.0)))
    linear = get("rope.scaling.type", "linear") == "linear" and factor not in (0.0, 1.0)
    if ROPE_FREQS in file.tensors:
        if linear:
            both = f"tensor {ROPE_FREQS!r} beside rope.scaling.factor {factor:g}"
            raise BadInput(f"{file.path}: {both} is not supported; supported: one of them")
        divisors = unpack(file, ROPE_FREQS).astype(np.float64)
        return _llama3_scaling(divisors, head_dim // 2, theta, file.path)
    return RopeScaling("linear", factor) if linear else None


def _llama3_scaling(
    divisors: np.ndarray, half: int, theta: float, path: Path
) -> RopeScaling | None:
    """Finds the settings of these divisors: 1 for fast frequencies, ``factor`` for slow ones."""
    if divisors.shape != (half,):
        raise BadInput(f"{path}: tensor {ROPE_FREQS!r}: expected ({half},), got {divisors.shape}")
    if np.allclose(divisors, 1.0):
        return None
    inverse = theta ** (-np.arange(half) / half)
    for original in (8192, *(2**n for n in range(4, 21))):
        scaling = RopeScaling("llama3", float(divisors.max()), 1.0, 4.0, original)
        turns = original * inverse / (2 * np.pi)
        keep = np.clip((turns - 1.0) / 3.0, 0.0, 1.0)
        if np.allclose(1 / (keep + (1 - keep) / scaling.factor), divisors, rtol=1e-4):
            return scaling
    raise BadInput(f"{path}: tensor {ROPE_FREQS!r} does not follow Llama 3's formula; unsupported")
