"""Families some of whose layers have a recurrent mixer: how their config.json spells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marft_jax.errors import BadInput
from marft_jax.models.checked import positive
from marft_jax.models.ops.state import CHUNK
from marft_jax.models.parts.delta_net import DeltaNetConfig
from marft_jax.models.parts.part import Mixer
from marft_jax.models.parts.short_conv import ShortConvConfig


def _recurrent(
    config: Mapping[str, Any], kind: str, mixer: Any, source: str
) -> dict[str, dict[int, Mixer]]:
    """Gives the layers of this kind the mixer; the others have attention."""
    kinds, n = config["layer_types"], config["num_hidden_layers"]
    if len(kinds) != n or set(kinds) == {kind}:
        raise BadInput(
            f"{source}: expected a kind for each of {n} layers in 'layer_types', and "
            f"full_attention among them, got {len(kinds)}: {', '.join(sorted(set(kinds)))}"
        )
    return {"recurrent": {i: mixer for i in range(n) if kinds[i] == kind}}


def _usual_lfm2(config: Mapping[str, Any]) -> dict[str, Any]:
    width = config.get("block_ff_dim", config["intermediate_size"])
    if config["block_auto_adjust_ff_dim"]:
        width, multiple = int(2 * width / 3), config["block_multiple_of"]
        width = int((config["block_ffn_dim_multiplier"] or 1) * width)
        width = -(-width // multiple) * multiple
    n = config["num_hidden_layers"]
    attends = config.get("full_attn_idxs") or range(n)
    kinds = ["full_attention" if i in attends else "conv" for i in range(n)]
    return {
        "layer_types": kinds,
        **{key: value for key, value in config.items() if value is not None},
        "intermediate_size": width,
        "rms_norm_eps": config["norm_eps"],
        "tie_word_embeddings": config.get("tie_embedding", config["tie_word_embeddings"]),
    }


def _lfm2(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    taps = positive(config["conv_L_cache"], "conv_L_cache", CHUNK, source)
    return _recurrent(config, "conv", ShortConvConfig(config["hidden_size"], taps), source)


def _usual_qwen3_5(config: Mapping[str, Any]) -> dict[str, Any]:
    """With the kinds of layers, and a rotary share, that config.json may leave out."""
    every, n = config.get("full_attention_interval", 4), config["num_hidden_layers"]
    kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(n)]
    return {**config, "layer_types": config.get("layer_types") or kinds}


def qwen3_5(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Sizes of the delta nets, and the layers that have them."""

    def size(name: str, default: int, most: int = 1 << 14) -> int:
        return positive(config.get(f"linear_{name}", default), f"linear_{name}", most, source)

    mixer = DeltaNetConfig(
        config["hidden_size"],
        size("num_key_heads", 16),
        size("num_value_heads", 32),
        size("key_head_dim", 128),
        size("value_head_dim", 128),
        size("conv_kernel_dim", 4, CHUNK),  # a shared prefix has at least that many tokens
    )
    if mixer.n_value_heads % mixer.n_key_heads:
        raise BadInput(
            f"{source}: expected linear_num_value_heads divisible by linear_num_key_heads, got "
            f"{mixer.n_value_heads} and {mixer.n_key_heads}"
        )
    return _recurrent(config, "linear_attention", mixer, source)


LFM2: dict[str, Any] = dict(
    defaults={
        "intermediate_size": 12288,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "tie_word_embeddings": True,
    },
    qkv_bias=False,
    o_bias=False,
    recurrent="conv",
    usual=_usual_lfm2,
    more=_lfm2,
    traits={
        "qk_norm": True,
        "spelling": (
            ("model.norm", "model.embedding_norm"),
            ("output_norm", "token_embd_norm"),
            ("input_layernorm", "operator_norm"),
            ("post_attention_layernorm", "ffn_norm"),
            ("self_attn.o_proj", "self_attn.out_proj"),
            ("self_attn.q_norm", "self_attn.q_layernorm"),
            ("self_attn.k_norm", "self_attn.k_layernorm"),
            ("mlp.gate_proj", "feed_forward.w1"),
            ("mlp.up_proj", "feed_forward.w3"),
            ("mlp.down_proj", "feed_forward.w2"),
        ),
    },
)
"""Fields of the ``Family`` of LFM2."""
_SECOND_NORM = "ffn_norm", "post_attention_norm"
QWEN3_5: dict[str, Any] = dict(
    defaults={
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
    },
    recurrent="linear_attention",
    usual=_usual_qwen3_5,
    more=qwen3_5,
    traits={"qk_norm": True, "gated": True, "norm_offset": 1.0, "spelling": (_SECOND_NORM,)},
)
"""Of Qwen3.5 with a dense mlp."""
QWEN3_5_EXPERTS = {
    **QWEN3_5["defaults"],
    "hidden_size": 2048,
    "intermediate_size": 512,  # no layer has it
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
"""What config.json of a Qwen3.5 with experts may leave out."""
