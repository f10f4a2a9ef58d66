"""The paths that answer: what reads the calls of each, and the replies as bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from marft_jax.extras.gateway import completions, responses
from marft_jax.extras.gateway.answers import Answer, Choice
from marft_jax.extras.gateway.errors import refused
from marft_jax.extras.gateway.protocol import call_of, read_object
from marft_jax.formats import jsonlines

Read = Callable[[bytes], Answer]
"""Reads the body of a call; raises ``ApiError`` where it is wrong."""
READS: dict[str, Read] = {
    "/chat/completions": lambda body: Answer(call_of(read_object(body))),
    "/completions": completions.read,
    "/responses": responses.read,
}
EVENTS = {"content-type": "text/event-stream; charset=utf-8"}
DONE = "data: [DONE]\n\n"


Reply = dict[str, Any]
"""Reply to a call: arguments of a response of starlette, and of one of httpx."""


def reply_of(answer: Answer, choices: Sequence[Choice]) -> Reply:
    """Makes the whole reply to a call, also to one that asks for a stream."""
    if not answer.call.stream:
        return _json(200, answer.whole(choices))
    bodies = [*answer.ends(choices)]
    end = "" if "type" in bodies[-1] else DONE
    return {"headers": EVENTS, "content": "".join(map(event, bodies)) + end, "status_code": 200}


def refusal(error: Exception) -> Reply:
    """Makes the reply to a call that is refused."""
    refusal = refused(error)
    return _json(refusal.status, refusal.body)


def _json(status: int, body: dict[str, Any]) -> Reply:
    kind = {"content-type": "application/json"}
    return {"headers": kind, "content": jsonlines.dumps(body), "status_code": status}


def event(body: dict[str, Any]) -> str:
    """Makes a server-sent event."""
    name = f"event: {body['type']}\n" if "type" in body else ""
    return f"{name}data: {jsonlines.dumps(body)}\n\n"
