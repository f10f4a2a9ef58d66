"""Our sampler: continuous batching over the slots of a key-value cache, an adapter per row."""

from marft_jax.engine.engine import Engine

__all__ = ["Engine"]
