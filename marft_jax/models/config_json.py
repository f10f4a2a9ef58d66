"""Reads ``config.json``: the sizes of a decoder, and the settings of its family.

Whatever the decoder would compute differently is refused by name, never loaded approximately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from marft_jax.errors import BadInput
from marft_jax.formats.foreign import readable
from marft_jax.models.checked import check_heads, positive
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.models.families import FAMILIES, SOFT_CAPS, Family, dense
from marft_jax.models.names import Spelling
from marft_jax.models.rope import rope_settings

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

SIZES = {ours: hf for ours, hf, *_ in _NUMBERS}
"""Sizes here and in config.json."""

_TIED = "tie_word_embeddings"


def read_config(
    config: Mapping[str, Any], source: str, has_head: Callable[[], bool] = lambda: False
) -> DecoderConfig:
    """``config.json`` as a ``DecoderConfig``.

    Args:
        config: the parsed file, in the spelling of transformers 4 or 5.
        source: where it came from, for messages.
        has_head: tells whether the weights have a vocabulary matrix of their own, which decides
            where the settings of a model of text and images and those of its text differ.

    Raises:
        BadInput: an architecture or a setting that the decoder does not have, by name, or a key
            that is missing or of the wrong type.
    """
    with readable(source, "model configuration"):
        name = _architecture(config, source)
        family = FAMILIES[name]
        given = {**config, **config.get("text_config", {})}
        whole, text = (bool(x.get(_TIED, given.get(_TIED))) for x in (config, given))
        if whole != text:
            given[_TIED] = not has_head()
        if given.get("rope_scaling"):  # instead of the default
            given.setdefault("rope_parameters", None)
        config = family.usual({**family.defaults, **given})
        _refuse_unsupported(name, config, source)
        bias = bool(config.get("attention_bias", False))
        rope = rope_settings(config, source)
        local = rope.theta if family.local_rope and not rope.local_theta else rope.local_theta
        sizes = read_sizes(config.get, "hf", source)
        settings = sizes | windows(family, config, sizes, local, source)
        settings |= {
            "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
            "rope_theta": rope.theta,
            "rope_scaling": rope.scaling,
            "rotary_channels": 0 if rope.share == 1 else int(sizes["head_dim"] * rope.share),
            "tie_embeddings": bool(config.get(_TIED, False)),
            "qkv_bias": bias if family.qkv_bias is None else family.qkv_bias,
            "o_bias": bias if family.o_bias is None else family.o_bias,
            "local_rope_theta": local,
            "query_pre_attn_scalar": config.get("query_pre_attn_scalar"),
        }
        if rope.scaling and rope.scaling.kind == "longrope":
            settings["max_position"] = rope.scaling.original_max_position
        return built(family, source, **settings | family.more(config, source))


def read_sizes(get: Callable[[str], Any], spelling: Spelling, source: str) -> dict[str, int]:
    """Reads the sizes of a decoder.

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
        sizes[ours] = positive(value, name, largest, source)
    check_heads(sizes["n_heads"], sizes["n_kv_heads"], sizes["head_dim"], source)
    return sizes


