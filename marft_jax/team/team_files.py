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
bases:                               # models besides --model.base: see bases.py
  large: {model: models/qwen-7b, quantize: nf4}      # for agents with `base: large`
messages: [Plan now., Solve now.]    # shown to each agent when its turn comes
orchestrator: planner                # orchestrated: the agent that calls the others
judge: solver                        # debate: the agent that decides; default: the majority
teacher: {base: large, sees: answer} # --algo.name distill: see teachers.py; also of single agents
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import yaml
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from marft_jax.errors import BadInput
from marft_jax.formats import documents
from marft_jax.plugins import given_object
from marft_jax.setting import fault_of, unknown_key
from marft_jax.team.bases import Base
from marft_jax.team.dag import Graph
from marft_jax.team.profiles import BUILT_IN, Name, Profile
from marft_jax.team.teachers import Teacher
from marft_jax.types import MAIN

MAX_AGENTS = 300
"""The largest team that has been run. The time of a step grows with the square of this number: both
the tokens and the adapters beside each token grow with it."""


class Blueprint(NamedTuple):
    """Content of a team file: the members in acting order, and their workflow."""

    agents: Annotated[tuple[Profile, ...], Field(max_length=MAX_AGENTS)]
    workflow: str = "sequential"
    graph: Graph = Graph()
    # one for each agent, "" for the default message; or none
    messages: tuple[Annotated[str, BeforeValidator(lambda text: text or "")], ...] = ()
    orchestrator: str | None = None  # agent that calls the others; None: the first agent
    judge: str | None = None  # agent that decides a debate; None: the majority
    bases: dict[Name, Base] = {}  # of agents with ``base``, by its name
    teacher: Teacher | None = None  # of each agent that learns and has no teacher of its own

    @property
    def on(self) -> tuple[str, ...]:
        """The name of each member's base."""
        return tuple(profile.base or MAIN for profile in self.agents)

    @property
    def teachers(self) -> tuple[Teacher | None, ...]:
        """Teacher of each member, with its base; None for those without or that do not learn."""
        found = [(p.teacher or self.teacher) if p.learns else None for p in self.agents]
        pairs = zip(found, self.on, strict=True)
        return tuple(t and dataclasses.replace(t, base=t.base or base) for t, base in pairs)


_Member = TypeVar("_Member", Profile, Teacher | None)
_BLUEPRINT = TypeAdapter(Blueprint)
_READ = TypeAdapter[dict[str, Any] | list[dict[str, Any]]](dict[str, Any] | list[dict[str, Any]])
_KEYS = {*Blueprint._fields, *Graph._fields} - {"graph"}
_FIRST_RELEASE = {"role": "name", "with_answer": "answers"}
_CHATML = re.compile(r"<\|im_start\|>\s*system\b\s*:?\s*|<\|im_end\|>")


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
        _check_team(given, "--team.file")
        return given
    tree = _tree(documents.read(file, "--team.file"), file)
    try:
        team = _BLUEPRINT.validate_python(tree)
    except ValidationError as error:
        fault = fault_of(error, Blueprint).removeprefix("graph.")
        raise BadInput(f"{file}: {fault}") from None
    _check_team(team, file)
    folder = Path(file).parent
    return team._replace(
        agents=tuple(
            dataclasses.replace(_beside(profile, folder), teacher=_beside(profile.teacher, folder))
            for profile in team.agents
        ),
        bases={name: base.beside(folder) for name, base in team.bases.items()},
        teacher=_beside(team.teacher, folder),
    )


def _beside(member: _Member, folder: Path) -> _Member:
    """Makes the path of an adapter absolute; it is relative to the team file."""
    if member is None or member.init is None:
        return member
    init = os.path.abspath(folder / Path(member.init).expanduser())
    return dataclasses.replace(member, init=init)


