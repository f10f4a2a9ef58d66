"""Tokens: continuous batching over the slots of a key-value cache, an adapter per row."""

from marft_jax.engine.engine import Completion, Engine, Request

__all__ = ["Completion", "Engine", "Request"]
