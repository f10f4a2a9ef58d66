"""Writes ``team.py`` and ``turns.json``, which play an exported team with transformers and peft."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marft_jax.plugins import load_extra
from marft_jax.team.profiles import last_answering
from marft_jax.team.prompts import Team
from marft_jax.tools import calculator, for_model, form_name, form_with_calls, forms, name_of
from marft_jax.tools.calls import openings_of
from marft_jax.types import THINKING

_Model = tuple[str, str]
_Turn = tuple[int, list[int], str]  # the agent, the earlier turns that it sees, its message


def write(
    folder: Path,
    team: Team,
    models: Sequence[_Model],
    temperature: float,
    most_calls: int,
) -> bool:
    """Writes both files, if the order of the turns is known before the team plays.

    Args:
        models: where the loader of the adapters finds each base, in the order of ``team.adapters``,
            and the class of transformers that loads it (``huggingface.loader_of``).
        temperature: sampling temperature of every agent, as in evaluations and chat.
        most_calls: times that an agent may call tools in a turn.

    Returns:
        False, with nothing written, for a workflow that decides the next turn while it plays, for a
        conversation that all agents share, and for an environment with a view per agent.
    """
    if (turns := order_of(team)) is None:
        return False
    lacks = "; ".join(lacking(team, plays=True))
    plain = {
        "lacks": lacks and f"team.py plays without what the agents were trained with: {lacks}\n",
        "bases": [_base(team, *own) for own in zip(team.adapters, models, strict=True)],
        "line": "{1}" if team.anonymous else "{0}: {1}",
        "thinking": THINKING.pattern,
        "turns": [
            _plain(team, turn, temperature) | _tools(team, turn[0], most_calls) for turn in turns
        ],
    }
    text = json.dumps(plain, indent=2, ensure_ascii=False) + "\n"
    (folder / "turns.json").write_text(text, encoding="utf-8")
    here = Path(__file__).parent
    for source in (here / "team.py", here / "team_tools.py", Path(forms.__file__)):
        shutil.copyfile(source, folder / source.name)
    alone = Path(calculator.__file__).read_text("utf-8")
    imported = "from marft_jax.tools.tool import ToolError"
    (folder / "calculator.py").write_text(
        alone.replace(imported, "class ToolError(ValueError): ...")
    )
    return True


def order_of(team: Team) -> list[_Turn] | None:
    """Lists the turns that ``team.py`` plays; None where it cannot play the team."""
    return None if team.shared or team.view else turns_of(team, team.workflow)


def _carried(team: Team, agent: int) -> list[dict[str, Any]]:
    """The tools of an agent that ``team.py`` calls: entries of the team file with their names."""
    entries, sources = team.profiles[agent].tools or (), team.tools_of(agent).sources
    if not sources or form_name(team.tokenizers[agent]) is None:
        return []
    found = list[dict[str, Any]]()
    for entry, source in zip(entries, sources, strict=True):
        name = name_of(entry)
        own = {"function": {"calculator": "calculator:calculator"}.get(name, name)}
        if name == "mcp" and not isinstance(entry, str):
            own = {"mcp": entry["mcp"]}
        if name != "python":
            names = [tool.name for tool in source.tools]
            most = max((tool.options.characters for tool in source.tools), default=0)
            found.append({"names": names, "entry": own, "characters": most})
    return found


def _tools(team: Team, agent: int, most_calls: int) -> dict[str, Any]:
    """What ``team.py`` knows of an agent's tools; those that it cannot call are not shown."""
    carried, tokenizer = _carried(team, agent), team.tokenizers[agent]
    names = {name for own in carried for name in own["names"]}
    all_of_them = team.tools_of(agent).definitions
    tools = [tool for tool in all_of_them if tool["function"]["name"] in names]
    opening = [{"role": "system", "content": "" if team.anonymous else team.profiles[agent].prompt}]
    messages, shown = for_model(opening, tools, tokenizer)
    form = team.profiles[agent].form
    grammar = functools.partial(load_extra("form.grammar"), tokenizer=tokenizer) if form else str
    calling = form and form_with_calls(form, tools, tokenizer)
    return {
        "grammar": grammar(form),
        "calling": grammar(calling),
        "openings": openings_of(calling) if form else [""],
        "system": messages[0]["content"].strip(),
        "form": form_name(tokenizer) if tools else "",
        "tools": carried,
        "definitions": tools,
        "shown": list(shown),
        "most_calls": most_calls if tools else 0,
    }


def lacking(team: Team, plays: bool = False) -> list[str]:
    """Names what agents were trained with and an export does not give them.

    Args:
        plays: ``team.py`` is exported, which calls most tools and follows formats.
    """
    found = list[str]()
    for agent, profile in enumerate(team.profiles):
        carried = {n for own in _carried(team, agent) for n in own["names"]} if plays else set()
        names = [tool.name for tool in team.tools_of(agent).tools if tool.name not in carried]
        if names:
            found.append(f"tools of {profile.name} ({', '.join(names)})")
        if profile.form and not plays:
            found.append(f"the format of {profile.name}'s texts (a JSON schema)")
    return found


def turns_of(team: Team, workflow: str) -> list[_Turn] | None:
    """Lists the turns of one step, or returns None if they depend on what the agents write."""
    messages = team.messages or ("",) * len(team.profiles)
    if workflow == "sequential":
        return [(n, list(range(n)), message) for n, message in enumerate(messages)]
    if workflow == "solo":
        agent = last_answering(team.profiles)
        return [(agent, [], messages[agent])]
    if workflow != "dag":
        return None
    nodes = [node for layer in team.graph.layers() for node in layer]
    found = list[_Turn]()
    for node in nodes:
        before, agent = team.graph.ancestors(node), team.names.index(node.role)
        sees = [i for i, other in enumerate(nodes) if other.id in before]
        found.append((agent, sees, node.message or messages[agent]))
    return found


def _base(team: Team, name: str, model: _Model) -> dict[str, Any]:
    first = team.bases.index(name)
    tokenizer = team.tokenizers[first]
    folded, template = tokenizer.rendering()
    return {
        "model": model[0],
        "loader": model[1],
        "adapters": [team.folder_of(name, n) for n in range(team.adapters[name])],
        "context": team.contexts[first],
        "eos": list(tokenizer.eos_ids),
        "system_in_user": folded,
        "template": template,
    }


def _plain(team: Team, turn: _Turn, temperature: float) -> dict[str, Any]:
    agent, sees, message = turn
    profile, sampling = team.profiles[agent], team.sampling[agent]
    filters = {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
    drawn = {"do_sample": True, "temperature": temperature} | filters
    ends = {"stop_strings": list(sampling.stop)} if sampling.stop else {}
    return {
        "agent": profile.name,
        "base": list(team.adapters).index(team.bases[agent]),
        "adapter": team.folder_of(team.bases[agent], team.owners[agent]),
        "message": message,
        "sees": sees,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": "|".join(map(re.escape, sampling.stop)) or "(?!)",  # which is nowhere
        "sampling": (drawn if temperature > 0 else {"do_sample": False}) | ends,
    }
