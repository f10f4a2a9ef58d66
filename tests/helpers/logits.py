"""Logits of some tokens, with an adapter or without."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from marft_jax.models import decoder, lora
from marft_jax.models.weights.load import BaseModel

TOKENS = np.random.default_rng(0).integers(0, 256, (2, 9))


def our_logits(base: BaseModel, factors=None, alpha=5.0):
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    fused, mask = None, None
    if factors is not None:
        adapters = jax.tree.map(lambda x: jnp.asarray(x)[None], factors)
        owners = jnp.zeros_like(positions)
        fused = lora.fuse(adapters, lora.scale_of(adapters, alpha), jnp.float32)
        mask = lora.owner_mask(owners, fused)
    until = jnp.full_like(positions, TOKENS.shape[1] - 1)
    hidden, _ = decoder.forward(base.graphdef, base.params, TOKENS, positions, until, fused, mask)
    vocabulary = decoder.vocabulary(base.graphdef, base.params)
    vocabulary = dataclasses.replace(vocabulary, gaps=()).adapted(
        fused, np.zeros(TOKENS.shape, int)
    )
    return np.asarray(decoder.logits(hidden, vocabulary))
