"""Team files: the members of a team, and their workflow.

workflow: dag                        # --team.workflow overrides it
agents:
  - name: planner
    prompt: Plan how to solve the task. Do not solve it.
  - name: solver
    prompt: Solve the task. Put the final answer in \\boxed{}.
    answers: true
    max_new_tokens: 200
nodes:                               # dag: see dag.py
  - {id: plan, role: planner}
  - {id: solve, role: solver, message: Solve it in another way.}
edges: [[plan, solve]]
messages: [Plan now., Solve now.]    # shown to each agent when its turn comes
orchestrator: planner                # orchestrated: the agent that calls the others
judge: solver                        # debate: the agent that decides; default: the majority
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import yaml

from marft_jax.config import Team
from marft_jax.errors import BadInput
from marft_jax.formats import documents
from marft_jax.plugins import given_object
from marft_jax.team.dag import Graph, Node
from marft_jax.team.profiles import BUILT_IN, Profile, is_list
from marft_jax.types import Sampling

MAX_AGENTS = 300
"""The largest team that has been run. The time of a step grows with the square of this number: both
the tokens and the adapters beside each token grow with it."""


class Blueprint(NamedTuple):
    """Content of a team file: the members in acting order, and their workflow."""

    agents: tuple[Profile, ...]
    workflow: str = "sequential"
    graph: Graph = Graph()
    messages: tuple[str, ...] = ()  # one for each agent, "" for the default message; or none
    orchestrator: str | None = None  # agent that calls the others; None: the first agent
    judge: str | None = None  # agent that decides a debate; None: the majority


def without_effect(team: Team, step_reward: str | None, env: str) -> dict[str, str]:
    """Settings of ``team``, and ``algo.step_reward``, that nobody in the team file would read, with
    what they would need. What an agent's profile says itself, the settings cannot say."""
    if (given := given_object(team.file or "", "--team.file")) is not None:
        profiles, named = [dataclasses.asdict(agent) for agent in given.agents], given.workflow
    else:
        profiles, named = _as_written(team.file)
    workflow, default = team.workflow or named or "sequential", type(team)()
    found: dict[str, str] = {}
    for name, kind in (("rounds", "debate"), ("max_steps", "orchestrated")):
        if getattr(team, name) != getattr(default, name) and workflow != kind:
            found |= {f"team.{name}": f"--team.workflow {kind}"} if ":" not in workflow else {}
    if team.max_tool_calls != default.max_tool_calls and ":" not in env:
        if not any(profile.get("tools") for profile in profiles):
            found["team.max_tool_calls"] = "an agent with tools, or an --env.name of your own"
    given = {f"team.{n}": n for n in Sampling._fields if getattr(team, n) != getattr(default, n)}
    given |= {"algo.step_reward": "reward"} if step_reward is not None else {}
    for key, own in given.items():
        if profiles and all(profile.get(own) is not None for profile in profiles):
            found[key] = f"an agent in {team.file} without its own `{own}`"
    return found


def _as_written(file: str | None) -> tuple[list[dict[str, Any]], str | None]:
    """Reads agents and workflow of a team file without checks; empty if it cannot be read."""
    try:
        tree: Any = documents.read(file, "--team.file") if file else {}
    except BadInput:  # reported when the team is loaded
        return [], None
    rows: Any = tree.get("agents") if _is_tree(tree) else tree
    profiles = [row for row in rows if _is_tree(row)] if is_list(rows) else []
    return profiles, str(tree["workflow"]) if _is_tree(tree) and "workflow" in tree else None


