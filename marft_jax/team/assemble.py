"""Makes a team from a team file and the settings, and checks that both fit together."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from marft_jax.errors import BadInput
from marft_jax.models.tokenizers.tokenizer import Message, Tokenizer
from marft_jax.plugins import load_extra
from marft_jax.settings import config
from marft_jax.team.dag import check_graph
from marft_jax.team.orchestrator import default_prompt
from marft_jax.team.profiles import Profile, last_answering
from marft_jax.team.prompts import Team
from marft_jax.team.team_files import Blueprint
from marft_jax.tools import Toolbox, check_form, for_model, form_with_calls, load_toolboxes

LOGGER = logging.getLogger("marft_jax")
_SOURCE = "--team.file"


def workflow_of(settings: config.Team, blueprint: Blueprint) -> str:
    """Returns the name of the workflow: of the setting, else of the team file."""
    return settings.workflow or blueprint.workflow


def make_team(
    settings: config.Team,
    adapters: Literal["per_agent", "shared"],
    blueprint: Blueprint,
    bases: Mapping[str, tuple[Tokenizer, int]],
) -> Team:
    """Makes the team of a blueprint.

    Args:
        adapters: an adapter for each agent, or one for all (``lora.mode``).
        bases: tokenizer of each base, and its context: longest prompt plus action, in tokens.

    Raises:
        BadInput: the team lacks its members or graph, or agents that share
            an adapter have different settings of it.
    """
    workflow, shared = workflow_of(settings, blueprint), settings.context == "shared"
    profiles, base_of = blueprint.agents, blueprint.on
    if shared and len(bases) > 1:
        raise BadInput(
            "--team.context shared: expected agents on one base, whose token ids a conversation "
            f"has, got {', '.join(bases)}; use own"
        )
    adapter_of = _adapters(profiles, base_of, adapters == "shared")
    learns: dict[str, dict[str, bool]] = {base: {} for base in bases}
    for base, adapter, profile in zip(base_of, adapter_of, profiles, strict=True):
        learns[base][adapter] = profile.learns
    numbers = {base: list(names) for base, names in learns.items()}
    team = Team(
        profiles=profiles,
        sampling=tuple(
            profile.sampling(config.clamp_to_context(settings, bases[base][1]))
            for base, profile in zip(base_of, profiles, strict=True)
        ),
        bases=base_of,
        owners=tuple(map(lambda base, name: numbers[base].index(name), base_of, adapter_of)),
        tokenizers=tuple(bases[base][0] for base in base_of),
        contexts=tuple(bases[base][1] for base in base_of),
        adapter_names={base: tuple(names) for base, names in learns.items()},
        trainable={base: tuple(names.values()) for base, names in learns.items()},
        workflow=workflow,
        shared=shared,
        anonymous=settings.anonymous,
        graph=blueprint.graph,
        messages=blueprint.messages or ("",) * len(profiles),
        rounds=settings.rounds,
        max_steps=settings.max_steps,
        teachers=blueprint.teachers,
        tools=_tools(profiles, shared or workflow == "program"),
    )
    for profile, sampling, context in zip(profiles, team.sampling, team.contexts, strict=True):
        if sampling.max_new_tokens >= context:
            raise BadInput(
                f"agent {profile.name!r}: max_new_tokens: expected less than {context}, the "
                f"context of its base, got {sampling.max_new_tokens}; lower it"
            )
    rest = settings.format_rest == "checked"
    team = team._replace(forms=tuple(_form(team, i, rest) for i in range(len(profiles))))
    return team._replace(**_PARTS[workflow](team, blueprint)) if workflow in _PARTS else team


def _dag(team: Team, blueprint: Blueprint) -> dict[str, Any]:
    check_graph(blueprint.graph, team.names, _SOURCE)
    return {"opener": team.names.index(blueprint.graph.layers()[0][0].role)}


def _orchestrated(team: Team, blueprint: Blueprint) -> dict[str, Any]:
    """Writes a prompt for an orchestrator without one."""
    first = _member(team, "orchestrator", blueprint.orchestrator) or 0
    profiles = list(team.profiles)
    lead = profiles.pop(first)
    if team.anonymous:
        raise BadInput("--team.anonymous: expected names, by which an orchestrator calls others")
    if not any(profile.answers for profile in profiles):
        raise BadInput(
            f"{_SOURCE}: expected a specialist with `answers: true` besides the orchestrator "
            f"{lead.name!r}"
        )
    lead = dataclasses.replace(lead, prompt=lead.prompt or default_prompt(profiles))
    profiles.insert(first, lead)
    return {"profiles": tuple(profiles), "opener": first, "orchestrator": first}


def _debate(team: Team, blueprint: Blueprint) -> dict[str, Any]:
    judge = _member(team, "judge", blueprint.judge)
    debaters = len(team.profiles) - (judge is not None)
    if debaters < 2:
        raise BadInput(f"{_SOURCE}: expected at least 2 debaters, got {debaters}")
    return {"opener": 1 if judge == 0 else 0, "judge": judge}


def _solo(team: Team, blueprint: Blueprint) -> dict[str, Any]:
    return {"opener": last_answering(team.profiles)}


_PARTS: dict[str, Callable[[Team, Blueprint], dict[str, Any]]] = {
    "dag": _dag,
    "orchestrated": _orchestrated,
    "debate": _debate,
    "solo": _solo,
}
"""Checks of workflows with further keys; each returns fields of the team."""


def _form(team: Team, agent: int, rest: bool) -> str:
    """Checks an agent's tools and schema; returns the form of its texts: JSON of its schema, or a
    call of a tool."""
    form, tokenizer = team.profiles[agent].form, team.tokenizers[agent]
    where, tools = f"{_SOURCE}: agent {team.names[agent]!r}: ", team.tools[agent].definitions
    if tools:
        check_form(tokenizer)
        _warn_of_length(team, agent)
    if not form:
        return ""
    load_extra("form.check")(form, f"{where}format", tokenizer, rest)
    if not tools:
        return form
    try:
        form = form_with_calls(form, tools, tokenizer)
    except BadInput as error:
        raise BadInput(f"{where}{error}") from None
    load_extra("form.check")(form, f"{where}tools", tokenizer)
    return form


def _warn_of_length(team: Team, agent: int) -> None:
    """Warns of tools that make an agent's prompts longer by a quarter of the context."""
    tokenizer, tools = team.tokenizers[agent], team.tools[agent].definitions
    messages: list[Message] = [{"role": "user", "content": "a"}]
    whole = len(tokenizer.chat(*for_model(messages, tools, tokenizer)))
    longer, context = whole - len(tokenizer.chat(messages)), team.contexts[agent]
    if longer > context / 4:
        LOGGER.warning(
            "agent %s: its %d tools make each prompt %d tokens longer, of --model.context %d; an "
            "MCP server offers fewer with `only: [NAME, ...]`",
            team.names[agent], len(tools), longer, context,
        )  # fmt: skip


