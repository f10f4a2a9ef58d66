"""A decoder's configuration out of the metadata and the tensors of a GGUF file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from marft_jax.errors import BadInput
from marft_jax.extras.gguf.tensors import GGUF, ROPE_FREQS, shape_of, unpack
from marft_jax.formats.foreign import readable
from marft_jax.models import config_json, families
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.models.rope import RopeScaling, rope_scaling

_NAMES = (
    "llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "gemma4", "smollm3", "granite",
    "olmo2", "lfm2", "gpt-oss", "qwen35", "qwen35moe",
)  # fmt: skip
ARCHITECTURES = {
    name: families.FAMILIES[str(config_json.class_of(f"{name.replace('-', '')}_text"))]
    for name in _NAMES
}
_KEYS = {
    "sliding_window_pattern": "attention.sliding_window_pattern",
    **dict.fromkeys(("num_experts", "num_local_experts"), "expert_count"),
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "conv_L_cache": "shortconv.l_cache",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "full_attention_interval": "full_attention_interval",
    "top_k_experts": "expert_used_count",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    **{key: key for key in families.SOFT_CAPS},
}
"""Names in config.json and in GGUF of settings that only some families have."""
_YARN = {
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
_NO_YARN = [
    f"rope.scaling.{name}"
    for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier")
]


def read_config(file: GGUF) -> DecoderConfig:
    """Reads the decoder that the file's metadata and tensors describe.

    Raises:
        BadInput: an architecture or a setting that the decoder does not have, by name.
    """
    with readable(file.path, "GGUF file"):
        return _read_config(file)


def _read_config(file: GGUF) -> DecoderConfig:
    arch, source, tensors = file.architecture, str(file.path), file.tensors
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise BadInput(f"{source}: GGUF architecture {arch!r} is not supported; supported: {known}")
    if "token_embd.weight" not in tensors:
        raise BadInput(f"{source}: tensor 'token_embd.weight' is missing")
    family = ARCHITECTURES[arch]
    sizes = config_json.read_sizes(functools.partial(_size, file), "gguf", source)
    config = _settings(file, family, sizes)
    _refuse_unsupported(file, family, config, sizes["head_dim"])
    theta = float(file.get("rope.freq_base", family.defaults.get("rope_theta", 1e4)))
    local = file.get("rope.freq_base_swa", family.defaults.get("rope_local_base_freq"))
    rotated = file.get("rope.dimension_count", sizes["head_dim"])
    settings = sizes | {
        "norm_eps": float(file.get("attention.layer_norm_rms_epsilon", 1e-5)),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, family, sizes["head_dim"], theta),
        "rotary_channels": 0 if rotated == sizes["head_dim"] else rotated,
        "local_rope_theta": local,
        "query_pre_attn_scalar": config.get("query_pre_attn_scalar"),
        "tie_embeddings": "output.weight" not in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        "o_bias": "blk.0.attn_output.bias" in tensors,
        **config_json.windows(family, config, sizes, local, source),
    }
    return config_json.built(family, source, **settings | family.more(config, source))


def _size(file: GGUF, key: str) -> Any:
    """A size, of the first layer that has it where there is one for each layer."""
    if key == "vocab_size":
        return shape_of(file.tensors["token_embd.weight"])[0]
    if key == "block_count" and (more := file.get("nextn_predict_layers")):
        return file.get(key) - more  # the last ones predict later tokens; nothing reads them
    value = file.get(key)
    if value is None and key == "feed_forward_length":
        value = file.get("expert_feed_forward_length")
    return next(filter(None, value), 0) if isinstance(value, list) else value


def _settings(file: GGUF, family: families.Family, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """What the file says in the spelling of config.json, for the family to read."""
    known = ((hf, file.get(key)) for hf, key in _KEYS.items())
    settings = {hf: value for hf, value in known if value is not None}
    settings["sliding_window"] = file.get("attention.sliding_window", 0)
    if isinstance(pattern := settings.get("sliding_window_pattern"), list):
        kinds = {True: "sliding_attention", False: "full_attention"}
        settings["layer_types"] = [kinds[bool(slides)] for slides in pattern]
    named = {hf: sizes[ours] for ours, hf in config_json.SIZES.items()}
    more = _MORE[file.architecture](file, sizes) if file.architecture in _MORE else {}
    return family.usual({**family.defaults, **named, **settings, **more})


def _gemma(file: GGUF, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Only the 27B of Gemma 2 and 3 does not divide scores by √head_dim; no field says so."""
    other = sizes["n_layers"] == {"gemma2": 46, "gemma3": 62}[file.architecture]
    root = sizes["d_model"] // sizes["n_heads"] if other else sizes["head_dim"]
    return {"query_pre_attn_scalar": root}


