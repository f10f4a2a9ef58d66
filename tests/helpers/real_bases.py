"""Small random models in the forms in which users have theirs: a directory, a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import published
import small
import transformers
from tokenizers.pre_tokenizers import ByteLevel

from marft_jax.extras.export import huggingface
from marft_jax.models import config_json
from marft_jax.models.tokenizers.tokenizer import Tokenizer
from marft_jax.models.weights import load

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


def family(folder: Path, architecture: str, tokenizer: Tokenizer, **settings: Any) -> Path:
    """Writes a random model of an architecture of ``published``, without torch.

    Args:
        settings: of its text, beside those of ``published``.
    """
    kind, own, _ = published.FAMILIES[architecture]
    sizes = {**published.TEXT, **own, **settings}
    sizes = {
        k: len(tokenizer.tokens) if k.startswith("vocab_size") else v for k, v in sizes.items()
    }
    config = transformers.AutoConfig.for_model(kind, **sizes).to_dict()
    there = folder / "settings"
    there.mkdir(parents=True)
    (there / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    tokenizer.save(there)
    read = config_json.read_config(config | {"architectures": [architecture]}, architecture)
    graphdef, abstract = load.abstract_decoder(read, jnp.float32)
    rng = np.random.default_rng(0)

    def draw(path: str, shape: tuple[int, ...]) -> np.ndarray:
        return rng.normal(size=shape) * 0.2 + path.endswith("scale")

    drawn = ((path, draw(path, shape)) for path, shape in load.shapes_of(abstract).items())
    params = load.fill(abstract, drawn, lambda _, a: jnp.asarray(a, jnp.float32))
    base = load.BaseModel(read, graphdef, params, tokenizer, str(there), "0")
    huggingface.write_model(folder / "base", base, {}, 1.0, {})
    return folder / "base"
