"""Model families: tables of parts, and how ``config.json`` spells what only some of them have."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from marft_jax.errors import BadInput
from marft_jax.models.checked import expert_sizes, positive
from marft_jax.models.decoder_config import DecoderConfig, LayerConfig
from marft_jax.models.gemma4 import GEMMA4, gemma4
from marft_jax.models.hybrids import LFM2, QWEN3_5, QWEN3_5_EXPERTS, qwen3_5
from marft_jax.models.ops.products import Activation
from marft_jax.models.parts.attention import AttentionConfig
from marft_jax.models.parts.delta_net import DeltaNetConfig
from marft_jax.models.parts.dense import DenseConfig
from marft_jax.models.parts.dense_and_experts import DenseAndExpertsConfig
from marft_jax.models.parts.experts import ExpertsConfig
from marft_jax.models.parts.layer_output import LayerOutputConfig
from marft_jax.models.parts.part import Mixer
from marft_jax.models.parts.shared_expert import SharedExpertConfig
from marft_jax.models.parts.short_conv import ShortConvConfig
from marft_jax.models.rope import NO_ROTATION

PARTS = (
    AttentionConfig,
    DenseConfig,
    ExpertsConfig,
    SharedExpertConfig,
    DenseAndExpertsConfig,
    ShortConvConfig,
    DeltaNetConfig,
    LayerOutputConfig,
)
"""Every part that a family may have."""


_ATTENTION = {field.name for field in dataclasses.fields(AttentionConfig)}


def dense(
    vocab_size: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    d_ff: int,
    max_position: int,
    *,
    window: int = 0,
    sliding: Sequence[bool] = (),
    local_rope_theta: float | None = None,
    rotated: Sequence[bool] = (),
    recurrent: Mapping[int, Mixer] = {},
    activation: Activation = "silu",
    scale_embeddings: bool = False,
    **others: Any,
) -> DecoderConfig:
    """Decoder whose layers are attention and a dense mlp.

    Args:
        window: positions that sliding layers read.
        sliding: for each layer, whether it slides; by default none does.
        local_rope_theta: rotary base of sliding layers, which then have no scaling.
        rotated: for each layer, whether it rotates queries and keys; by default all do.
        recurrent: mixers of the layers without attention, by the number of the layer.
        scale_embeddings: embeddings are multiplied by √d_model.
        others: further fields of ``AttentionConfig`` and of ``DecoderConfig``.
    """
    if scale_embeddings:
        others["embedding_multiplier"] = d_model**0.5
    settings = {name: others.pop(name) for name in _ATTENTION & set(others)}
    full = AttentionConfig(d_model, n_heads, n_kv_heads, head_dim, **settings)
    narrow = dataclasses.replace(full, window=window)
    if local_rope_theta is not None:
        narrow = dataclasses.replace(narrow, rope_theta=local_rope_theta, rope_scaling=None)
    mixers: list[Any] = [narrow if slides else full for slides in sliding or [False] * n_layers]
    for i, rotates in enumerate(rotated):
        if not rotates:
            mixers[i] = dataclasses.replace(mixers[i], rope_theta=1e4, rope_scaling=NO_ROTATION)
    mlp = DenseConfig(d_model, d_ff, activation)
    layers = tuple(LayerConfig(recurrent.get(i, x), mlp) for i, x in enumerate(mixers))
    return DecoderConfig(vocab_size, d_model, layers, max_position, **others)


def with_experts(
    d_model: int,
    n_layers: int,
    *,
    n_experts: int,
    n_chosen: int,
    d_expert: int,
    normalised: bool,
    is_dense: Sequence[bool],
    expert: Mapping[str, Any] = {},
    **others: Any,
) -> DecoderConfig:
    """Decoder whose layers are attention and a mixture of experts, or a dense mlp.

    Args:
        is_dense: for each layer, whether its mlp is dense.
        expert: further fields of ``ExpertsConfig``, or of ``SharedExpertConfig``.
        others: further arguments of ``dense``.
    """
    config = dense(d_model=d_model, n_layers=n_layers, **others)
    kind = SharedExpertConfig if "d_shared" in expert else ExpertsConfig
    mlp = kind(d_model, d_expert, n_experts, n_chosen, normalised, **expert)
    layers = tuple(
        layer if stays else layer._replace(mlp=mlp)
        for layer, stays in zip(config.layers, is_dense, strict=True)
    )
    return dataclasses.replace(config, layers=layers)


SOFT_CAPS = {"attn_logit_softcapping": "cap", "final_logit_softcapping": "logits_cap"}
"""Settings of Gemma 2 in config.json and in GGUF, and here."""


class Family(NamedTuple):
    """An architecture.

    Attributes:
        defaults: values of keys that its config.json may leave out.
        qkv_bias, o_bias: always, never, or as ``attention_bias`` says (None).
        slides: layers may read through a window.
        packed: ``quant_method`` of files that are unpacked while they are read.
        local_rope: layers that slide do not scale their rotary positions.
        recurrent: what ``layer_types`` calls layers without attention; empty for a family without.
        usual: rewrites config.json in the usual spelling.
        traits: arguments of ``build`` that all models of the family have.
        build: makes the parts of every layer.
        more: (config.json, its source) to further arguments of ``build``.
    """

    defaults: Mapping[str, Any]
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    slides: bool = False
    local_rope: bool = False
    packed: str = ""
    recurrent: str = ""
    usual: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    traits: Mapping[str, Any] = {}
    build: Callable[..., DecoderConfig] = dense
    more: Callable[[Mapping[str, Any], str], dict[str, Any]] = lambda config, source: {}


def _qwen3_experts(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Sizes of experts, and the layers without: those of ``mlp_only_layers``, and of each
    ``decoder_sparse_step`` layers all but the last."""
    experts = "num_experts" if "num_experts" in config else "num_local_experts"  # transformers 5
    step = positive(config.get("decoder_sparse_step"), "decoder_sparse_step", 512, source)
    alone = set(config.get("mlp_only_layers") or ())
    return {
        **expert_sizes(config, experts, "num_experts_per_tok", "moe_intermediate_size", source),
        "normalised": bool(config["norm_topk_prob"]),
        "is_dense": [i in alone or (i + 1) % step != 0 for i in range(config["num_hidden_layers"])],
    }


