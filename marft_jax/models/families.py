"""The model families that the decoder can be, and the names of their parts in other formats.

``config.json`` becomes a ``DecoderConfig``; a path of ours, such as ``layers/3/q/kernel``, becomes
the name of the same tensor in a Hugging Face checkpoint or a GGUF file. Whatever the decoder would
compute differently is refused by name, never loaded approximately.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from marft_jax.errors import BadInput
from marft_jax.formats.foreign import readable
from marft_jax.models.decoder import DecoderConfig, RopeScaling

Spelling = Literal["hf", "gguf"]

# Modules of the decoder, in Hugging Face checkpoints and in GGUF files.
_MODULES: dict[str, dict[Spelling, str]] = {
    ours: {"hf": hf, "gguf": gguf}
    for ours, hf, gguf in (
        ("embed", "model.embed_tokens", "token_embd"),
        ("layers/{}/attn_norm", "model.layers.{}.input_layernorm", "blk.{}.attn_norm"),
        ("layers/{}/q", "model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
        ("layers/{}/k", "model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
        ("layers/{}/v", "model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
        ("layers/{}/q_norm", "model.layers.{}.self_attn.q_norm", "blk.{}.attn_q_norm"),
        ("layers/{}/k_norm", "model.layers.{}.self_attn.k_norm", "blk.{}.attn_k_norm"),
        ("layers/{}/o", "model.layers.{}.self_attn.o_proj", "blk.{}.attn_output"),
        ("layers/{}/mlp_norm", "model.layers.{}.post_attention_layernorm", "blk.{}.ffn_norm"),
        ("layers/{}/gate", "model.layers.{}.mlp.gate_proj", "blk.{}.ffn_gate"),
        ("layers/{}/up", "model.layers.{}.mlp.up_proj", "blk.{}.ffn_up"),
        ("layers/{}/down", "model.layers.{}.mlp.down_proj", "blk.{}.ffn_down"),
        ("final_norm", "model.norm", "output_norm"),
        ("lm_head", "lm_head", "output"),
    )
}


def source_name(path: str, spelling: Spelling) -> str:
    """The name that another format gives to the tensor at ``path``.

    >>> source_name("layers/3/q/kernel", "hf")
    'model.layers.3.self_attn.q_proj.weight'
    """
    module, leaf = path.rsplit("/", 1)
    layer = re.match(r"layers/(\d+)/", module)
    pattern = re.sub(r"^layers/\d+/", "layers/{}/", module)
    name = _MODULES[pattern][spelling].format(*layer.groups() if layer else ())
    return f"{name}.{'bias' if leaf == 'bias' else 'weight'}"


class Family(NamedTuple):
    """Traits of an architecture.

    Attributes:
        defaults: the keys that its config.json may leave out.
        qkv_bias, o_bias: always, never, or as ``attention_bias`` says (None).
        qk_norm: queries and keys are normalised per head.
    """

    defaults: Mapping[str, Any]
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family({}),
    "MistralForCausalLM": Family(
        {"sliding_window": 4096, "num_key_value_heads": 8}, qkv_bias=False, o_bias=False
    ),
    "Qwen2ForCausalLM": Family({}, qkv_bias=True, o_bias=False),
    "Qwen3ForCausalLM": Family({"head_dim": 128}, qk_norm=True),
}

_NUMBERS: dict[str, tuple[dict[Spelling, str], int]] = {
    ours: ({"hf": hf, "gguf": gguf}, largest)
    for ours, hf, gguf, largest in (
        ("vocab_size", "vocab_size", "vocab_size", 1 << 24),
        ("d_model", "hidden_size", "embedding_length", 1 << 20),
        ("n_layers", "num_hidden_layers", "block_count", 512),
        ("n_heads", "num_attention_heads", "attention.head_count", 1 << 14),
        ("n_kv_heads", "num_key_value_heads", "attention.head_count_kv", 1 << 14),
        ("head_dim", "head_dim", "attention.key_length", 1 << 14),
        ("d_ff", "intermediate_size", "feed_forward_length", 1 << 20),
        ("max_position", "max_position_embeddings", "context_length", 1 << 30),
    )
}
"""Sizes in other formats, and the largest: a decoder is laid out before its tensors are found."""

_MODEL_TYPES = {name.removesuffix("ForCausalLM").lower(): name for name in FAMILIES}


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
        config = {**family.defaults, **config}
        _refuse_unsupported(name, config, source)
        bias, rope = bool(config.get("attention_bias", False)), _rope_settings(config)
        return checked(
            config.get,
            "hf",
            source,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta", 1e4)),
            rope_scaling=_rope_scaling(rope, config, source),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=bias if family.o_bias is None else family.o_bias,
            qk_norm=family.qk_norm,
        )


def checked(
    get: Callable[[str], Any], spelling: Spelling, source: str, **others: Any
) -> DecoderConfig:
    """The configuration with these sizes, if they fit together, and with the ``others``.

    Args:
        get: a size in this spelling, or None.

    Raises:
        BadInput: a size that is missing, no positive integer, or far beyond every model there is;
            heads that cannot be grouped, channels that cannot be rotated in pairs.
    """
    sizes: dict[str, int] = {}
    for ours, (names, largest) in _NUMBERS.items():
        value = get(name := names[spelling])
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
    if not (math.isfinite(config.norm_eps) and 0 < config.rope_theta < math.inf):
        raise BadInput(
            f"{source}: expected finite numbers, got a norm's epsilon of {config.norm_eps} and a "
            f"rotary base of {config.rope_theta}"
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
    """The sizes as config.json spells them."""
    return {names["hf"]: getattr(config, ours) for ours, (names, _) in _NUMBERS.items()}


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
    window = config.get("sliding_window")
    slides = config.get("use_sliding_window", name == "MistralForCausalLM")
    narrow = slides and window is not None and window < config.get("max_position_embeddings", 0)
    other_layers = set(config.get("layer_types") or ()) - {"full_attention"}
    refused = {
        "hidden_act": (config.get("hidden_act", "silu") != "silu", "silu"),
        "mlp_bias": (config.get("mlp_bias"), "false"),
        "quantization_config": (config.get("quantization_config"), "unquantised weights or GGUF"),
        "sliding_window": (narrow, "null, or at least max_position_embeddings"),
        "use_sliding_window": (config.get("use_sliding_window"), "false"),
        "layer_types": (other_layers, "full_attention only"),
    }
    refuse(name, refused, lambda key: str(config.get(key)), source)


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


def _rope_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Theta and scaling in one place, as transformers 5 writes them in ``rope_parameters``."""
    theta = {"rope_theta": config["rope_theta"]} if config.get("rope_theta") else {}
    partial = config.get("partial_rotary_factor", 1.0)
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"partial_rotary_factor": partial, **theta, **scaling}


def _rope_scaling(
    rope: Mapping[str, Any], config: Mapping[str, Any], source: str
) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
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
