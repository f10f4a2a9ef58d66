"""From a team file and the settings to a team that can act; what must fit together is checked."""

from __future__ import annotations

import dataclasses

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
    """The team of a blueprint, as the sections ``team`` and ``lora`` want it.

    Raises:
        BadInput: an unknown workflow, one that the team has no members or graph for, or agents
            that share an adapter and disagree about it.
    """
    workflow = workflow_of(config, blueprint)
    find_workflow(workflow)
    orchestrator = judge = None
    profiles = blueprint.agents
    names = [profile.name for profile in profiles]
    opener = 0
    if workflow == "orchestrated":
        orchestrator = opener = _member(blueprint.orchestrator, "orchestrator", names) or 0
        profiles = _orchestrated(profiles, orchestrator, config.team.anonymous)
    elif workflow == "debate":
        judge = _member(blueprint.judge, "judge", names)
        opener = 1 if judge == 0 else 0
        _check_debate(profiles, judge)
    elif workflow == "dag":
        check_graph(blueprint.graph, names, config.team.file or _SOURCE)
        opener = names.index(blueprint.graph.layers()[0][0].role)
    elif workflow == "solo":
        opener = last_answering(profiles)
    wanted = _adapters(profiles, config.lora.mode == "shared")
    adapter_names = tuple(dict.fromkeys(wanted))
    trainable = dict(zip(wanted, (profile.trainable for profile in profiles), strict=True))
    return Team(
        profiles=profiles,
        sampling=tuple(profile.sampling(config.team) for profile in profiles),
        owners=tuple(adapter_names.index(name) for name in wanted),
        adapter_names=adapter_names,
        trainable=tuple(trainable[name] for name in adapter_names),
        context=context,
        tokenizer=tokenizer,
        shared=config.team.context == "shared",
        anonymous=config.team.anonymous,
        graph=blueprint.graph,
        messages=blueprint.messages,
        opener=opener,
        orchestrator=orchestrator,
        judge=judge,
        rounds=config.team.rounds,
        max_steps=config.team.max_steps,
    )


def _member(name: str | None, what: str, names: list[str]) -> int | None:
    if name is None:
        return None
    if name not in names:
        raise BadInput(f"{_SOURCE}: {what}: expected one of {', '.join(names)}, got {name!r}")
    return names.index(name)


def _orchestrated(
    profiles: tuple[Profile, ...], orchestrator: int, anonymous: bool
) -> tuple[Profile, ...]:
    """The members, the orchestrator with a prompt that says whom it can call."""
    specialists = [p for i, p in enumerate(profiles) if i != orchestrator]
    if anonymous:
        raise BadInput(
            "--team.anonymous: an orchestrator calls others by name; use another workflow"
        )
    if not any(profile.answers for profile in specialists):
        raise BadInput(
            f"{_SOURCE}: an orchestrator needs a specialist with `answers: true`, besides "
            f"{profiles[orchestrator].name!r}, who calls them"
        )
    lead = profiles[orchestrator]
    lead = dataclasses.replace(lead, prompt=lead.prompt or default_prompt(specialists))
    return (*profiles[:orchestrator], lead, *profiles[orchestrator + 1 :])


def _check_debate(profiles: tuple[Profile, ...], judge: int | None) -> None:
    debaters = len(profiles) - (judge is not None)
    if debaters < 2:
        raise BadInput(f"{_SOURCE}: a debate needs at least 2 debaters, got {debaters}")


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
