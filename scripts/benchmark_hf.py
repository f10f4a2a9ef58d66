"""Benchmark's generation and update in PyTorch: transformers with a peft adapter.

pip install torch transformers peft
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def works(
    model: str | dict[str, Any], rank: int, prompt: int, new: int
) -> dict[str, Callable[[], None]]:
    """Work by the names of ``benchmark.py``; one adapter.

    Args:
        model: a shape's ``config.json``, which gets random weights, or a model's folder or hub id.
    """
    import peft
    import torch
    import transformers

    auto = transformers.AutoConfig
    config = auto.for_model(**model) if isinstance(model, dict) else auto.from_pretrained(model)
    config.eos_token_id, config.pad_token_id = None, 0
    lora = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = transformers.AutoModelForCausalLM.from_config(config)
    tuned = peft.get_peft_model(base, lora).to(device)
    ids = torch.randint(0, config.vocab_size, (8, prompt), device=device)
    rows = torch.randint(0, config.vocab_size, (8, 320), device=device)
    trained = [p for p in tuned.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def generate() -> None:
        with torch.no_grad():
            tuned.generate(input_ids=ids, max_new_tokens=new, do_sample=True, top_k=0)

    def update() -> None:
        hidden = base.model(input_ids=rows).last_hidden_state
        logits = base.lm_head(hidden[:, -new - 1 : -1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, -new:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return {
        f"generate, 8 rows x {prompt} + {new} tokens": generate,
        "update, 8 rows x 320 tokens": update,
    }
