"""Runs generated programs where they can do no harm, and gives what they printed or returned.

Each program runs as one process without a network, without a view of the host's files, environment
or processes, with limits on time, memory, output, files and threads; what it needs to succeed (the
expected output, the tests) is never inside with it.
"""

from marft_jax.envs.workers import Unusable
from marft_jax.extras.code.sandbox.jail import Limits
from marft_jax.extras.code.sandbox.sandbox import Outcome, Sandbox

__all__ = ["Limits", "Outcome", "Sandbox", "Unusable"]
