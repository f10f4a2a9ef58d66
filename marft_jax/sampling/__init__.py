"""The protocol between who plays episodes and who samples actions."""

from marft_jax.sampling.bases import SamplerOfBases
from marft_jax.sampling.batcher import Batcher, SamplerHandle
from marft_jax.sampling.protocol import Capabilities, Completion, Request, Sampler, version_of

__all__ = [
    "Batcher",
    "Capabilities",
    "Completion",
    "Request",
    "Sampler",
    "SamplerOfBases",
    "SamplerHandle",
    "version_of",
]
