"""The built-in model with rows of its vocabulary that have no token, as matrices of published
models have them, and with likely ones: untrained rows of other models are not."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from marft_jax.extras.export import huggingface
from marft_jax.models.weights.load import load_base
from marft_jax.settings.config import Model

HOLES = (128, 192)  # bytes that no ASCII text has
TOKENS = 264


def write(folder: Path, rows: int, holes: bool = False) -> Path:
    """Writes the model with this many rows; with holes, ids in the middle have no token either."""
    base = load_base(Model(base="tiny"), lambda axes, array: jnp.asarray(array))
    huggingface.write_model(folder, base, {}, 1.0, {})
    weights, rng = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        more = np.zeros((max(0, rows - TOKENS), weights[name].shape[1]), np.float32)
        weights[name] = np.concatenate([weights[name][:TOKENS], more])[:rows]
    likely = rng.normal(size=(rows, weights["lm_head.weight"].shape[1])) * 0.3
    without = [*range(TOKENS, rows), *(range(*HOLES) if holes else ())]
    weights["lm_head.weight"][without] = likely[without]
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    if holes:
        file = folder / "tokenizer.json"
        tokenizer = json.loads(file.read_text())
        vocabulary = tokenizer["model"]["vocab"]
        own = {text: i for text, i in vocabulary.items() if not HOLES[0] <= i < HOLES[1]}
        special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
        tokenizer["model"]["vocab"] = own | special  # else they would get the next free ids
        file.write_text(json.dumps(tokenizer))
    return folder
