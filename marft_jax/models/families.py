"""Model families: tables of parts, and how ``config.json`` spells their settings.

Whatever the decoder would compute differently is refused by name, never loaded approximately.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from marft_jax.errors import BadInput
from marft_jax.formats.foreign import readable
from marft_jax.models.checked import positive
from marft_jax.models.decoder import DecoderConfig, LayerConfig
from marft_jax.models.hybrids import LFM2, QWEN3_5, QWEN3_5_EXPERTS, hybrid, qwen3_5
from marft_jax.models.names import Spelling
from marft_jax.models.ops.products import Activation
from marft_jax.models.parts.attention import AttentionConfig
from marft_jax.models.parts.delta_net import DeltaNetConfig
from marft_jax.models.parts.dense import DenseConfig
from marft_jax.models.parts.experts import ExpertsConfig
from marft_jax.models.parts.shared_expert import SharedExpertConfig
from marft_jax.models.parts.short_conv import ShortConvConfig
from marft_jax.models.rope import NO_ROTATION, rope_settings

PARTS = (
    AttentionConfig,
    DenseConfig,
    ExpertsConfig,
    SharedExpertConfig,
    ShortConvConfig,
    DeltaNetConfig,
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
        scale_embeddings: embeddings are multiplied by √d_model.
        others: further fields of ``AttentionConfig`` and of ``DecoderConfig``.
    """
    if scale_embeddings:
        others["embedding_multiplier"] = d_model**0.5
    mixing = {name: others.pop(name) for name in _ATTENTION & set(others)}
    full = AttentionConfig(d_model, n_heads, n_kv_heads, head_dim, **mixing)
    narrow = dataclasses.replace(full, window=window)
    if local_rope_theta is not None:
        narrow = dataclasses.replace(narrow, rope_theta=local_rope_theta, rope_scaling=None)
    mlp = DenseConfig(d_model, d_ff, activation)
    mixers = [narrow if slides else full for slides in sliding or [False] * n_layers]
    for i, rotates in enumerate(rotated):
        if not rotates:
            mixers[i] = dataclasses.replace(mixers[i], rope_theta=1e4, rope_scaling=NO_ROTATION)
    layers = tuple(LayerConfig(mixer, mlp) for mixer in mixers)
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
        slides: (config.json, index of a layer) to whether the layer slides, where ``layer_types``
            is missing; None for a family without windows.
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
    slides: Callable[[Mapping[str, Any], int], bool] | None = None
    local_rope: bool = False
    packed: str = ""
    recurrent: str = ""
    usual: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    traits: Mapping[str, Any] = {}
    build: Callable[..., DecoderConfig] = dense
    more: Callable[[Mapping[str, Any], str], dict[str, Any]] = lambda config, source: {}


def _late(config: Mapping[str, Any], layer: int) -> bool:
    return layer >= config["max_window_layers"]


def _all_but_every(config: Mapping[str, Any], layer: int) -> bool:
    return (layer + 1) % config["sliding_window_pattern"] != 0


