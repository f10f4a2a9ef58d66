"""Who acts when: a workflow is one Python generator per episode.

It is given the team and the first observation. It yields what it needs next and receives the
answers: a list of ``Act`` for the turns of agents that act side by side, ``Step(turns)`` for the
environment's answer. It returns when the episode is over. Your own topology is one such function,
named in the config as ``package.module:function``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from marft_jax.config import BadInput
from marft_jax.team.context import Team
from marft_jax.types import Turn


class Step(NamedTuple):
    """A workflow's wish that the environment answers these turns."""

    turns: Sequence[Turn]


Workflow = Generator[Any, Any, None]
"""Yields ``list[Act]`` and receives ``list[Turn]``; yields ``Step``, receives ``StepResult``."""


def sequential(team: Team, observation: str) -> Workflow:
    """One agent after another; each sees the actions of all before it in this step.

    D is the strict lower triangle (MARFT, section 3).
    """
    step, first = 0, 0
    while True:
        turns: list[Turn] = []
        for agent in range(len(team.profiles)):
            act = team.act(agent, observation, turns, step=step, first=first)
            turns += yield [act]
        result = yield Step(turns)
        if result.done:
            return
        observation, step, first = result.observation, step + 1, first + len(turns)


WORKFLOWS: dict[str, Callable[[Team, str], Workflow]] = {"sequential": sequential}


def find_workflow(name: str) -> Callable[[Team, str], Workflow]:
    """A built-in workflow, or the function that ``package.module:function`` names.

    Raises:
        BadInput: there is no such workflow.
    """
    if name in WORKFLOWS:
        return WORKFLOWS[name]
    module, colon, function = name.partition(":")
    if not colon:
        raise BadInput(
            f"--team.workflow: expected {', '.join(WORKFLOWS)} or package.module:function, "
            f"got {name!r}"
        )
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadInput(f"--team.workflow: cannot load {name!r}: {error}") from error