def _tools(profiles: tuple[Profile, ...], refused: bool) -> tuple[Toolbox, ...]:
    """Loads the toolbox of each agent."""
    if refused and any(profile.tools for profile in profiles):
        raise BadInput(
            f"{_SOURCE}: tools: expected --team.context own and another workflow than program, "
            "which brings its own tools; take the tools out, or change that"
        )
    return load_toolboxes({profile.name: profile.tools or () for profile in profiles}, _SOURCE)


def _member(team: Team, part: str, name: str | None) -> int | None:
    if name is None:
        return None
    if name not in team.names:
        raise BadInput(f"{_SOURCE}: {part}: expected one of {', '.join(team.names)}, got {name!r}")
    return team.names.index(name)


def _adapters(profiles: Sequence[Profile], base_of: Sequence[str], shared: bool) -> list[str]:
    """Returns the name of each agent's adapter."""
    wanted = [
        "team" if shared and profile.past is None else profile.adapter or profile.name
        for profile in profiles
    ]
    members: dict[tuple[str, str], list[Profile]] = {}
    for name, base, profile in zip(wanted, base_of, profiles, strict=True):
        if profile.adapter is not None and any(n == name and b != base for n, b in members):
            raise BadInput(
                f"{_SOURCE}: agent {profile.name!r}: adapter: expected agents on one base to share "
                f"{name!r}, got {base} and another one"
            )
        members.setdefault((name, base), []).append(profile)
    for (name, _), sharing in members.items():
        for field in ("trainable", "past", "init"):
            values = [getattr(member, field) for member in sharing]
            if any(value != values[0] for value in values):
                raise BadInput(
                    f"{_SOURCE}: {', '.join(m.name for m in sharing)} share the adapter {name!r}: "
                    f"expected one value of {field}, got {values}"
                )
    learning = {(p.name, base) for p, base in zip(profiles, base_of, strict=True) if p.learns}
    if not learning:
        raise BadInput(f"{_SOURCE}: expected an agent that learns, but all have `trainable: false`")
    for profile, base in zip(profiles, base_of, strict=True):
        if profile.past is not None and (profile.past, base) not in learning:
            known = ", ".join(name for name, its_base in sorted(learning) if its_base == base)
            raise BadInput(
                f"{_SOURCE}: agent {profile.name!r}: past: expected an agent on its base that "
                f"learns, of {known or 'which there is none'}, got {profile.past!r}"
            )
    return wanted