def _lfm2(file: GGUF, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Layers without key-value heads are convolutions."""
    heads = file.get("attention.head_count_kv")
    kinds = ["full_attention" if n else "conv" for n in heads]
    return {"layer_types": kinds, "block_auto_adjust_ff_dim": False}


def _qwen3_5(file: GGUF, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {"linear_value_head_dim": file.get("ssm.inner_size") // file.get("ssm.time_step_rank")}


def _gemma4(file: GGUF, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Heads of layers that slide and of the others; widths are lists where late layers' double."""
    first = file.get("attention.sliding_window_pattern").index(False)
    heads, widths = file.get("attention.head_count_kv"), file.get("feed_forward_length")
    return {
        "head_dim": file.get("attention.key_length_swa"),
        "global_head_dim": sizes["head_dim"],
        "num_global_key_value_heads": heads[first] if isinstance(heads, list) else None,
        "attention_k_eq_v": f"blk.{first}.attn_v.weight" not in file.tensors,
        "use_double_wide_mlp": isinstance(widths, list) and max(widths) > min(widths),
        "enable_moe_block": bool(file.get("expert_count")),
        "vocab_size_per_layer_input": sizes["vocab_size"],
    }


_MORE: dict[str, Callable[[GGUF, Mapping[str, int]], dict[str, Any]]] = {
    "qwen3moe": lambda file, sizes: {"norm_topk_prob": True},  # as llama.cpp
    "gemma2": _gemma,
    "gemma3": _gemma,
    "gemma4": _gemma4,
    "granite": lambda file, sizes: {
        "attention_multiplier": file.get("attention.scale", sizes["head_dim"] ** -0.5)
    },
    "lfm2": _lfm2,
    "qwen35": _qwen3_5,
    "qwen35moe": _qwen3_5,
}
"""Settings of config.json that follow from several keys, or from none."""


def _refuse_unsupported(
    file: GGUF, family: families.Family, config: Mapping[str, Any], head_dim: int
) -> None:
    window, get = file.get("attention.sliding_window"), file.get
    slides = family.slides and config.get("use_sliding_window", True)
    narrow = window and not slides and window < get("context_length", 0)
    scaling, sliding = get("rope.scaling.type", "none"), get("attention.key_length_swa")
    widths = {"attention.value_length_swa": sliding, "rope.dimension_count_swa": sliding}
    widths["attention.value_length"] = head_dim
    if "partial_rotary_factor" not in family.defaults:
        widths["rope.dimension_count"] = head_dim
    experts = family.build is families.dense and get("expert_count", 0)
    other = scaling not in ("none", "linear", "yarn")
    refused = {
        "expert_count": (experts, "0 (no mixture of experts)"),
        "attention.sliding_window": (narrow, "none, or at least the context length"),
        **{key: (get(key, width) != width, width) for key, width in widths.items()},
        "rope.scaling.type": (other, "none, linear, yarn, or Llama 3's rope_freqs tensor"),
        **{key: (get(key), "none") for key in _NO_YARN},
        **{key: (key not in family.defaults and get(key), "none") for key in families.SOFT_CAPS},
    }
    cases = {f"{file.architecture}.{key}": case for key, case in refused.items()}
    config_json.refuse(file.architecture, cases, file.metadata.get, str(file.path))


def _rope_scaling(
    file: GGUF, family: families.Family, head_dim: int, theta: float
) -> RopeScaling | None:
    """Reads linear scaling and YaRN from metadata, Llama 3's and Gemma 4's from divisors."""
    factor = float(file.get("rope.scaling.factor", file.get("rope.scale_linear", 1.0)))
    kind = file.get("rope.scaling.type", "linear")
    kind = "none" if kind == "linear" and factor in (0.0, 1.0) else kind
    if ROPE_FREQS in file.tensors:
        if kind != "none":
            both = f"tensor {ROPE_FREQS!r} beside rope.scaling.factor {factor:g}"
            raise BadInput(f"{file.path}: {both} is not supported; supported: one of them")
        divisors = unpack(file, ROPE_FREQS).astype(np.float64)
        return _scaling_by_divisors(divisors, head_dim // 2, theta, file.path)
    if kind == "none":
        return None
    yarn = {hf: file.get(key) for hf, key in _YARN.items()}
    usual = family.defaults.get("rope_parameters", {})
    return rope_scaling({**usual, "rope_type": kind, "factor": factor, **yarn}, {}, str(file.path))


def _scaling_by_divisors(
    divisors: np.ndarray, half: int, theta: float, path: Path
) -> RopeScaling | None:
    """Finds the settings of these divisors: of Llama 3 they are 1 for fast frequencies and
    ``factor`` for slow ones; of Gemma 4 they are 1, or 1e30 for channels that are not rotated."""
    if divisors.shape != (half,):
        raise BadInput(f"{path}: tensor {ROPE_FREQS!r}: expected ({half},), got {divisors.shape}")
    if np.allclose(divisors, 1.0):
        return None
    rotated = int(np.sum(divisors == 1))
    if np.array_equal(divisors > 1e20, np.arange(half) >= rotated):
        return RopeScaling("proportional", 1.0, share=rotated / half)
    inverse = theta ** (-np.arange(half) / half)
    for original in (8192, *(2**n for n in range(4, 21))):
        scaling = RopeScaling("llama3", float(divisors.max()), 1.0, 4.0, original)
        turns = original * inverse / (2 * np.pi)
        keep = np.clip((turns - 1.0) / 3.0, 0.0, 1.0)
        if np.allclose(1 / (keep + (1 - keep) / scaling.factor), divisors, rtol=1e-4):
            return scaling
    raise BadInput(f"{path}: tensor {ROPE_FREQS!r} does not follow Llama 3's formula; unsupported")
