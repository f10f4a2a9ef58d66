"""Syntax of an orchestrator's text: the agent that it calls, or that it is done."""

from __future__ import annotations

import re
from collections.abc import Sequence

from marft_jax.team.profiles import Profile

_DONE = re.compile(r"<\s*done\s*/?\s*>", re.IGNORECASE)
_CALL = re.compile(r"<\s*call\s*>(.*?)<\s*/\s*call\s*>", re.IGNORECASE | re.DOTALL)


def parse_call(text: str, names: Sequence[str]) -> str | None:
    """Finds the specialist that a text calls; None if the text says done or calls none of them.

    ``<done/>`` or ``<done>`` takes precedence over a call. Case and outer white space of names are
    ignored.

    >>> parse_call("Let us ask <call> Solver </call>", ["planner", "solver"])
    'solver'
    >>> parse_call("<call>solver</call> <done/>", ["solver"]) is None
    True
    """
    call = _CALL.search(text)
    if _DONE.search(text) or not call:
        return None
    wanted = call[1].strip().lower()
    return next((name for name in names if name.lower() == wanted), None)


def strip_calls(text: str) -> str:
    """Removes the tags from an orchestrator's text."""
    return _DONE.sub("", _CALL.sub("", text)).strip()


def default_prompt(specialists: Sequence[Profile]) -> str:
    """Writes the system prompt of an orchestrator without one: whom it can call, and how.

    A specialist without a description is listed by name.
    """
    listed = "\n".join(f"- {p.name}: {p.description}".rstrip(": ") for p in specialists)
    return (
        "You lead a team that solves a task together. Its members are:\n"
        f"{listed}\n"
        "Decide what happens next. To let a member act, write <call>name</call>. "
        "When the team has its answer, write <done/>."
    )
