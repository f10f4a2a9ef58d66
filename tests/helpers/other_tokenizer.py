"""The built-in model with another tokenizer: byte b has the id (b + 7) % 256."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from marft_jax.extras.export import huggingface
from marft_jax.models.weights.load import load_base
from marft_jax.settings.config import Model

SHIFT, BYTES = 7, 256


def write(folder: Path) -> Path:
    """Writes the model, which computes what ``tiny`` does of the same texts."""
    base = load_base(Model(base="tiny"), lambda axes, array: jnp.asarray(array))
    huggingface.write_model(folder, base, {}, 1.0, {})
    weights, file = load_file(folder / "model.safetensors"), folder / "tokenizer.json"
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = weights[name]
        moved = np.roll(rows[:BYTES], SHIFT, axis=0)
        weights[name] = np.concatenate([moved, rows[BYTES:]])
    save_file(weights, folder / "model.safetensors")
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    moved = {text: (i + SHIFT) % BYTES if i < BYTES else i for text, i in vocabulary.items()}
    tokenizer["model"]["vocab"] = moved
    file.write_text(json.dumps(tokenizer))
    return folder