def _qwen3_experts(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Sizes of experts, and the layers without: those of ``mlp_only_layers``, and of each
    ``decoder_sparse_step`` layers all but the last."""

    def size(name: str, largest: int) -> int:
        return positive(config.get(name), name, largest, source)

    of_new = "num_experts" not in config  # transformers 5 writes another name
    experts = size("num_local_experts" if of_new else "num_experts", 1 << 14)
    step, alone = size("decoder_sparse_step", 512), set(config.get("mlp_only_layers") or ())
    return {
        "n_experts": experts,
        "n_chosen": size("num_experts_per_tok", experts),
        "d_expert": size("moe_intermediate_size", 1 << 20),
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
    experts = positive(config["num_local_experts"], "num_local_experts", 1 << 14, source)
    gain, limit = float(config["swiglu_alpha"]), float(config["swiglu_limit"])
    return {
        "n_experts": experts,
        "n_chosen": positive(config["num_experts_per_tok"], "num_experts_per_tok", experts, source),
        "d_expert": config["intermediate_size"],
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
    slides=_all_but_every,
    packed="mxfp4",
    traits={"sinks": True, "files": "stacked"},
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


_LFM2 = Family(**LFM2, build=functools.partial(hybrid, build=dense))
_QWEN3_5 = Family(**QWEN3_5, build=functools.partial(hybrid, build=dense))
_QWEN3_5_EXPERTS = _QWEN3_5._replace(
    defaults=QWEN3_5_EXPERTS,
    build=functools.partial(hybrid, build=with_experts),
    more=_qwen3_5_experts,
)
_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA_TRAITS = {
    "activation": "gelu_pytorch_tanh",
    "post_norms": True,
    "norm_offset": True,
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
    slides=_all_but_every,
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
    slides=_all_but_every,
    traits=_GEMMA_TRAITS,
    more=_gemma2,
)

_MISTRAL = Family(
    {"sliding_window": 4096, "num_key_value_heads": 8},
    qkv_bias=False,
    o_bias=False,
    slides=lambda config, layer: True,
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
    "Qwen2ForCausalLM": Family(_QWEN, qkv_bias=True, o_bias=False, slides=_late),
    "Qwen3ForCausalLM": Family({**_QWEN, "head_dim": 128}, slides=_late, traits={"qk_norm": True}),
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
        slides=_all_but_every,
        local_rope=True,
        traits=_OLMO,
    ),
    "Phi3ForCausalLM": _MISTRAL._replace(
        defaults={"rms_norm_eps": 1e-5}, traits={"files": "fused"}
    ),
    "GptOssForCausalLM": _GPT_OSS,
    "Gemma2ForCausalLM": _GEMMA2,
    "Lfm2ForCausalLM": _LFM2,
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_EXPERTS,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_EXPERTS,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,  # its text_config
}

_NUMBERS = (
    ("vocab_size", "vocab_size", "vocab_size", 1 << 24),
    ("d_model", "hidden_size", "embedding_length", 1 << 20),
    ("n_layers", "num_hidden_layers", "block_count", 512),
    ("n_heads", "num_attention_heads", "attention.head_count", 1 << 14),
    ("n_kv_heads", "num_key_value_heads", "attention.head_count_kv", 1 << 14),
    ("head_dim", "head_dim", "attention.key_length", 1 << 14),
    ("d_ff", "intermediate_size", "feed_forward_length", 1 << 20),
    ("max_position", "max_position_embeddings", "context_length", 1 << 30),
)
"""Sizes here, in config.json and in GGUF, and the largest: a decoder is laid out before its tensors
are found."""

_MODEL_TYPES: dict[str | None, str] = {
    **{name.removesuffix("ForCausalLM").lower(): name for name in FAMILIES},
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
}


def read_config(config: Mapping[str, Any], source: str) -> DecoderConfig:
    """``config.json`` as a ``DecoderConfig``.

    Args:
        config: the parsed file, in the spelling of transformers 4 or 5.
        source: where it came from, for messages.

    Raises:
        BadInput: an architecture or a setting that the decoder does not have, by name, or a key
            that is missing or of the wrong type.
    """
    with readable(source, "model configuration"):
        name = _architecture(config, source)
        family = FAMILIES[name]
        given = {**config, **config.get("text_config", {})}
        if given.get("rope_scaling"):  # instead of the default
            given.setdefault("rope_parameters", None)
        config = family.usual({**family.defaults, **given})
        _refuse_unsupported(name, config, source)
        bias = bool(config.get("attention_bias", False))
        rope = rope_settings(config, source)
        local = rope.theta if family.local_rope and not rope.local_theta else rope.local_theta
        found = sizes(config.get, "hf", source)
        settings = found | windows(family, config, found, local, source)
        settings |= {
            "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
            "rope_theta": rope.theta,
            "rope_scaling": rope.scaling,
            "rotary_channels": 0 if rope.share == 1 else int(found["head_dim"] * rope.share),
            "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
            "qkv_bias": bias if family.qkv_bias is None else family.qkv_bias,
            "o_bias": bias if family.o_bias is None else family.o_bias,
            "local_rope_theta": local,
            "query_pre_attn_scalar": config.get("query_pre_attn_scalar"),
        }
        if rope.scaling and rope.scaling.kind == "longrope":
            settings["max_position"] = rope.scaling.original_max_position
        return built(family, source, **settings | family.more(config, source))


def sizes(get: Callable[[str], Any], spelling: Spelling, source: str) -> dict[str, int]:
    """Reads the sizes of a decoder.

    Args:
        get: a size in this spelling, or None.

    Raises:
        BadInput: a size that is missing, no positive integer, or far beyond every model there is;
            heads that cannot be grouped, channels that cannot be rotated in pairs.
    """
    found: dict[str, int] = {}
    for ours, hf, gguf, largest in _NUMBERS:
        value = get(name := hf if spelling == "hf" else gguf)
        if value is None and ours == "n_kv_heads":
            value = found["n_heads"]
        elif value is None and ours == "head_dim":
            value = found["d_model"] // found["n_heads"]
        found[ours] = positive(value, name, largest, source)
    if found["n_heads"] % found["n_kv_heads"]:
        raise BadInput(
            f"{source}: expected a number of query heads divisible by the key-value heads, "
            f"got {found['n_heads']} and {found['n_kv_heads']}"
        )
    if found["head_dim"] % 2:
        raise BadInput(f"{source}: expected an even head width, got {found['head_dim']}")
    return found


def built(family: Family, source: str, **settings: Any) -> DecoderConfig:
    """Builds a decoder of a family.

    Raises:
        BadInput: a setting that is not finite.
    """
    theta, eps = settings["rope_theta"], settings["norm_eps"]
    local, scalar = settings["local_rope_theta"], settings["query_pre_attn_scalar"]
    channels = settings.get("rotary_channels") or settings["head_dim"]
    divisors = getattr(settings["rope_scaling"], "divisors", ())
    if channels % 2 or (divisors and len(divisors) != channels // 2):
        raise BadInput(
            f"{source}: expected an even number of rotated channels and a divisor for each two of "
            f"them, got {channels} and {len(divisors)}"
        )
    positive = [theta, *(x for x in (local, scalar) if x is not None)]
    if not (math.isfinite(eps) and all(0 < x < math.inf for x in positive)):
        raise BadInput(
            f"{source}: expected finite numbers, got a norm's epsilon of {eps}, a "
            f"rotary base of {theta}, {local} where layers slide, "
            f"and a query_pre_attn_scalar of {scalar}"
        )
    return family.build(**settings, **family.traits)


def sizes_of(config: DecoderConfig) -> dict[str, int]:
    """Sizes as config.json spells them."""
    [layer, *_] = config.layers
    known = {**vars(layer.mixer), **vars(layer.mlp), **vars(config), "n_layers": config.n_layers}
    return {hf: known[ours] for ours, hf, *_ in _NUMBERS}


def _architecture(config: Mapping[str, Any], source: str) -> str:
    name = next(iter(config.get("architectures") or []), None)
    name = name or _MODEL_TYPES.get(config.get("model_type", ""))
    if name in FAMILIES and "text_config" in config:
        name = _MODEL_TYPES.get(config["text_config"].get("model_type"), name)
    if name not in FAMILIES:
        raise BadInput(
            f"{source}: architecture {name or config.get('model_type')!r} is not supported; "
            f"supported: {', '.join(FAMILIES)}"
        )
    return name


def text_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the text model of a model of text and images; empty if it has no name."""
    text = config["text_config"]
    name = _MODEL_TYPES.get(text.get("model_type"))
    return {**text, "architectures": [name]} if name else {}


def _refuse_unsupported(name: str, config: Mapping[str, Any], source: str) -> None:
    family = FAMILIES[name]
    slides = family.slides is not None and bool(config.get("use_sliding_window", True))
    recurrent = bool(family.recurrent)
    kinds = ["full_attention", *["sliding_attention"] * slides, *[family.recurrent] * recurrent]
    activation = family.traits.get("activation", "silu")
    named = "hidden_act" if "hidden_activation" not in config else "hidden_activation"
    both_ways = config.get("use_bidirectional_attention")
    refused = {
        named: (config.get(named, "silu") != activation, activation),
        "mlp_bias": (config.get("mlp_bias"), "false"),
        "num_local_experts": (
            config.get("num_local_experts") and family.build is dense,
            "0 (no mixture of experts)",
        ),
        "quantization_config": (
            (config.get("quantization_config") or {}).get("quant_method", "") != family.packed
            and config.get("quantization_config"),
            f"{family.packed or 'unquantised weights'} or GGUF",
        ),
        "use_sliding_window": (config.get("use_sliding_window") and not slides, "false"),
        "layer_types": (
            set(config.get("layer_types") or ()) - {*kinds},
            " and ".join(kinds) if kinds[1:] else "full_attention only",
        ),
        "use_bidirectional_attention": (both_ways, "false"),
        "conv_bias": (config.get("conv_bias"), "false"),
        "attn_output_gate": (config.get("attn_output_gate") is False, "true"),
        **{key: (config.get(key), "null") for key in SOFT_CAPS if key not in family.defaults},
    }
    refuse(name, refused, lambda key: str(config.get(key)), source)


def windows(
    family: Family,
    config: Mapping[str, Any],
    found: Mapping[str, int],
    local_theta: float | None,
    source: str,
) -> dict[str, Any]:
    """Reads the window, and which layers slide, as arguments of ``Family.build``.

    Args:
        found: the decoder's ``sizes``.

    Raises:
        BadInput: a window that is no positive integer, or not as many kinds as layers.
    """
    if family.slides is None or not config.get("use_sliding_window", True):
        return {}
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    window = found["max_position"] if window is None else window
    if type(window) is not int or window < 1:
        raise BadInput(
            f"{source}: expected a positive integer for 'sliding_window', got {window!r}"
        )
    n_layers = found["n_layers"]
    if kinds and len(kinds) != n_layers:
        raise BadInput(
            f"{source}: expected a kind for each of {n_layers} layers in 'layer_types', "
            f"got {len(kinds)}"
        )
    if window >= found["max_position"] and local_theta is None:
        return {}
    if kinds:
        sliding = [kind == "sliding_attention" for kind in kinds]
    else:
        sliding = [family.slides(config, i) for i in range(n_layers)]
    return {"window": window, "sliding": sliding}


def refuse(
    name: str, cases: Mapping[str, tuple[Any, Any]], get: Callable[[str], Any], source: str
) -> None:
    """Refuses settings with which the same tensors would mean another computation.

    Args:
        name: of the architecture.
        cases: for each setting, whether it is refused and what is supported.
        get: the value of a setting.

    Raises:
        BadInput: a setting is refused.
    """
    for key, (bad, supported) in cases.items():
        if bad:
            value = get(key)
            shown = repr(value[:80] if isinstance(value, str) else value)
            raise BadInput(
                f"{source}: {name} with {key} {shown} is not supported; supported: {supported}"
            )