def _check_team(team: Blueprint, source: str) -> None:
    """Checks what the members are together: one answers, and names differ in more than case."""
    agents = team.agents
    if not agents:
        what = "at least one agent, got none; list them under `agents:`"
        raise BadInput(f"{source}: expected {what}")
    if team.messages and len(team.messages) != len(agents):
        what = f"one for each of the {len(agents)} agents"
        raise BadInput(f"{source}: messages: expected {what}, got {len(team.messages)}")
    if team.graph.edges and not team.graph.nodes:
        raise BadInput(f"{source}: edges: expected nodes too, got none; list them under `nodes:`")
    adapters = dict.fromkeys(profile.adapter or profile.name for profile in agents)
    for what, names in (("names", [p.name for p in agents]), ("adapters", adapters)):
        seen: set[str] = set()
        for name in names:
            if name.casefold() in seen:
                what = f"distinct {what}, got {name!r} twice; rename one"
                raise BadInput(f"{source}: expected {what}")
            seen.add(name.casefold())
    known = {MAIN, *team.bases}
    for profile, base in zip(agents, team.on, strict=True):
        if base not in known:
            what = f"one of {', '.join(sorted(known))}, got {base!r}; list it under `bases:`"
            raise BadInput(f"{source}: agent {profile.name!r}: base: expected {what}")
    taught_by = {teacher.base for teacher in team.teachers if teacher}
    if unknown := taught_by - known:
        what = f"one of {', '.join(sorted(known))}, got {', '.join(map(str, unknown))}"
        raise BadInput(f"{source}: teacher: base: expected {what}; list it under `bases:`")
    if unused := {*team.bases} - {*team.on} - taught_by or {MAIN} & {*team.bases}:
        what = "bases that an agent or a teacher names, and none named main"
        raise BadInput(f"{source}: bases: expected {what}, got {', '.join(sorted(unused))}")
    if not any(profile.answers for profile in agents):
        raise BadInput(
            f"{source}: expected an agent with `answers: true`, got none; "
            "add it to the agent that gives the team's answer"
        )


def dump_team(team: Blueprint) -> str:
    """Writes the team as text that ``load_team`` reads back to an equal value."""
    named = {key: getattr(team, key) for key in ("workflow", "orchestrator", "judge")}
    tree: dict[str, Any] = {key: value for key, value in named.items() if value}
    tree["agents"] = [_given(profile) for profile in team.agents]
    tree |= {"messages": list(team.messages)} if team.messages else {}
    tree |= {"teacher": _given(team.teacher)} if team.teacher else {}
    if team.bases:
        tree["bases"] = {name: _given(base) for name, base in team.bases.items()}
    if team.graph.nodes:
        tree["nodes"] = [node._asdict() for node in team.graph.nodes]
        tree["edges"] = [list(edge) for edge in team.graph.edges]
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _given(what: Profile | Base | Teacher) -> dict[str, Any]:
    """Returns the fields that are not None, also those of a teacher in a profile."""
    return dataclasses.asdict(
        what, dict_factory=lambda pairs: {key: value for key, value in pairs if value is not None}
    )


def _tree(loaded: Any, file: str) -> dict[str, Any]:
    """Returns the fields of a blueprint as they stand in a file; ``null`` is the default."""
    try:
        tree = _READ.validate_python(loaded)
    except ValidationError:
        tree = {}
    if isinstance(tree, list):
        tree = {"agents": [_modern(row) for row in tree]}
    if not isinstance(tree.get("agents"), list):
        raise BadInput(f"{file}: expected a list of agents under `agents:`, got {loaded!r:.80}")
    for key in tree.keys() - _KEYS:
        raise BadInput(f"{file}: {key}: {unknown_key(str(key), _KEYS)}")
    tree = {key: value for key, value in tree.items() if value is not None}
    graph = {key: tree.pop(key) for key in Graph._fields if key in tree}
    return tree | ({"graph": graph} if graph else {})


def _modern(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an agent of the first release with our names."""
    row = {_FIRST_RELEASE.get(key, key): row[key] for key in row if key != "device"}
    return row | {"prompt": _CHATML.sub("", row.get("prompt", "")).strip()}
