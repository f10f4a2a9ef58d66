"""Writes ``client.py`` and ``turns.json``, which play an exported team through an endpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from marft_jax.team.prompts import Team
from marft_jax.team.scripts import STATIC, script_of
from marft_jax.types import THINKING, Sampling

_TASK, _TEXT = "\0task\0", "\0text{}\0"


def write(folder: Path, team: Team, temperature: float) -> None:
    """Writes both files for a team that ``is_static``.

    Args:
        temperature: of sampling of every agent, as in evaluations and chat.
    """
    script = script_of(team, _TASK, lambda turn, agent: _TEXT.format(turn))
    turns = [
        {
            "agent": team.names[agent],
            "messages": [{**m, "content": _pattern(m["content"], n)} for m in messages],
            "sampling": _sampling(team.sampling[agent], temperature, team.profiles[agent].format),
        }
        for n, (agent, messages) in enumerate(script)
    ]
    plan = {"thinking": THINKING.pattern, "turns": turns}
    text = json.dumps(plan, indent=2, ensure_ascii=False) + "\n"
    (folder / "turns.json").write_text(text, encoding="utf-8")
    shutil.copyfile(Path(__file__).with_name("client.py"), folder / "client.py")


def is_static(team: Team) -> bool:
    """True for a team that ``client.py`` can play: nothing decides on the way who acts, and what an
    agent is shown are texts alone."""
    has_tools = any(box.sources for box in team.tools)
    return team.workflow in STATIC and not (team.shared or team.view or has_tools)


def _pattern(text: str, turns: int) -> str:
    """Returns the text as a format string of the task and the texts of earlier turns."""
    text = text.replace("{", "{{").replace("}", "}}").replace(_TASK, "{task}")
    for n in range(turns):
        text = text.replace(_TEXT.format(n), f"{{texts[{n}]}}")
    return text


def _sampling(sampling: Sampling, temperature: float, schema: Any) -> dict[str, Any]:
    """Arguments of ``chat.completions.create``."""
    form = {"type": "json_schema", "json_schema": {"name": "text", "schema": schema}}
    return {
        "temperature": temperature,
        "max_tokens": sampling.max_new_tokens,
        "top_p": sampling.top_p,
        **({"stop": list(sampling.stop)} if sampling.stop else {}),
        **({"response_format": form} if schema else {}),
        "extra_body": {"top_k": sampling.top_k, "min_p": sampling.min_p},
    }
