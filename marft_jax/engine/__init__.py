"""Tokens: continuous batching over the slots of a key-value cache, an adapter per row."""

from marft_jax.engine.engine import Engine
from marft_jax.engine.requests import Completion, Request

__all__ = ["Completion", "Engine", "Request"]