def _gemma2(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    return {ours: float(config[name] or 0) for name, ours in SOFT_CAPS.items()}


def _smollm3(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    layers, rotated = config["num_hidden_layers"], config.get("no_rope_layers")
    if rotated is None:
        every = config["no_rope_layer_interval"]
        rotated = [(i + 1) % every != 0 for i in range(layers)]
    if len(rotated) < layers:
        raise BadInput(
            f"{source}: expected a number for each of {layers} layers in 'no_rope_layers', "
            f"got {len(rotated)}"
        )
    return {"rotated": rotated[:layers]}


def multipliers(
    attention: float, embedding: float, residual: float, logits: float
) -> dict[str, Any]:
    """Granite's factors of scores, embeddings and residuals, and the divisor of logits."""
    return {
        "query_pre_attn_scalar": attention**-2,
        "embedding_multiplier": embedding,
        "residual_multiplier": residual,
        "logits_divisor": logits,
    }


def _granite(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    names = "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"
    rotates = config.get("position_embedding_type", "rope") == "rope"
    return multipliers(*(float(config.get(name, 1)) for name in names)) | {
        "rotated": [rotates] * config["num_hidden_layers"]
    }


def _usual_granite4(config: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {"attention": "full_attention"}
    return {
        "position_embedding_type": None,
        **config,
        "layer_types": [kinds.get(kind, kind) for kind in config["layer_types"]],
        "intermediate_size": config["shared_intermediate_size"],
    }


def _gpt_oss(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    names = "num_local_experts", "num_experts_per_tok", "intermediate_size"
    gain, limit = float(config["swiglu_alpha"]), float(config["swiglu_limit"])
    return {
        **expert_sizes(config, *names, source),
        "normalised": True,
        "is_dense": [False] * config["num_hidden_layers"],
        "expert": {"bias": True, "gain": gain, "limit": limit},
    }


_GPT_OSS = Family(
    {
        "head_dim": 64,
        "num_key_value_heads": 8,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    slides=True,
    packed="mxfp4",
    traits={"sinks": True, "files": "stacked", "spelling": (("ffn_norm", "post_attention_norm"),)},
    build=with_experts,
    more=_gpt_oss,
)


def _qwen3_5_experts(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    name = "shared_expert_intermediate_size"
    return {
        **qwen3_5(config, source),
        **_qwen3_experts(config, source),
        "expert": {"d_shared": positive(config.get(name), name, 1 << 20, source)},
        "normalised": True,
    }


_QWEN3_5 = Family(**QWEN3_5)
_QWEN3_5_EXPERTS = _QWEN3_5._replace(
    defaults=QWEN3_5_EXPERTS, build=with_experts, more=_qwen3_5_experts
)
_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA_TRAITS = {
    "activation": "gelu_pytorch_tanh",
    "post_norms": True,
    "norm_offset": 1.0,
    "scale_embeddings": True,
}
_GEMMA3 = Family(
    {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "tie_word_embeddings": True,
    },
    slides=True,
    traits={"qk_norm": True, **_GEMMA_TRAITS},
)
_GEMMA2 = Family(
    {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    slides=True,
    traits=_GEMMA_TRAITS,
    more=_gemma2,
)

_GEMMA4 = Family(**GEMMA4, build=functools.partial(gemma4, build=dense))
_MISTRAL = Family(
    {"sliding_window": 4096, "num_key_value_heads": 8},
    qkv_bias=False,
    o_bias=False,
    slides=True,
)
_OLMO = {"pre_norms": False, "post_norms": True, "qk_norm": True, "wide_norm": True}

FAMILIES = {
    "LlamaForCausalLM": Family({}),
    "MistralForCausalLM": _MISTRAL,
    "Ministral3ForCausalLM": _MISTRAL._replace(
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "Mistral3ForConditionalGeneration": _MISTRAL,  # unless its text_config names another
    "Qwen2ForCausalLM": Family(_QWEN, qkv_bias=True, o_bias=False, slides=True),
    "Qwen3ForCausalLM": Family({**_QWEN, "head_dim": 128}, slides=True, traits={"qk_norm": True}),
    "Qwen3MoeForCausalLM": Family(
        {
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
        },
        traits={"qk_norm": True},
        build=with_experts,
        more=_qwen3_experts,
    ),
    "SmolLM3ForCausalLM": Family(
        {"rope_theta": 2e6, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
        more=_smollm3,
    ),
    "GraniteForCausalLM": Family({}, more=_granite),
    "GraniteMoeHybridForCausalLM": Family(
        {"num_local_experts": 8, "layer_types": ["mamba"], "shared_intermediate_size": 1024},
        usual=_usual_granite4,
        traits={"files": "fused_mlp"},
        more=_granite,
    ),
    "Olmo2ForCausalLM": Family({"rms_norm_eps": 1e-5}, traits=_OLMO),
    "Olmo3ForCausalLM": Family(
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        slides=True,
        local_rope=True,
        traits=_OLMO,
    ),
    "Phi3ForCausalLM": _MISTRAL._replace(
        defaults={"rms_norm_eps": 1e-5}, traits={"files": "fused"}
    ),
    "GptOssForCausalLM": _GPT_OSS,
    "Gemma2ForCausalLM": _GEMMA2,
    "Lfm2ForCausalLM": Family(**LFM2),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_EXPERTS,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_EXPERTS,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,  # its text_config
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Gemma4UnifiedForCausalLM": _GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": _GEMMA4,
}