def built(family: Family, source: str, **settings: Any) -> DecoderConfig:
    """Builds a decoder of a family.

    Raises:
        BadInput: a setting that is not finite.
    """
    channels = settings.get("rotary_channels") or settings["head_dim"]
    divisors = getattr(settings["rope_scaling"], "divisors", ())
    if channels % 2 or (divisors and len(divisors) != channels // 2):
        raise BadInput(
            f"{source}: expected an even number of rotated channels and a divisor for each two of "
            f"them, got {channels} and {len(divisors)}"
        )
    for name in ("norm_eps", "rope_theta", "local_rope_theta", "query_pre_attn_scalar"):
        if (x := settings[name]) is not None and not 0 < x < math.inf:
            raise BadInput(f"{source}: expected a positive number for {name}, got {x}")
    return family.build(**settings, **family.traits)


def sizes_of(config: DecoderConfig) -> dict[str, int]:
    """Sizes as config.json spells them."""
    [layer, *_] = config.layers
    known = {**vars(layer.mixer), **vars(layer.mlp), **vars(config), "n_layers": config.n_layers}
    return {hf: known[ours] for ours, hf in SIZES.items()}


def architecture(config: Mapping[str, Any]) -> str | None:
    """Name of the class of transformers that a checkpoint is of; None where its kind is unknown."""
    name = next(iter(config.get("architectures") or []), None)
    return name or class_of(config.get("model_type"))


def class_of(model_type: Any) -> str | None:
    """Name of the class of transformers of a ``model_type``; None for an unknown one.

    >>> class_of("qwen3_5_moe_text"), class_of("gpt_oss"), class_of("mistral3")
    ('Qwen3_5MoeForCausalLM', 'GptOssForCausalLM', 'Mistral3ForConditionalGeneration')
    """
    kind = str(model_type).replace("_", "")
    text = kind.removesuffix("text")
    known = [n for n in FAMILIES if n.partition("For")[0].replace("_", "").lower() == text]
    is_text = kind != text  # of a model that has parts for images, the text
    return next((n for n in known if n.endswith("CausalLM") == is_text), (*known, None)[0])


def _architecture(config: Mapping[str, Any], source: str) -> str:
    name = architecture(config)
    if name in FAMILIES and "text_config" in config:
        name = class_of(config["text_config"].get("model_type")) or name
    if name not in FAMILIES:
        raise BadInput(
            f"{source}: architecture {name or config.get('model_type')!r} is not supported; "
            f"supported: {', '.join(FAMILIES)}"
        )
    return name


def text_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the text model of a model of text and images; empty if it has no name."""
    text = config["text_config"]
    name = class_of(text.get("model_type"))
    return {**text, "architectures": [name]} if name else {}


def _refuse_unsupported(name: str, config: Mapping[str, Any], source: str) -> None:
    family = FAMILIES[name]
    slides = family.slides and bool(config.get("use_sliding_window", True))
    kinds = ["full_attention", "sliding_attention" * slides, family.recurrent]
    kinds = [kind for kind in kinds if kind]
    activation = family.traits.get("activation", "silu")
    named = "hidden_act" if "hidden_activation" not in config else "hidden_activation"
    both_ways = config.get("use_bidirectional_attention")
    both_ways = both_ways and both_ways != "vision"  # among the tokens of an image
    refused = {
        named: (config.get(named, "silu") != activation, activation),
        "mlp_bias": (config.get("mlp_bias"), "false"),
        "num_local_experts": (
            config.get("num_local_experts") and family.build is dense,
            "0 (no mixture of experts)",
        ),
        "quantization_config": (
            _unreadable(_packing(config), family.packed),
            f"{family.packed or READABLE} or GGUF",
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
    shown = {**config, "quantization_config": _packing(config)}
    refuse(name, refused, lambda key: str(shown.get(key)), source)


READABLE = "unquantised weights, fp8 in blocks of 128 x 128, compressed-tensors float-quantized"


def _packing(config: Mapping[str, Any]) -> Any:
    """How weights are packed, by the names of transformers, of older files, and of MLX."""
    names = ("quantization_config", "compression_config", "quantization")
    return next((config[name] for name in names if config.get(name)), {})


def _unreadable(packing: Any, packed: str) -> bool:
    """True for weights that no reader of files unpacks; ``packed`` as of ``Family``."""
    if not isinstance(packing, Mapping):
        return True
    method = packing.get("quant_method", "")
    if packed or not packing:
        return bool(packing) and method != packed
    if method == "compressed-tensors":
        return packing.get("format") != "float-quantized"
    return method != "fp8" or packing.get("weight_block_size") not in (None, [128, 128])


def windows(
    family: Family,
    config: Mapping[str, Any],
    sizes: Mapping[str, int],
    local_theta: float | None,
    source: str,
) -> dict[str, Any]:
    """Reads the window, and which layers slide, as arguments of ``Family.build``: those of
    ``layer_types``, or else those from ``max_window_layers`` on, but for the last of each
    ``sliding_window_pattern`` layers.

    Args:
        sizes: of the decoder, see ``read_sizes``.

    Raises:
        BadInput: a window that is no positive integer, or not as many kinds as layers.
    """
    if not (family.slides and config.get("use_sliding_window", True)):
        return {}
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    window = sizes["max_position"] if window is None else window
    positive(window, "sliding_window", 1 << 62, source)
    n_layers = sizes["n_layers"]
    if kinds and len(kinds) != n_layers:
        raise BadInput(
            f"{source}: expected a kind for each of {n_layers} layers in 'layer_types', "
            f"got {len(kinds)}"
        )
    if window >= sizes["max_position"] and local_theta is None:
        return {}
    if kinds:
        sliding = [kind == "sliding_attention" for kind in kinds]
    else:
        names = "max_window_layers", "sliding_window_pattern"
        first, pattern = (config[name] if name in family.defaults else None for name in names)
        late = [first is None or i >= first for i in range(n_layers)]
        last = [pattern is not None and (i + 1) % pattern == 0 for i in range(n_layers)]
        sliding = [a and not b for a, b in zip(late, last, strict=True)]
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
