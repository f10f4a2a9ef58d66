"""The turns of a step without a model: who acts when, and what each agent is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from marft_jax.models.tokenizers.tokenizer import Message
from marft_jax.team.prompts import State, Team
from marft_jax.team.protocol import Step
from marft_jax.team.workflows import find_workflow
from marft_jax.types import Turn

STATIC = ("sequential", "dag", "debate", "solo")
"""Workflows whose turns and their order do not depend on what the agents write."""
_NO_IDS = np.zeros(0, np.int32)


class _Script(Team):
    """A team whose acts are the messages that its agents are shown."""

    def act(self, agent: int, state: State, turns: Sequence[Turn] = (), message: str = "") -> Any:
        return agent, self.shown(agent, state, turns, message)


def script_of(
    team: Team, task: str, write: Callable[[int, int], str]
) -> list[tuple[int, list[Message]]]:
    """Plays a step of the team's workflow; returns the agent of each turn, and its messages.

    Args:
        write: the text of a turn, from the turn's number and its agent.
    """
    script = list[tuple[int, list[Message]]]()
    play = find_workflow(team.workflow)(_Script(*team), task)
    acts: list[tuple[int, list[Message]]] | Step = next(play)
    while not isinstance(acts, Step):
        turns = list[Turn]()
        for number, (agent, _) in enumerate(acts, len(script)):
            profile, text, ids = team.profiles[agent], write(number, agent), _NO_IDS
            turn = Turn(agent, profile.name, 0, ids, ids, ids, text, profile.answers, (), False, 1)
            turns.append(turn._replace(index=number))
        script += acts
        acts = play.send(turns)
    return script
