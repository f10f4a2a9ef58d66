"""Compiles the programs that usual calls need, before a server takes calls."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.protocol import read_call
from marft_jax.extras.gateway.served_team import TEAM, ServedTeam
from marft_jax.run.metrics import Compilations

_TEXT = "answer in one short sentence: how many days are there in a week?"
_SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
_TOOL = {"name": "look_up", "description": "Looks a word up.", "parameters": _SCHEMA}
_FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}}
_KINDS: dict[str, dict[str, Any]] = {
    "a call": {},
    "a call with tools": {"tools": [{"type": "function", "function": _TOOL}]},
    "an answer with a schema": {"response_format": _FORM},
}


def warm_up(team: ServedTeam) -> None:
    """Answers a short conversation of each usual kind, and says how long its programs took to
    compile.

    A kind that a model does not offer is left out. Programs for prompts of other lengths, and for
    several calls at once, are compiled when the first such call comes.
    """
    with Compilations() as compilations:
        for what, calls in _usual_calls(team):
            _say(f"compiles what {what} needs")
            with contextlib.suppress(ApiError):
                for fields in calls:
                    asyncio.run(team.answer(read_call(json.dumps(fields).encode())))
            found = compilations.metrics()
            number, seconds = found["device/compiled"], found["time/compile_s"]
            _say(f"{what}: {number:.0f} programs in {seconds:.1f} s")


def _say(line: str) -> None:
    print(f"marft_jax: {line}", file=sys.stderr, flush=True)


def _usual_calls(team: ServedTeam) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The first and the second call of conversations; these begin with different texts, as the
    beginning of a prompt that was read before is not read again."""
    shared = {"max_tokens": 2, "temperature": 0}
    later = [{"role": "assistant", "content": "Seven."}, {"role": "user", "content": "Why?"}]
    first = [{"role": "user", "content": f"To the team, {_TEXT}"}]
    yield TEAM, [{"model": TEAM, "messages": first, **shared}]
    for model in team.one_of_each_base:
        for number, (kind, own) in enumerate(_KINDS.items()):
            first = [{"role": "user", "content": f"{number}. To {model}, {_TEXT}"}]
            calls = [{"messages": first}, {"messages": [*first, *later]}]
            yield f"{kind} ({model})", [{"model": model, **shared, **own, **c} for c in calls]
