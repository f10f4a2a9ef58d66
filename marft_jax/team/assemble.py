"""From a team file and the settings to a team that can act; what must fit together is checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from marft_jax.config import BadInput, Config
from marft_jax.models.tokenizers.tokenizer import Tokenizer
from marft_jax.team.dag import check_graph
from marft_jax.team.orchestrator import default_prompt
from marft_jax.team.profiles import Profile, last_answering
from marft_jax.team.prompts import Team
from marft_jax.team.team_files import Blueprint
from marft_jax.team.workflows import find_workflow

_SOURCE = "--team.file"


def workflow_of(config: Config, blueprint: Blueprint) -> str:
    """The name of the workflow: the setting, or what the team file says."""
    return config.team.workflow or blueprint.workflow


def make_team(config: Config, blueprint: Blueprint, context: int, tokenizer: Tokenizer) -> Team:
    """Makes the team of a blueprint, as the sections ``team`` and ``lora`` want it.

    Raises:
        BadInput: an unknown workflow, one that the team has no members or graph for, or agents
            that share an adapter and disagree about it.
    """
    workflow = workflow_of(config, blueprint)
    find_workflow(workflow)
    parts = _PARTS[workflow](config, blueprint) if workflow in _PARTS else _Parts(blueprint.agents)
    wanted = _adapters(parts.profiles, config.lora.mode == "shared")
    trainable = {n: p.trainable for n, p in zip(wanted, parts.profiles, strict=True)}
    names = tuple(trainable)
    return Team(
        profiles=parts.profiles,
        sampling=tuple(profile.sampling(config.team) for profile in parts.profiles),
        owners=tuple(names.index(name) for name in wanted),
        adapter_names=names,
        trainable=tuple(trainable.values()),
        context=context,
        tokenizer=tokenizer,
        shared=config.team.context == "shared",
        anonymous=config.team.anonymous,
        graph=blueprint.graph,
        messages=blueprint.messages,
        opener=parts.opener,
        orchestrator=parts.orchestrator,
        judge=parts.judge,
        rounds=config.team.rounds,
        max_steps=config.team.max_steps,
    )


class _Parts(NamedTuple):
    """Parts that the members play in a workflow; fields as of ``Team``."""

    profiles: tuple[Profile, ...]
    opener: int = 0
    orchestrator: int | None = None
    judge: int | None = None


def _dag(config: Config, blueprint: Blueprint) -> _Parts:
    names = [profile.name for profile in blueprint.agents]
    check_graph(blueprint.graph, names, config.team.file or _SOURCE)
    return _Parts(blueprint.agents, opener=names.index(blueprint.graph.layers()[0][0].role))


def _orchestrated(config: Config, blueprint: Blueprint) -> _Parts:
    """An orchestrator without a prompt gets one that says whom it can call."""
    first = _member(blueprint, "orchestrator") or 0
    lead = blueprint.agents[first]
    specialists = [profile for profile in blueprint.agents if profile is not lead]
    if config.team.anonymous:
        raise BadInput(
            "--team.anonymous: an orchestrator calls others by name; use another workflow"
        )
    if not any(profile.answers for profile in specialists):
        raise BadInput(
            f"{_SOURCE}: an orchestrator needs a specialist with `answers: true`, besides "
            f"{lead.name!r}, who calls them"
        )
    lead = dataclasses.replace(lead, prompt=lead.prompt or default_prompt(specialists))
    profiles = (*blueprint.agents[:first], lead, *blueprint.agents[first + 1 :])
    return _Parts(profiles, first, orchestrator=first)


def _debate(config: Config, blueprint: Blueprint) -> _Parts:
    judge = _member(blueprint, "judge")
    debaters = len(blueprint.agents) - (judge is not None)
    if debaters < 2:
        raise BadInput(f"{_SOURCE}: a debate needs at least 2 debaters, got {debaters}")
    return _Parts(blueprint.agents, opener=1 if judge == 0 else 0, judge=judge)


def _solo(config: Config, blueprint: Blueprint) -> _Parts:
    return _Parts(blueprint.agents, opener=last_answering(blueprint.agents))


_PARTS: dict[str, Callable[[Config, Blueprint], _Parts]] = {
    "dag": _dag,
    "orchestrated": _orchestrated,
    "debate": _debate,
    "solo": _solo,
}


def _member(blueprint: Blueprint, part: str) -> int | None:
    name, names = getattr(blueprint, part), [profile.name for profile in blueprint.agents]
    if name is None:
        return None
    if name not in names:
        raise BadInput(f"{_SOURCE}: {part}: expected one of {', '.join(names)}, got {name!r}")
    return names.index(name)


def _adapters(profiles: tuple[Profile, ...], shared: bool) -> list[str]:
    """The name of each agent's adapter."""
    wanted = ["team" if shared else profile.adapter or profile.name for profile in profiles]
    for name in wanted:
        members = [p for p, own in zip(profiles, wanted, strict=True) if own == name]
        for field in ("trainable", "init"):
            values = [getattr(member, field) for member in members]
            if any(value != values[0] for value in values):
                raise BadInput(
                    f"{_SOURCE}: {', '.join(m.name for m in members)} share the adapter {name!r}: "
                    f"expected one value of {field}, got {values}"
                )
    if not any(profile.trainable for profile in profiles):
        raise BadInput(f"{_SOURCE}: every agent has `trainable: false`; nothing would learn")
    return wanted
