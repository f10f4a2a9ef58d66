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
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import yaml
from pydantic import BeforeValidator, Field, TypeAdapter
from pydantic.dataclasses import dataclass
from pydantic_core import to_jsonable_python

from marft_jax.errors import BadInput
from marft_jax.formats import documents
from marft_jax.plugins import given_object
from marft_jax.settings.config import Config
from marft_jax.settings.setting import Section, read, setting, texts, with_absolute_paths
from marft_jax.team.bases import Base
from marft_jax.team.dag import Graph, Node
from marft_jax.team.profiles import BUILT_IN, Name, Profile
from marft_jax.team.teachers import Teacher
from marft_jax.types import MAIN

MAX_AGENTS = 300
"""The largest team that has been run. The time of a step grows with the square of this number: both
the tokens and the adapters beside each token grow with it."""


_Message = Annotated[
    str, BeforeValidator(lambda text: text or "", json_schema_input_type=str | None)
]


@dataclass(frozen=True)
class Blueprint(Section):
    """Content of a team file: the members in acting order, and their workflow."""

    agents: Annotated[tuple[Profile, ...], Field(max_length=MAX_AGENTS)]
    """Members, in the order in which they act."""
    workflow: str = "sequential"
    """Order in which agents act, as --team.workflow, which overrides it."""
    nodes: tuple[Node, ...] = setting((), needs="team.workflow dag or your own")
    """Acts of a dag."""
    edges: tuple[tuple[str, str], ...] = setting((), needs="team.workflow dag or your own")
    """Pairs of nodes of a dag: the second one sees the action of the first one."""
    messages: tuple[_Message, ...] = ()
    """Text that each agent is shown when its turn comes; none for an agent: the usual one."""
    orchestrator: str | None = setting(None, needs="team.workflow orchestrated or your own")
    """Agent that calls the others, in an orchestrated team; none: the first agent."""
    judge: str | None = setting(None, needs="team.workflow debate or your own")
    """Agent that decides a debate; none: the majority."""
    bases: dict[Name, Base] = dataclasses.field(default_factory=dict[str, Base])
    """Models besides --model.base, for agents and teachers that name them as `base`."""
    teacher: Teacher | None = None
    """Teacher of each agent that learns and has none of its own, with --algo.name distill."""

    @property
    def graph(self) -> Graph:
        """The acts of a dag and their dependencies."""
        return Graph(self.nodes, self.edges)

    @property
    def on(self) -> tuple[str, ...]:
        """The name of each member's base."""
        return tuple(profile.base or MAIN for profile in self.agents)

    @property
    def teachers(self) -> tuple[Teacher | None, ...]:
        """Teacher of each member, with its base; None for those without or that do not learn."""
        teachers = [(p.teacher or self.teacher) if p.learns else None for p in self.agents]
        pairs = zip(teachers, self.on, strict=True)
        return tuple(t and dataclasses.replace(t, base=t.base or base) for t, base in pairs)


PARTS = {
    "": Blueprint,
    "agents: ": Profile,
    "nodes: ": Node,
    "bases: ": Base,
    "teacher: ": Teacher,
}
"""The dataclasses of a team file, by the keys above theirs."""
_FIRST_RELEASE = {"role": "name", "with_answer": "answers"}
_CHATML = re.compile(r"<\|im_start\|>\s*system\b\s*:?\s*|<\|im_end\|>")


def schema() -> dict[str, Any]:
    """Returns the JSON schema of a team file, with the text of each key."""
    whole = TypeAdapter(Blueprint).json_schema()
    for kind in PARTS.values():
        properties = whole["$defs"].get(kind.__name__, whole)["properties"]
        for name, text in texts(kind).items():
            properties[name]["description"] = text
    return whole


def load_team(file: str | None) -> Blueprint:
    """Reads the team in a file; without a file the built-in planner and solver.

    A file is YAML or JSON: the keys above, or the bare list of the first MARFT release, whose keys
    are ``role``, ``prompt`` and ``with_answer`` (its ``device`` means nothing here: the mesh
    places every agent). The ChatML tags that it spells out around a prompt are taken off: the
    model's own chat template writes them. Paths are relative to the file.

    Raises:
        BadInput: one line with the file, the agent and the field, and how to fix it.
    """
    if file is None:
        return Blueprint(BUILT_IN)
    if (team := given_object(file, "--team.file")) is None:
        tree = documents.read(file, "--team.file")
        if _are_settings(tree):
            raise BadInput(
                f"--team.file {file}: expected a team, got settings; name it by --config"
            )
        if isinstance(tree, list):
            tree = {"agents": list(map(_modern, tree))}  # pyright: ignore[reportUnknownArgumentType]
        team = with_absolute_paths(read(Blueprint, tree, file), Path(file).parent)
    if fault := next(_faults(team), None):
        raise BadInput(f"{file}: {fault}")
    return team


def _are_settings(tree: Any) -> bool:
    return isinstance(tree, dict) and any(x.name in tree for x in dataclasses.fields(Config))


def _faults(team: Blueprint) -> Iterator[str]:
    """Yields what is wrong with the members together."""
    agents, messages, known = team.agents, len(team.messages), {MAIN, *team.bases}
    names = ", ".join(sorted(known))
    if not agents:
        yield "expected at least one agent, got none; list them under `agents:`"
    if messages not in (0, len(agents)):
        yield f"messages: expected one for each of the {len(agents)} agents, got {messages}"
    if team.edges and not team.nodes:
        yield "edges: expected nodes too, got none; list them under `nodes:`"
    if "team" in [profile.name for profile in agents]:
        yield "agents: expected other names than 'team', which names all of them; rename that agent"
    adapters = dict.fromkeys(profile.adapter or profile.name for profile in agents)
    for what, some in (("names", [p.name for p in agents]), ("adapters", [*adapters])):
        folded = [name.casefold() for name in some]
        if twice := [name for i, name in enumerate(some) if folded[i] in folded[:i]]:
            yield f"expected distinct {what}, got {twice[0]!r} twice; rename one"
    for profile, base in zip(agents, team.on, strict=True):
        if base not in known:
            where = f"agent {profile.name!r}: base"
            yield f"{where}: expected one of {names}, got {base!r}; list it under `bases:`"
    taught_by = {teacher.base or MAIN for teacher in team.teachers if teacher}
    if unknown := ", ".join(taught_by - known):
        yield f"teacher: base: expected one of {names}, got {unknown}; list it under `bases:`"
    if unused := {*team.bases} - {*team.on} - taught_by or {MAIN} & {*team.bases}:
        what = "bases that an agent or a teacher names, and none named main"
        yield f"bases: expected {what}, got {', '.join(sorted(unused))}"
    if not any(profile.answers for profile in agents):
        yield (
            "expected an agent with `answers: true`, got none; add it to the agent that gives the "
            "team's answer"
        )


def dump_team(team: Blueprint) -> str:
    """Writes the team as text that ``load_team`` reads back to an equal value."""
    tree = dataclasses.asdict(
        team, dict_factory=lambda pairs: {k: v for k, v in pairs if v not in (None, (), {})}
    )
    return yaml.safe_dump(to_jsonable_python(tree), sort_keys=False, allow_unicode=True)


def _modern(row: Any) -> Any:
    """Returns an agent of the first release with our names."""
    if isinstance(row, dict):
        items = cast(dict[str, Any], row).items()
        row = {_FIRST_RELEASE.get(key, key): value for key, value in items if key != "device"}
        if isinstance(prompt := row.get("prompt"), str):
            row["prompt"] = _CHATML.sub("", prompt).strip()
    return row
