"""Benchmark's generation and update in PyTorch: transformers with a peft adapter.

pip install torch transformers peft
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from marft_jax.models.decoder import DecoderConfig


def works(c: DecoderConfig, rank: int, prompt: int, new: int) -> dict[str, Callable[[], None]]:
    """Work by the names of ``benchmark.py``; one adapter."""
    import peft
    import torch
    import transformers

    [layer, *_] = c.layers
    mixer: Any = layer.mixer
    mlp: Any = layer.mlp
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.d_model,
        num_hidden_layers=c.n_layers,
        num_attention_heads=mixer.n_heads,
        num_key_value_heads=mixer.n_kv_heads,
        head_dim=mixer.head_dim,
        intermediate_size=mlp.d_ff,
        rope_theta=mixer.rope_theta,
        tie_word_embeddings=c.tie_embeddings,
        eos_token_id=None,
        pad_token_id=0,
    )
    lora = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora).to(device)
    ids = torch.randint(0, c.vocab_size, (8, prompt), device=device)
    rows = torch.randint(0, c.vocab_size, (8, 320), device=device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def generate() -> None:
        with torch.no_grad():
            model.generate(input_ids=ids, max_new_tokens=new, do_sample=True, top_k=0)

    def update() -> None:
        hidden = model.base_model.model.model(input_ids=rows).last_hidden_state
        logits = model.base_model.model.lm_head(hidden[:, -new - 1 : -1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, -new:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return {
        f"generate, 8 rows x {prompt} + {new} tokens": generate,
        "update, 8 rows x 320 tokens": update,
    }
