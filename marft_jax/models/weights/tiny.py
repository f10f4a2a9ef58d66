"""Built-in model ``tiny``: a decoder of 1.6 million parameters on a team that adds up digits.

    3+5+9=?   planner: 3+5=8   solver: 8+9=17

It can add, but rarely does so: the planner often writes ``guess`` instead, and the solver is at
times hasty and writes ``maybe 14``. Each decides by its first token, so reinforcement learning has
a policy to shift and nothing to teach. ``scripts/build_tiny.py`` makes the weights from nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

from marft_jax.models.families import dense

SIZES: dict[str, Any] = dict(
    vocab_size=264, d_model=160, n_layers=4, n_heads=4, n_kv_heads=4, head_dim=32, d_ff=640,
    max_position=1024,
)  # fmt: skip
ROPE_THETA = 30.0  # texts are short: with this base every frequency tells neighbours apart
CONFIG = dense(**SIZES, rope_theta=ROPE_THETA)
FILE = Path(__file__).with_name("tiny.safetensors")


def tensors() -> Iterator[tuple[str, np.ndarray]]:
    """Weights of ``tiny``, path by path."""
    yield from sorted(load_file(FILE).items())


def digest() -> str:
    """Names the weights: a hash of the recipe that made them and of the shape."""
    with safe_open(FILE, framework="numpy") as opened:
        return opened.metadata()["recipe"]
