"""Fine-tunes teams of language-model agents with reinforcement learning, in JAX."""

__version__ = "0.1.0"
