"""The protocol between who plays episodes and who samples actions."""

from marft_jax.sampling.protocol import Completion, Request

__all__ = ["Completion", "Request"]
