"""Gemma 4: layers with two sizes of heads; late layers read keys and values of earlier layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marft_jax.errors import BadInput
from marft_jax.models.checked import check_heads, expert_sizes, positive
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.models.parts.dense import DenseConfig
from marft_jax.models.parts.dense_and_experts import DenseAndExpertsConfig
from marft_jax.models.parts.layer_output import LayerOutputConfig


def gemma4(
    *,
    d_model: int,
    layer_input: int,
    mixers: Sequence[Mapping[str, Any]],
    double_wide: bool,
    experts: Mapping[str, Any],
    build: Callable[..., DecoderConfig],
    **others: Any,
) -> DecoderConfig:
    """Decoder whose layers differ in their heads.

    Args:
        layer_input: see ``DecoderConfig``.
        mixers: for each layer, its fields of ``AttentionConfig`` that the others may not have.
        double_wide: layers that read earlier keys and values have an mlp of twice the width.
        experts: fields of ``DenseAndExpertsConfig``, but those of the dense mlp; empty for none.
        build: makes the decoder whose layers have the same heads, of ``others``.
    """
    config = build(d_model=d_model, layer_input=layer_input, **others)
    output, layers = LayerOutputConfig(d_model, layer_input), []
    for layer, fields in zip(config.layers, mixers, strict=True):
        assert isinstance(mlp := layer.mlp, DenseConfig)
        wide = double_wide and fields["source"] is not None
        sizes: dict[str, Any] = {**vars(mlp), "d_ff": mlp.d_ff * (1 + wide)}
        mlp = DenseAndExpertsConfig(**sizes, **experts) if experts else DenseConfig(**sizes)
        mixer: Any = dataclasses.replace(layer.mixer, **fields)  # pyright: ignore
        layers.append(layer._replace(mixer=mixer, mlp=mlp, output=output))
    return dataclasses.replace(config, layers=tuple(layers))


def _usual(config: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the types and the heads of layers, in the spelling of transformers 5.24."""
    n = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    kinds = kinds or ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(n)]
    kinds = [*kinds[:-1], "full_attention"]
    heads = {"head_dim": config["global_head_dim"]}
    if config["attention_k_eq_v"] and config["num_global_key_value_heads"]:
        heads["num_key_value_heads"] = config["num_global_key_value_heads"]
    of_layers = {str(i): heads for i, kind in enumerate(kinds) if kind == "full_attention"}
    full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    rope = config.get("rope_parameters") or {"full_attention": full}
    return {"per_layer_config": of_layers, **config, "layer_types": kinds, "rope_parameters": rope}


def _gemma4(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Reads the heads of each layer, the layer whose keys and values it shares, and the width of
    the inputs to layers."""
    kinds, width = config["layer_types"], config["hidden_size_per_layer_input"] or 0
    n, shared = len(kinds), config["num_kv_shared_layers"]
    kept = kinds[: n - shared]
    if not {*kinds[n - shared :]} <= {*kept}:
        raise BadInput(
            f"{source}: expected a layer of each kind before the {shared} of "
            f"'num_kv_shared_layers', got {', '.join(kept) or 'none'}"
        )
    tokens, all_tokens = config.get("vocab_size_per_layer_input"), config["vocab_size"]
    if width and tokens != all_tokens:
        raise BadInput(
            f"{source}: expected a vocab_size_per_layer_input of {all_tokens}, as vocab_size, got "
            f"{tokens}"
        )
    mixers = []
    for i, kind in enumerate(kinds):
        fields = _heads(config, i, source)
        fields["keys_as_values"] = bool(config["attention_k_eq_v"]) and kind == "full_attention"
        fields["source"] = len(kept) - 1 - kept[::-1].index(kind) if i >= len(kept) else None
        mixers.append(fields)
    names = "num_experts", "top_k_experts", "moe_intermediate_size"
    return {
        "mixers": mixers,
        "double_wide": bool(config["use_double_wide_mlp"]),
        "experts": expert_sizes(config, *names, source) if config["enable_moe_block"] else {},
        "layer_input": width and positive(width, "hidden_size_per_layer_input", 1 << 14, source),
        "logits_cap": float(config["final_logit_softcapping"] or 0),
    }


def _heads(config: Mapping[str, Any], layer: int, source: str) -> dict[str, Any]:
    of_layer = config["per_layer_config"].get(str(layer), {})
    if unknown := sorted(set(of_layer) - {"head_dim", "num_key_value_heads"}):
        raise BadInput(
            f"{source}: per_layer_config with {unknown[0]} is not supported; supported: head_dim, "
            "num_key_value_heads"
        )
    width, heads = (
        positive(of_layer.get(name, config.get(name)), name, 1 << 14, source)
        for name in ("head_dim", "num_key_value_heads")
    )
    check_heads(config["num_attention_heads"], heads, width, f"{source}: layer {layer}")
    return {"head_dim": width, "n_kv_heads": heads}


GEMMA4: dict[str, Any] = dict(
    defaults={
        "num_global_key_value_heads": None,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 1,
        "sliding_window": 512,
        "rope_local_base_freq": 1e4,
        "final_logit_softcapping": None,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "tie_word_embeddings": True,
    },
    slides=True,
    usual=_usual,
    more=_gemma4,
    traits={
        "activation": "gelu_pytorch_tanh",
        "post_norms": True,
        "norm_offset": 0.0,
        "scale_embeddings": True,
        "qk_norm": True,
        "v_norm": True,
        "files": "rows",
        "spelling": (
            ("mlp.experts.base_layer", "experts.base_layer"),
            ("mlp.experts", "experts"),
            ("mlp.experts.gate_up_proj", "experts.gate_up_proj"),
            ("mlp.experts.down_proj", "experts.down_proj"),
        ),
    },
)
"""Fields of the ``Family`` of Gemma 4, but for ``build``."""
