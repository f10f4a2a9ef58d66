"""The paths that answer, and what reads the calls of each."""

from __future__ import annotations

from collections.abc import Callable

from marft_jax.extras.gateway import completions, responses
from marft_jax.extras.gateway.answers import Answer
from marft_jax.extras.gateway.protocol import read_call

Read = Callable[[bytes], Answer]
"""Reads the body of a call; raises ``ApiError`` where it is wrong."""
READS: dict[str, Read] = {
    "/chat/completions": lambda body: Answer(read_call(body)),
    "/completions": completions.read,
    "/responses": responses.read,
}
