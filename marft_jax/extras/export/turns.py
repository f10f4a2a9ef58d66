"""Writes ``client.py`` and ``turns.json``, which play an exported team through an endpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from marft_jax.team.prompts import State, Team
from marft_jax.team.workflows import find_workflow
from marft_jax.types import THINKING, Sampling, Turn

_STATIC = ("sequential", "dag", "debate", "solo")
"""Workflows whose turns and their order do not depend on what the agents write."""
_TASK, _TEXT = "\0task\0", "\0text{}\0"
_NO_IDS = np.zeros(0, np.int32)


class _Script(Team):
    """A team whose acts are the messages that are shown."""

    def act(self, agent: int, state: State, turns: Sequence[Turn] = (), message: str = "") -> Any:
        return agent, self.shown(agent, state, turns, message)


def write(folder: Path, team: Team, temperature: float) -> None:
    """Writes both files for a team that ``is_static``.

    Args:
        temperature: of sampling of every agent, as in evaluations and chat.
    """
    turns = [
        {
            "agent": team.names[agent],
            "messages": [{**own, "content": _pattern(own["content"], n)} for own in messages],
            "sampling": _sampling(team.sampling[agent], temperature, team.profiles[agent].format),
        }
        for n, (agent, messages) in enumerate(_played(team))
    ]
    plan = {"thinking": THINKING.pattern, "turns": turns}
    text = json.dumps(plan, indent=2, ensure_ascii=False) + "\n"
    (folder / "turns.json").write_text(text, encoding="utf-8")
    shutil.copyfile(Path(__file__).with_name("client.py"), folder / "client.py")


def is_static(team: Team) -> bool:
    """True for a team that ``client.py`` can play: nothing decides on the way who acts, and what an
    agent is shown are texts alone."""
    has_tools = any(box.sources for box in team.tools)
    return team.workflow in _STATIC and not (team.shared or team.view or has_tools)


def _played(team: Team) -> list[tuple[int, list[dict[str, Any]]]]:
    """Plays a step of the team's own workflow; agents and messages of its turns, with marks for the
    task and the texts."""
    found = list[tuple[int, list[dict[str, Any]]]]()
    play = find_workflow(team.workflow)(_Script(*team), _TASK)
    acts = next(play)
    while isinstance(acts, list):
        first = len(found)
        found += acts
        acts = play.send([_turn(team, first + i, agent) for i, (agent, _) in enumerate(acts)])
    return found


def _turn(team: Team, number: int, agent: int) -> Turn:
    profile, none = team.profiles[agent], _NO_IDS
    text, graded = _TEXT.format(number), profile.answers
    return Turn(agent, profile.name, 0, none, none, none, text, graded, (), False, 1.0, number)


def _pattern(text: str, turns: int) -> str:
    """Returns the text as a format string of the task and the texts of earlier turns."""
    text = text.replace("{", "{{").replace("}", "}}").replace(_TASK, "{task}")
    for n in range(turns):
        text = text.replace(_TEXT.format(n), f"{{texts[{n}]}}")
    return text


def _sampling(own: Sampling, temperature: float, schema: Any) -> dict[str, Any]:
    """Arguments of ``chat.completions.create``."""
    form = {"type": "json_schema", "json_schema": {"name": "text", "schema": schema}}
    return {
        "temperature": temperature,
        "max_tokens": own.max_new_tokens,
        "top_p": own.top_p,
        **({"stop": list(own.stop)} if own.stop else {}),
        **({"response_format": form} if schema else {}),
        "extra_body": {"top_k": own.top_k, "min_p": own.min_p},
    }