def _is_tree(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def load_team(file: str | None) -> Blueprint:
    """Reads the team in a file; without a file the built-in planner and solver.

    A file is YAML or JSON: the keys above, or the bare list of the first MARFT release, whose keys
    are ``role``, ``prompt`` and ``with_answer`` (its ``device`` means nothing here: the mesh
    places every agent). The ChatML tags that it spells out around a prompt are taken off: the
    model's own chat template writes them. ``null`` among the messages is the usual one.

    Raises:
        BadInput: one line with the file, the agent and the field, and how to fix it.
    """
    if file is None:
        return Blueprint(BUILT_IN)
    if (given := given_object(file, "--team.file")) is not None:
        _check_team(given.agents, "--team.file")
        return given
    tree, folder = _tree(documents.read(file, "--team.file"), file), Path(file).parent
    agents = tuple(
        _profile(row, f"{file}: agent {i}", folder) for i, row in enumerate(tree["agents"], 1)
    )
    _check_team(agents, file)
    rows = {key: _list(tree.get(key), f"{file}: {key}") for key in ("messages", "nodes", "edges")}
    texts = ["" if text is None else text for text in rows["messages"]]
    messages = tuple(_text(text, f"{file}: messages") for text in texts)
    if messages and len(messages) != len(agents):
        what = f"one for each of the {len(agents)} agents"
        raise BadInput(f"{file}: messages: expected {what}, got {len(messages)}")
    if rows["edges"] and not rows["nodes"]:
        raise BadInput(f"{file}: edges: expected nodes too, got none; list them under `nodes:`")
    graph = Graph(
        tuple(_node(row, f"{file}: node {i}") for i, row in enumerate(rows["nodes"], 1)),
        tuple(_edge(row, f"{file}: edges") for row in rows["edges"]),
    )
    named = {key: _text(tree[key], f"{file}: {key}") for key in _TEXTS if tree.get(key)}
    return Blueprint(agents, graph=graph, messages=messages, **named)


def _check_team(agents: Sequence[Profile], source: str) -> None:
    """Checks the members as a whole: one answers, and names differ in more than case."""
    if not agents:
        what = "at least one agent, got none; list them under `agents:`"
        raise BadInput(f"{source}: expected {what}")
    if len(agents) > MAX_AGENTS:
        raise BadInput(f"{source}: expected at most {MAX_AGENTS} agents, got {len(agents)}")
    adapters = dict.fromkeys(profile.adapter or profile.name for profile in agents)
    for what, names in (("names", [p.name for p in agents]), ("adapters", adapters)):
        seen: set[str] = set()
        for name in names:
            folder = unicodedata.normalize("NFC", name.casefold())
            if folder in seen:
                what = f"distinct {what}, got {name!r} twice; rename one"
                raise BadInput(f"{source}: expected {what}")
            seen.add(folder)
    if not any(profile.answers for profile in agents):
        raise BadInput(
            f"{source}: expected an agent with `answers: true`, got none; "
            "add it to the agent that gives the team's answer"
        )


def dump_team(team: Blueprint) -> str:
    """Writes the team as text that ``load_team`` reads back to an equal value."""
    tree: dict[str, Any] = {key: value for key in _TEXTS if (value := getattr(team, key))}
    tree["agents"] = [
        {key: value for key, value in dataclasses.asdict(profile).items() if value is not None}
        for profile in team.agents
    ]
    tree |= {"messages": list(team.messages)} if team.messages else {}
    if team.graph.nodes:
        tree["nodes"] = [node._asdict() for node in team.graph.nodes]
        tree["edges"] = [list(edge) for edge in team.graph.edges]
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


_TEXTS = ("workflow", "orchestrator", "judge")
_KEYS = (*_TEXTS, "agents", "messages", "nodes", "edges")
_FIRST_RELEASE = {"role": "name", "with_answer": "answers"}
_CHATML = re.compile(r"<\|im_start\|>\s*system\b\s*:?\s*|<\|im_end\|>")


def _tree(loaded: Any, file: str) -> dict[str, Any]:
    if is_list(loaded):
        return {"agents": [_from_first_release(row) for row in loaded]}
    if not _is_tree(loaded) or not is_list(loaded.get("agents")):
        raise BadInput(f"{file}: expected a list of agents under `agents:`, got {loaded!r:.80}")
    _reject_unknown(loaded, _KEYS, file)
    return loaded


def _list(value: Any, where: str) -> list[Any]:
    if value and not is_list(value):
        raise BadInput(f"{where}: expected a list, got {value!r:.60}")
    return value or []


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadInput(f"{where}: expected text, got {value!r:.60}")
    return value


def _node(row: Any, where: str) -> Node:
    if not _is_tree(row) or not {"id", "role"} <= set(row):
        raise BadInput(f"{where}: expected {{id: ..., role: ...}}, got {row!r:.60}")
    _reject_unknown(row, Node._fields, where)
    return Node(**{key: _text(value, f"{where}: {key}") for key, value in row.items()})


def _edge(row: Any, where: str) -> tuple[str, str]:
    if not is_list(row) or len(row) != 2:
        raise BadInput(f"{where}: expected [from, to], got {row!r:.60}")
    source, destination = row
    return _text(source, where), _text(destination, where)


def _from_first_release(row: Any) -> Any:
    if not _is_tree(row):
        return row
    row = {_FIRST_RELEASE.get(key, key): row[key] for key in row if key != "device"}
    if isinstance(row.get("prompt"), str):
        row["prompt"] = _CHATML.sub("", row["prompt"]).strip()
    return row


def _profile(row: Any, where: str, folder: Path) -> Profile:
    fields = [field.name for field in dataclasses.fields(Profile)]
    if not _is_tree(row):
        raise BadInput(f"{where}: expected settings like `name: solver`, got {row!r:.80}")
    _reject_unknown(row, fields, where)
    if "name" not in row:
        raise BadInput(f"{where}: name is missing; add `name: ...`")
    try:
        profile = Profile(**{key: _as_value(key, value) for key, value in row.items()})
    except BadInput as error:
        raise BadInput(f"{where}, {error}") from error
    if profile.init is None:
        return profile
    init = folder / Path(profile.init).expanduser()  # relative to the team file
    return dataclasses.replace(profile, init=str(init.absolute()))


def _as_value(key: str, value: Any) -> Any:
    """YAML takes ``1e-1`` for text; where a number is expected it is one. Of stop texts and tools
    there may be one or a list."""
    if key in ("stop", "tools") and isinstance(value, str):
        return (value,)
    if key in ("stop", "tools") and is_list(value):
        return tuple(value)
    if key in ("temperature", "top_p", "min_p") and isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def _reject_unknown(row: Mapping[Any, Any], known: Sequence[str], where: str) -> None:
    for key in row:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise BadInput(f"{where}: unknown key {key!r}; {hint}")
