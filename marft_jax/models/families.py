"""Model families that the decoder can be, and the names of their parts in other formats.

``config.json`` becomes a ``DecoderConfig``; a path of ours, such as ``layers/3/q/kernel``, becomes
the name of the same tensor in a Hugging Face checkpoint or a GGUF file. Whatever the decoder would
compute differently is refused by name, never loaded approximately.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from marft_jax.errors import BadInput
from marft_jax.formats.foreign import readable
from marft_jax.models.decoder import DecoderConfig
from marft_jax.models.rope import RopeScaling

Spelling = Literal["hf", "gguf"]

SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
"""Settings of Gemma 2 that the decoder lacks."""

# Modules of a layer and of the whole decoder, in Hugging Face checkpoints and in GGUF files.
_LAYER = (
    ("attn_norm", "input_layernorm", "attn_norm"),
    ("q", "self_attn.q_proj", "attn_q"),
    ("k", "self_attn.k_proj", "attn_k"),
    ("v", "self_attn.v_proj", "attn_v"),
    ("q_norm", "self_attn.q_norm", "attn_q_norm"),
    ("k_norm", "self_attn.k_norm", "attn_k_norm"),
    ("o", "self_attn.o_proj", "attn_output"),
    ("attn_post_norm", "post_attention_layernorm", "post_attention_norm"),
    ("mlp_norm", "post_attention_layernorm", "ffn_norm"),
    ("mlp_post_norm", "post_feedforward_layernorm", "post_ffw_norm"),
    ("gate", "mlp.gate_proj", "ffn_gate"),
    ("up", "mlp.up_proj", "ffn_up"),
    ("down", "mlp.down_proj", "ffn_down"),
)
_MODULES: dict[str, dict[Spelling, str]] = {
    "embed": {"hf": "model.embed_tokens", "gguf": "token_embd"},
    "final_norm": {"hf": "model.norm", "gguf": "output_norm"},
    "lm_head": {"hf": "lm_head", "gguf": "output"},
    **{
        f"layers/{{}}/{ours}": {"hf": f"model.layers.{{}}.{hf}", "gguf": f"blk.{{}}.{gguf}"}
        for ours, hf, gguf in _LAYER
    },
}


def paths_by_name(paths: Iterable[str], spelling: Spelling) -> dict[str, str]:
    """Our paths of all tensors of a model, by the names that another format gives to these."""
    paths = list(paths)
    post_norms = "layers/0/attn_post_norm/scale" in paths
    return {source_name(path, spelling, post_norms): path for path in paths}


def source_name(path: str, spelling: Spelling, post_norms: bool = False) -> str:
    """Name that another format gives to the tensor at ``path``.

    Args:
        post_norms: of a model that has norms behind attention and MLP too.

    >>> source_name("layers/3/q/kernel", "hf")
    'model.layers.3.self_attn.q_proj.weight'
    """
    module, leaf = path.rsplit("/", 1)
    layer = re.match(r"layers/(\d+)/", module)
    pattern = re.sub(r"^layers/\d+/", "layers/{}/", module)
    name = _MODULES[pattern][spelling].format(*layer.groups() if layer else ())
    if post_norms and pattern == "layers/{}/mlp_norm":
        name = name.replace("post_attention", "pre_feedforward")  # Hugging Face's
    return f"{name}.{'bias' if leaf == 'bias' else 'weight'}"


class Family(NamedTuple):
    """Traits of an architecture.

    Attributes:
        defaults: the keys that its config.json may leave out.
        qkv_bias, o_bias: always, never, or as ``attention_bias`` says (None).
        slides: config.json and the number of a layer to whether it slides, where ``layer_types``
            does not say; None for a family without windows.
        traits: fields of its ``DecoderConfig``.
    """

    defaults: Mapping[str, Any]
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    slides: Callable[[Mapping[str, Any], int], bool] | None = None
    traits: Mapping[str, Any] = {}


def _late(config: Mapping[str, Any], layer: int) -> bool:
    return layer >= config["max_window_layers"]


def _all_but_every(config: Mapping[str, Any], layer: int) -> bool:
    return (layer + 1) % config["sliding_window_pattern"] != 0


_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
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
    traits={
        "qk_norm": True,
        "activation": "gelu_pytorch_tanh",
        "post_norms": True,
        "norm_offset": True,
        "scale_embeddings": True,
    },
)

FAMILIES = {
    "LlamaForCausalLM": Family({}),
    "MistralForCausalLM": Family(
        {"sliding_window": 4096, "num_key_value_heads": 8},
        qkv_bias=False,
        o_bias=False,
        slides=lambda config, layer: True,
    ),
    "Qwen2ForCausalLM": Family(_QWEN, qkv_bias=True, o_bias=False, slides=_late),
    "Qwen3ForCausalLM": Family({**_QWEN, "head_dim": 128}, slides=_late, traits={"qk_norm": True}),
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

_MODEL_TYPES = {
    **{name.removesuffix("ForCausalLM").lower(): name for name in FAMILIES},
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
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
        config = {**family.defaults, **config, **config.get("text_config", {})}
        _refuse_unsupported(name, config, source)
        bias, rope = bool(config.get("attention_bias", False)), _rope_settings(config, source)
        found = checked(
            config.get,
            "hf",
            source,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta", 1e4)),
            rope_scaling=_rope_scaling(rope, config, source),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=bias if family.o_bias is None else family.o_bias,
            local_rope_theta=_local_rope_theta(config, source),
            query_pre_attn_scalar=config.get("query_pre_attn_scalar"),
            **family.traits,
        )
        return with_windows(found, family, config, source)


def checked(
    get: Callable[[str], Any], spelling: Spelling, source: str, **others: Any
) -> DecoderConfig:
    """Configuration with these sizes, if they fit together, and with the ``others``.

    Args:
        get: a size in this spelling, or None.

    Raises:
        BadInput: a size that is missing, no positive integer, or far beyond every model there is;
            heads that cannot be grouped, channels that cannot be rotated in pairs.
    """
    sizes: dict[str, int] = {}
    for ours, hf, gguf, largest in _NUMBERS:
        value = get(name := hf if spelling == "hf" else gguf)
        if value is None and ours == "n_kv_heads":
            value = sizes["n_heads"]
        elif value is None and ours == "head_dim":
            value = sizes["d_model"] // sizes["n_heads"]
        if type(value) is not int or not 0 < value <= largest:
            got = "nothing" if value is None else f"{value!r:.40}"
            raise BadInput(
                f"{source}: expected a positive integer for {name!r}, at most {largest}, got {got}"
            )
        sizes[ours] = value
    config = DecoderConfig(**sizes, **others)
    optional = config.local_rope_theta, config.query_pre_attn_scalar
    positive = [config.rope_theta, *(x for x in optional if x is not None)]
    if not (math.isfinite(config.norm_eps) and all(0 < x < math.inf for x in positive)):
        raise BadInput(
            f"{source}: expected finite numbers, got a norm's epsilon of {config.norm_eps}, a "
            f"rotary base of {config.rope_theta}, {config.local_rope_theta} where layers slide, "
            f"and a query_pre_attn_scalar of {config.query_pre_attn_scalar}"
        )
    if config.n_heads % config.n_kv_heads:
        raise BadInput(
            f"{source}: expected a number of query heads divisible by the key-value heads, "
            f"got {config.n_heads} and {config.n_kv_heads}"
        )
    if config.head_dim % 2:
        raise BadInput(f"{source}: expected an even head width, got {config.head_dim}")
    return config


def sizes_of(config: DecoderConfig) -> dict[str, int]:
    """Sizes as config.json spells them."""
    return {hf: getattr(config, ours) for ours, hf, *_ in _NUMBERS}


def _architecture(config: Mapping[str, Any], source: str) -> str:
    name = next(iter(config.get("architectures") or []), None)
    name = name or _MODEL_TYPES.get(config.get("model_type", ""))
    if name not in FAMILIES:
        raise BadInput(
            f"{source}: architecture {name or config.get('model_type')!r} is not supported; "
            f"supported: {', '.join(FAMILIES)}"
        )
    return name


def _refuse_unsupported(name: str, config: Mapping[str, Any], source: str) -> None:
    family = FAMILIES[name]
    slides = family.slides is not None and config.get("use_sliding_window", True)
    kinds = {"full_attention"} | ({"sliding_attention"} if slides else set())
    activation = family.traits.get("activation", "silu")
    named = "hidden_act" if "hidden_activation" not in config else "hidden_activation"
    both_ways = config.get("use_bidirectional_attention")
    refused = {
        named: (config.get(named, "silu") != activation, activation),
        "mlp_bias": (config.get("mlp_bias"), "false"),
        "quantization_config": (config.get("quantization_config"), "unquantised weights or GGUF"),
        "use_sliding_window": (config.get("use_sliding_window") and not slides, "false"),
        "layer_types": (
            set(config.get("layer_types") or ()) - kinds,
            "full_attention and sliding_attention" if slides else "full_attention only",
        ),
        "use_bidirectional_attention": (both_ways, "false"),
        **{key: (config.get(key), "null") for key in SOFT_CAPS},
    }
    refuse(name, refused, lambda key: str(config.get(key)), source)


def with_windows(
    found: DecoderConfig, family: Family, config: Mapping[str, Any], source: str
) -> DecoderConfig:
    """With the window that ``config`` names, and the layers that read through it.

    Raises:
        BadInput: it is no positive integer, or the kinds of layers are not as many as these.
    """
    if family.slides is None or not config.get("use_sliding_window", True):
        return found
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    window = found.max_position if window is None else window
    if type(window) is not int or window < 1:
        raise BadInput(
            f"{source}: expected a positive integer for 'sliding_window', got {window!r}"
        )
    if kinds and len(kinds) != found.n_layers:
        raise BadInput(
            f"{source}: expected a kind for each of {found.n_layers} layers in 'layer_types', "
            f"got {len(kinds)}"
        )
    by_number = (family.slides(config, i) for i in range(found.n_layers))
    sliding = tuple(kind == "sliding_attention" for kind in kinds) if kinds else tuple(by_number)
    if not any(sliding) or (window >= found.max_position and found.local_rope_theta is None):
        return dataclasses.replace(found, local_rope_theta=None)
    return dataclasses.replace(found, window=window, sliding=sliding)


def refuse(
    name: str, cases: Mapping[str, tuple[Any, Any]], get: Callable[[str], Any], source: str
) -> None:
    """Refuses settings with which the same tensors would mean another computation.

    Args:
        name: of the architecture.
        cases: of each setting, whether it is such a one, and what would be supported.
        get: the value of a setting.

    Raises:
        BadInput: one is.
    """
    for key, (bad, supported) in cases.items():
        if bad:
            value = get(key)
            shown = repr(value[:80] if isinstance(value, str) else value)
            raise BadInput(
                f"{source}: {name} with {key} {shown} is not supported; supported: {supported}"
            )


def _rope_settings(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Theta and scaling in one place, as transformers 5 writes them in ``rope_parameters`` and 4 in
    ``rope_scaling``; where layers of either kind have their own, those of layers that read
    everything."""
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


def _local_rope_theta(config: Mapping[str, Any], source: str) -> float | None:
    """Rotary base of layers that slide, where it is another."""
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
