"""Loads the teachers of a team, for a distillation."""

from __future__ import annotations

import dataclasses

import jax

from marft_jax.config import Config
from marft_jax.errors import BadInput
from marft_jax.interop.initial import initial_adapters
from marft_jax.learning.teaching import Teaching
from marft_jax.models import lora
from marft_jax.models.weights.load import BaseModel
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.run.models import TeamModels, load_onto
from marft_jax.team.bases import models_of
from marft_jax.team.profiles import Profile
from marft_jax.team.prompts import Team


def open_teaching(models: TeamModels) -> Teaching | None:
    """Loads the bases and adapters of a team's teachers; None for an algorithm without teachers.

    A base on which agents run is not loaded again.

    Raises:
        BadInput: a teacher has another vocabulary than its student, or its adapter does not fit.
    """
    config, team = models.config, models.team
    if not config.algo.teacher_coef:
        return None
    on = tuple(teacher.base or "" if teacher else "" for teacher in team.teachers)
    mesh, named = models.devices.learning, [base for base in on if base]
    bases = {
        name: models.bases.get(name) or load_onto((mesh,), model)
        for name, model in models_of(config.model, models.blueprint.bases, named).items()
    }
    for profile, tokenizer, base in zip(team.profiles, team.tokenizers, on, strict=True):
        if base and not bases[base].tokenizer.extends(tokenizer, bases[base].config.vocab_size):
            raise BadInput(
                f"agent {profile.name!r}: teacher: expected a base with the vocabulary of the "
                f"agent's own, whose tokens it scores, got {bases[base].source}"
            )
    inits: dict[str, list[str | None]] = {base: [] for base in bases}
    owners: list[int | None] = []
    for teacher, base in zip(team.teachers, on, strict=True):
        if teacher is not None and teacher.init not in inits[base]:
            inits[base].append(teacher.init)
        owners.append(inits[base].index(teacher.init) if teacher else None)
    adapters = {
        base: _adapters(config, team, base, bases[base], own) if any(own) else None
        for base, own in inits.items()
    }
    placed = mesh_lib.put(jax.device_get(adapters), mesh_lib.replicated(mesh))
    return Teaching(bases, on, owners, placed)


def _adapters(
    config: Config, team: Team, name: str, base: BaseModel, inits: list[str | None]
) -> lora.Adapters:
    """Reads the adapters of the teachers on a base; a teacher without one gets zeros."""
    settings, numbers = config.lora, tuple(range(len(inits)))
    fresh = lora.init(
        jax.random.key(0), base.config, adapters=numbers, rank=settings.rank,
        targets=settings.targets,
    )  # fmt: skip
    names = tuple(f"teacher {n}" for n in numbers)
    teachers = team._replace(
        profiles=tuple(Profile(n, init=init) for n, init in zip(names, inits, strict=True)),
        bases=(name,) * len(inits),
        owners=numbers,
        adapter_names={name: names},
    )
    settings = dataclasses.replace(settings, init=None)
    return initial_adapters(teachers, settings, {name: fresh}, None, {name: base.config})[name]
