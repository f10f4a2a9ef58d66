"""The paths that answer: what reads the calls of each, and the replies as bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from marft_jax.extras.gateway import completions, responses
from marft_jax.extras.gateway.answers import Answer, Choice
from marft_jax.extras.gateway.errors import refused
from marft_jax.extras.gateway.protocol import read_call
from marft_jax.formats import jsonlines

Read = Callable[[bytes], Answer]
"""Reads the body of a call; raises ``ApiError`` where it is wrong."""
READS: dict[str, Read] = {
    "/chat/completions": lambda body: Answer(read_call(body)),
    "/completions": completions.read,
    "/responses": responses.read,
}
JSON, EVENTS = "application/json", "text/event-stream"
DONE = "data: [DONE]\n\n"


class Reply(NamedTuple):
    """Reply to a call; ``kind`` is its content type."""

    status: int
    kind: str
    body: bytes


def reply_of(answer: Answer, choices: Sequence[Choice]) -> Reply:
    """Makes the whole reply to a call, also to one that asks for a stream."""
    if not answer.call.stream:
        return Reply(200, JSON, jsonlines.dumps(answer.whole(choices)).encode())
    bodies = [*answer.ends(choices)]
    end = "" if "type" in bodies[-1] else DONE
    return Reply(200, EVENTS, ("".join(map(event, bodies)) + end).encode())


def refusal(error: Exception) -> Reply:
    """Makes the reply to a call that is refused."""
    found = refused(error)
    return Reply(found.status, JSON, jsonlines.dumps(found.body).encode())


def event(body: dict[str, Any]) -> str:
    """Makes a server-sent event."""
    name = f"event: {body['type']}\n" if "type" in body else ""
    return f"{name}data: {jsonlines.dumps(body)}\n\n"
