"""Writes a base, with or without a merged adapter, as a folder for Hugging Face transformers.

For any base (a directory, a GGUF file, ``tiny``) the folder holds sharded safetensors,
config.json, generation_config.json and the tokenizer: transformers, vLLM and ``--model.base`` load
it. ``W + A B * alpha / rank`` is computed in float32 and rounded once, to the type of the base.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import numpy as np
from safetensors.numpy import save_file

from marft_jax.interop.peft import Factors, sees_images
from marft_jax.models.config_json import sizes_of, text_settings
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.models.lora import UNEMBED, matrix_of
from marft_jax.models.parts.attention import AttentionConfig
from marft_jax.models.parts.dense import DenseConfig
from marft_jax.models.rope import NO_ROTATION
from marft_jax.models.tokenizers.tokenizer import Tokenizer, read_json
from marft_jax.models.weights.layout import layouts
from marft_jax.models.weights.load import BaseModel, reader, shapes_of
from marft_jax.models.weights.sources import directory_of

SHARD_BYTES = 4 << 30
_TOKENIZER_FILES = (
    "tokenizer tokenizer_config special_tokens_map added_tokens vocab merges chat_template tekken"
).split()


def write_model(
    folder: Path,
    base: BaseModel,
    factors: Factors,
    scale: float,
    sampling: Mapping[str, Any],
    shard_bytes: int = SHARD_BYTES,
    report: Callable[[], None] = lambda: None,
) -> None:
    """Writes the model, its settings and its tokenizer; the weights in shards, with an index.

    Args:
        factors: the adapter to merge; empty for the bare base.
        scale: alpha / rank.
        sampling: settings for generation_config.json, beside the end-of-turn tokens.
        shard_bytes: largest size of a weight file.
        report: is called after each tensor.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = directory_of(base.source)
    tokens = _token_ids(base.tokenizer)
    dtype = jax.tree.leaves(base.params)[0].dtype.name
    settings = read_json(source / "config.json") if source else {}
    if "text_config" in settings:  # of text and images: the text alone is written
        settings = text_settings(settings)
    settings = settings or config_json(base.config)
    settings |= {"dtype": dtype, "tie_word_embeddings": base.config.tie_embeddings, **tokens}
    settings.pop("quantization_config", None)  # what is written is unpacked
    settings.pop("_name_or_path", None)  # where somebody once had it
    _write_json(folder / "config.json", _with_older_keys(settings))
    generation = read_json(source / "generation_config.json") if source else {}
    _write_json(folder / "generation_config.json", generation | tokens | dict(sampling))
    save_tokenizer(base.tokenizer, folder, source)
    shapes, width = shapes_of(base.params), jax.tree.leaves(base.params)[0].dtype.itemsize
    stored = layouts(base.config, shapes)
    plan = huggingface_hub.split_state_dict_into_shards_factory(
        {name: layout.shape(shapes) for name, layout in stored.items()},
        get_storage_size=lambda shape: math.prod(shape) * width,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    tensor = reader(base.params)
    places = {
        name: {layer: i for i, layer in enumerate(base.config.layers_with(name))}
        for name in factors
    }
    for file, names in plan.filename_to_tensors.items():
        tensors = {}
        for name in names:
            paths = stored[name].paths
            parts = [merge(path, tensor(path), factors, places, scale) for path in paths]
            tensors[name] = stored[name].join(parts)
            report()
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        _write_json(folder / "model.safetensors.index.json", index)


def _with_older_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Adds settings where transformers 4, vLLM and llama.cpp read them, which would otherwise take
    their defaults without a word."""
    rope = settings.get("rope_parameters") or {}
    full, local = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    older = {"rope_theta": full.get("rope_theta"), "rope_local_base_freq": local.get("rope_theta")}
    if full is rope:
        older["partial_rotary_factor"] = full.get("partial_rotary_factor")
        if full.get("rope_type") in ("linear", "llama3", "yarn"):
            older["rope_scaling"] = {key: x for key, x in full.items() if key not in older}
    is_qwen3 = str(settings.get("model_type")).startswith("qwen3")
    if "num_experts_per_tok" in settings and is_qwen3:
        older["num_experts"] = settings.get("num_local_experts")
    older = {key: x for key, x in older.items() if x is not None}
    return {**older, **settings, "torch_dtype": settings["dtype"]}


def merge(
    path: str,
    array: jax.Array,
    factors: Factors,
    places: Mapping[str, Mapping[int, int]],
    scale: float,
) -> np.ndarray:
    """Returns a tensor of the base as Hugging Face stores it, with the adapter added.

    Args:
        places: for each stack of adapted matrices, the place of each layer in it.
    """
    weight = np.asarray(jax.device_get(array))
    modules = path.split("/")  # layers/3/mixer/q/kernel, layers/3/mlp/experts_down/7/0/kernel
    _, layer, _, matrix, *index, _ = modules if len(modules) > 4 else [""] * 5
    if modules[0] == "lm_head":
        layer, matrix = "0", UNEMBED
    adapted = (x for x in places if matrix_of(x) == matrix and int(layer) in places[x])
    if modules[-1] == "kernel" and (name := next(adapted, None)):
        expert, piece = map(int, index) if index else (None, 0)
        a, b = (factors[name][letter][places[name][int(layer)]] for letter in ("a", "b"))
        a, b = (a, b) if expert is None else (a[expert], b[expert])
        rows = slice(piece * len(weight), (piece + 1) * len(weight))
        correction = (a @ b[:, rows]).T * np.float32(scale)
        weight = (weight.astype(np.float32) + correction).astype(weight.dtype)
    return np.ascontiguousarray(weight)


def loader_of(source: str) -> str:
    """Names the class of transformers that loads a base."""
    return "AutoModelForImageTextToText" if sees_images(source) else "AutoModelForCausalLM"


def config_json(config: DecoderConfig) -> dict[str, Any]:
    """Makes config.json for a base that has none: the inverse of ``config_json.read_config``."""
    [mixer, *_] = sorted(config.attentions, key=lambda m: (m.rope_scaling == NO_ROTATION, m.window))
    [mlp, *_] = [layer.mlp for layer in config.layers if isinstance(layer.mlp, DenseConfig)]
    name = next(name for name, fits in _NAMES.items() if fits(config, mixer))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": mixer.rope_theta}
    if scaling := mixer.rope_scaling:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope["low_freq_factor"] = scaling.low_freq_factor
            rope["high_freq_factor"] = scaling.high_freq_factor
            rope["original_max_position_embeddings"] = scaling.original_max_position
    [narrow, *_] = [m for m in config.attentions if m.window] or [mixer]
    if narrow.rope_theta != mixer.rope_theta:
        local = {"rope_type": "default", "rope_theta": narrow.rope_theta}
        rope = {"full_attention": rope, "sliding_attention": local}
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": "gemma3_text" if name == "Gemma3" else name.lower(),
        **sizes_of(config),
        **(_windows(config, name) if config.window else {}),
        **(_MORE[name](config, mixer) if name in _MORE else {}),
        "hidden_activation" if name.startswith("Gemma") else "hidden_act": mlp.activation,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "attention_bias": mixer.qkv_bias,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_embeddings,
    }


_NAMES: dict[str, Callable[[DecoderConfig, AttentionConfig], Any]] = {
    "Gemma2": lambda config, mixer: mixer.cap,
    "Gemma3": lambda config, mixer: config.pre_norms and config.post_norms,
    "Olmo2": lambda config, mixer: config.post_norms,
    "SmolLM3": lambda config, mixer: any(m.rope_scaling == NO_ROTATION for m in config.attentions),
    "Granite": lambda config, mixer: config.residual_multiplier != 1,
    "Qwen3": lambda config, mixer: mixer.qk_norm,
    "Qwen2": lambda config, mixer: mixer.qkv_bias and not mixer.o_bias,
    "Mistral": lambda config, mixer: config.window,
    "Llama": lambda config, mixer: True,
}
"""Families of GGUF files; a model is of the first that fits."""


def _gemma(config: DecoderConfig, mixer: AttentionConfig) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": mixer.cap, "final_logit_softcapping": config.logits_cap}
    divisor = mixer.query_pre_attn_scalar or mixer.head_dim
    return {"query_pre_attn_scalar": divisor, **(caps if mixer.cap else {})}


def _smollm3(config: DecoderConfig, mixer: AttentionConfig) -> dict[str, Any]:
    return {"no_rope_layers": [int(m.rope_scaling != NO_ROTATION) for m in config.attentions]}


def _granite(config: DecoderConfig, mixer: AttentionConfig) -> dict[str, Any]:
    return {
        "attention_multiplier": (mixer.query_pre_attn_scalar or mixer.head_dim) ** -0.5,
        "embedding_multiplier": config.embedding_multiplier,
        "residual_multiplier": config.residual_multiplier,
        "logits_scaling": config.logits_divisor,
    }


_MORE = {"Gemma2": _gemma, "Gemma3": _gemma, "SmolLM3": _smollm3, "Granite": _granite}


def _windows(config: DecoderConfig, name: str) -> dict[str, Any]:
    """Returns the settings of sliding layers."""
    kinds = {True: "sliding_attention", False: "full_attention"}
    settings: dict[str, Any] = {"sliding_window": config.window}
    if name != "Mistral":  # all of its layers do
        settings["layer_types"] = [kinds[slides] for slides in config.sliding]
    if name.startswith("Qwen"):
        settings["use_sliding_window"] = True
    return settings


def save_tokenizer(tokenizer: Tokenizer, folder: Path, source: Path | None) -> None:
    """Copies the tokenizer's files of the base; if the base has none, transformers writes them."""
    if source is None:
        return tokenizer.save(folder)
    for file in source.iterdir():
        if file.is_file() and file.stem in _TOKENIZER_FILES:
            shutil.copyfile(file, folder / file.name)


def _token_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    ends = list(tokenizer.eos_ids)
    return {"eos_token_id": ends if len(ends) > 1 else ends[0], "pad_token_id": tokenizer.pad_id}


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
