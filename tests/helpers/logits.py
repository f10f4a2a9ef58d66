"""Logits of some tokens, with adapters or without."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marft_jax.models import decoder, lora
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.models.weights.load import BaseModel

TOKENS = np.random.default_rng(0).integers(0, 256, (2, 9))


def our_logits(base: BaseModel, factors=None, alpha=5.0):
    """Logits of ``TOKENS``, with an adapter or without."""
    adapters = factors and jax.tree.map(lambda x: jnp.asarray(x)[None], factors)
    return logits_of(base.graphdef, base.params, TOKENS, adapters, alpha, np.zeros_like(TOKENS))


def logits_of(
    graphdef: Any, params: Any, tokens: np.ndarray, adapters: lora.Adapters | None = None,
    alpha: float = 1.0, owners: Any = None,
) -> np.ndarray:  # fmt: skip
    """Logits of whole rows, each one sequence, with the adapters of these owners if any."""

    @jax.jit
    def run(params, tokens, adapters, owners):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        until, fused, mask = jnp.full_like(positions, tokens.shape[1] - 1), None, None
        if adapters is not None:
            fused = lora.fuse(adapters, lora.scale_of(adapters, alpha), jnp.float32)
            mask = lora.owner_mask(owners, fused)
        hidden, _ = decoder.forward(graphdef, params, tokens, positions, until, fused, mask)
        whole = dataclasses.replace(decoder.vocabulary(graphdef, params), gaps=())
        return decoder.logits(hidden, whole.adapted(fused, owners))

    return np.asarray(run(params, jnp.asarray(tokens), adapters, owners))


def random_adapters(
    config: DecoderConfig, targets: Sequence[str], n: int, rank: int, scale: float
) -> lora.Adapters:
    """Adapters whose B is not zero."""
    fresh = lora.init(jax.random.key(0), config, adapters=range(n), rank=rank, targets=targets)
    rng = np.random.default_rng(2)
    return {
        name: {"a": ab["a"], "b": jnp.asarray(scale * rng.normal(size=ab["b"].shape), jnp.float32)}
        for name, ab in fresh.items()
    }
