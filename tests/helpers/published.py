"""A small random model of every family that we train, as transformers itself saves it (torch)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from marft_jax.extras.export import huggingface
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer

TEXT: dict[str, Any] = dict(
    vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
    pad_token_id=256, eos_token_id=257, bos_token_id=None,
)  # fmt: skip
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
_DELTA = dict(
    layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
    linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
)  # fmt: skip
_SHARED = {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 16}
_GEMMA4 = dict(
    layer_types=["sliding_attention", "full_attention"], global_head_dim=16, sliding_window=8,
    hidden_size_per_layer_input=8, vocab_size_per_layer_input=264, num_kv_shared_layers=0,
)  # fmt: skip
_UNIFIED = {**_GEMMA4, "hidden_size_per_layer_input": 0}
_QWEN_EYES = dict(
    depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, patch_size=4,
    num_position_embeddings=16,
)  # fmt: skip
_EYES = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    image_size=28, patch_size=14, head_dim=8, num_key_value_heads=2,
)  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", {}, {}),
    "MistralForCausalLM": ("mistral", dict(sliding_window=4), {}),
    "Ministral3ForCausalLM": ("ministral3", {}, {}),
    "Mistral3ForConditionalGeneration": (
        "mistral3", dict(model_type="mistral"), dict(vision_config=_EYES, spatial_merge_size=1)
    ),
    "Qwen2ForCausalLM": ("qwen2", {}, {}),
    "Qwen3ForCausalLM": ("qwen3", {}, {}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", _EXPERTS, {}),
    "SmolLM3ForCausalLM": ("smollm3", {}, {}),
    "GraniteForCausalLM": ("granite", dict(residual_multiplier=0.3), {}),
    "GraniteMoeHybridForCausalLM": (
        "granitemoehybrid",
        dict(num_local_experts=0, layer_types=["attention"] * 2, shared_intermediate_size=48,
             position_embedding_type="rope", mamba_n_heads=8),
        {},
    ),
    "Olmo2ForCausalLM": ("olmo2", {}, {}),
    "Olmo3ForCausalLM": ("olmo3", dict(sliding_window=4), {}),
    "Phi3ForCausalLM": ("phi3", {}, {}),
    "GptOssForCausalLM": (
        "gpt_oss", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=4), {}
    ),
    "Gemma2ForCausalLM": ("gemma2", dict(sliding_window=4, query_pre_attn_scalar=8), {}),
    "Lfm2ForCausalLM": (
        "lfm2", dict(layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False), {}
    ),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", _DELTA, {}),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", _DELTA, dict(vision_config=_QWEN_EYES)),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", _SHARED, {}),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", _SHARED, dict(vision_config=_QWEN_EYES)),
    "Gemma3ForCausalLM": ("gemma3_text", dict(sliding_window=4, query_pre_attn_scalar=8), {}),
    "Gemma3ForConditionalGeneration": (
        "gemma3", dict(sliding_window=4, query_pre_attn_scalar=8),
        dict(vision_config=_EYES, mm_tokens_per_image=4),
    ),
    "Gemma4ForCausalLM": ("gemma4_text", _GEMMA4, {}),
    "Gemma4ForConditionalGeneration": (
        "gemma4", _GEMMA4, dict(vision_config={**_EYES, "global_head_dim": 8}, audio_config=None)
    ),
    "Gemma4UnifiedForCausalLM": ("gemma4_unified_text", _UNIFIED, {}),
    "Gemma4UnifiedForConditionalGeneration": ("gemma4_unified", _UNIFIED, {}),
}  # fmt: skip
"""Of each architecture: its model_type, what its text has of its own, and what stands above it."""


def save(architecture: str, folder: Path, above: Any = (), **text: Any) -> Path:
    """Saves a random model of this architecture, and the byte tokenizer beside it.

    Args:
        above: further settings beside ``text_config``, of a model of text and images.
        text: further settings of the text.
    """
    import torch
    import transformers

    kind, own, parts = FAMILIES[architecture]
    settings = {**TEXT, **own, **text}
    if architecture.endswith("ForConditionalGeneration"):
        settings = {"text_config": settings, **parts, **dict(above)}
    config: Any = transformers.AutoConfig.for_model(kind, **settings)
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "embed" not in name:
                weight.normal_(std=0.2)
    model.save_pretrained(folder)
    huggingface.save_tokenizer(ByteTokenizer(), folder, None)
    return folder
