"""The learner of a team with its teachers, and its states: the first, and those of a saved run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax

from marft_jax.errors import BadInput
from marft_jax.interop import initial
from marft_jax.learning import state_parts
from marft_jax.learning.algorithms import find_algorithm
from marft_jax.learning.learner import Learner, TrainState
from marft_jax.learning.settings import Distill
from marft_jax.learning.teaching import Teaching
from marft_jax.models import lora
from marft_jax.models.weights.load import BaseModel
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.plugins import load_extra
from marft_jax.run.checkpoints import Checkpoints
from marft_jax.run.compatibility import identity_of
from marft_jax.run.models import TeamModels, load_onto
from marft_jax.run.storage import storage_of
from marft_jax.settings.config import Config
from marft_jax.team.bases import models_of
from marft_jax.team.profiles import Profile
from marft_jax.team.prompts import Team


def make_learner(models: TeamModels, teaching: Teaching | None = None) -> Learner:
    """Makes the learner of a team."""
    algorithm, mesh = find_algorithm(models.config.algo.name), models.devices.learning
    return Learner(models.learning, models.bases, models.team, algorithm, mesh, teaching)


def fresh_state(models: TeamModels, learner: Learner) -> TrainState:
    """Makes the state before the first step, without adapters that the settings name."""
    return state_parts.begin(models.parts, learner.init())


def initial_state(models: TeamModels, fresh: TrainState) -> TrainState:
    """Returns the state that a training begins with.

    ``lora.init`` may be a run directory, whose newest adapters are read, or ``hub:owner/name``.

    Raises:
        BadInput: as ``interop.initial.initial_adapters``; or the run has no intact checkpoint.
    """
    settings, saved = models.config.lora, None
    if settings.init is not None and settings.init.startswith("hub:"):
        folder = str(load_extra("lora.hub")(settings.init))
        settings = dataclasses.replace(settings, init=folder)
    if (run := settings.init) and ((storage := storage_of(run)).path / "checkpoints").is_dir():
        with Checkpoints(storage, {}, keep=1) as checkpoints:
            saved = checkpoints.restore_adapters()
        if saved is None:
            raise BadInput(f"--lora.init {run}: it has no intact checkpoint yet")
    shapes = {name: base.config for name, base in models.bases.items()}
    adapters = initial.initial_adapters(models.team, settings, fresh.adapters, saved, shapes)
    state = fresh.with_adapters(adapters)
    return state_parts.begin(models.parts, state).begun()


def restore_state(
    models: TeamModels, run: str | Path | None, step: int | str = "latest"
) -> TrainState:
    """Returns the state after a step of ``run``, or without a run the initial state.

    Args:
        step: its number, ``best`` or ``latest``.

    Raises:
        BadInput: the run has no such checkpoint, or the checkpoint is of another base or team.
    """
    fresh = fresh_state(models, make_learner(models))
    if run is None:
        if step != "latest":
            raise BadInput(f"--step {step}: only a --run has steps; leave it out")
        models.date(None)
        return initial_state(models, fresh)
    identity = identity_of(models.config, models.bases, models.team)
    with Checkpoints(run, identity, models.config.run.keep) as checkpoints:
        saved = checkpoints.restore(fresh, step)
        if saved is None:
            there = ", ".join(map(str, checkpoints.steps)) or "none"
            raise BadInput(
                f"--run {run} --step {step}: expected best, latest, or a step with an intact "
                f"checkpoint; there are: {there}"
            )
    models.date(checkpoints.identity["started"])
    return saved.state


def open_teaching(models: TeamModels) -> Teaching | None:
    """Loads the bases and adapters of a team's teachers; None for an algorithm without teachers.

    A base on which agents run is not loaded again.

    Raises:
        BadInput: a teacher has another vocabulary than its student, or its adapter does not fit.
    """
    config, team = models.config, models.team
    if not isinstance(config.algo, Distill):
        return None
    on = tuple(teacher.base or "" if teacher else "" for teacher in team.teachers)
    mesh, named = models.devices.learning, [base for base in on if base]
    bases = {
        name: models.bases.get(name) or load_onto((mesh,), model, None, name)
        for name, model in models_of(config.model, models.blueprint.bases, named).items()
    }
    for profile, tokenizer, base in zip(team.profiles, team.tokenizers, on, strict=True):
        if base and not bases[base].tokenizer.extends(tokenizer, bases[base].config.vocab_size):
            raise BadInput(
                f"agent {profile.name!r}: teacher: expected a base with the vocabulary of the "
                f"agent's own, whose tokens it scores, got {bases[base].source}"
            )
    pairs = dict.fromkeys((b, t.init) for b, t in zip(on, team.teachers, strict=True) if t)
    inits = {base: [init for b, init in pairs if b == base] for base in bases}
    owners = [inits[b].index(t.init) if t else None for b, t in zip(on, team.teachers, strict=True)]
    adapters = {
        base: _adapters(config, team, base, bases[base], inits[base]) if any(inits[base]) else None
        for base in bases
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
    shapes = {name: base.config}
    return initial.initial_adapters(teachers, settings, {name: fresh}, None, shapes)[name]
