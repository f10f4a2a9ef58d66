"""Small random models in the forms in which users have theirs: a directory, a GGUF file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import small
from tokenizers.pre_tokenizers import ByteLevel

from marft_jax.extras.export import huggingface

_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def directory(folder: Path, longest: int) -> Path:
    """Writes config.json, safetensors and a tokenizer of bytes.

    Args:
        longest: positions of the model.
    """
    made = small.base(config=small.config_of(max_position=longest))
    huggingface.write_model(folder, made._replace(source="tiny"), {}, 1.0, {})
    return folder


def gguf_file(path: Path, longest: int) -> Path:
    """Writes a llama with a tokenizer of bytes; ``longest`` as of ``directory``."""
    c, rng = small.SIZES, np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(longest)
    writer.add_embedding_length(c["d_model"])
    writer.add_block_count(c["n_layers"])
    writer.add_feed_forward_length(c["d_ff"])
    writer.add_head_count(c["n_heads"])
    writer.add_head_count_kv(c["n_kv_heads"])
    tokens = [*_SPECIAL, *sorted(ByteLevel.alphabet()), "aa"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(_SPECIAL) + [1] * 257)
    writer.add_token_merges(["a a"])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(_CHATML)
    d, kv, f = c["d_model"], c["n_kv_heads"] * c["head_dim"], c["d_ff"]
    mlp = {"ffn_gate": (f, d), "ffn_up": (f, d), "ffn_down": (d, f)}
    block = {"attn_q": (d, d), "attn_k": (kv, d), "attn_v": (kv, d), "attn_output": (d, d), **mlp}
    shapes = {"token_embd": (len(tokens), d), "output_norm": (d,)}
    for i in range(c["n_layers"]):
        norms = {"attn_norm": (d,), "ffn_norm": (d,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in (block | norms).items()}
    for name, shape in shapes.items():
        scale = 1.0 if "norm" in name else 0.1
        tensor = (rng.normal(size=shape) * scale).astype(np.float32)
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
