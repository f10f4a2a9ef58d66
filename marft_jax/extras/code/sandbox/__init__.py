"""Runs generated programs in isolation, and returns what they print or return.

Each program is one process without network and without access to the host's files, environment or
processes. Time, memory, output, files and threads are limited. Expected results never enter.
"""

from marft_jax.envs.workers import Unusable
from marft_jax.extras.code.sandbox.jail import Limits
from marft_jax.extras.code.sandbox.sandbox import Outcome, Sandbox

__all__ = ["Limits", "Outcome", "Sandbox", "Unusable"]
