"""The learner of a team, and the states that it begins with or that a run has saved."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from marft_jax.errors import BadInput
from marft_jax.interop import initial
from marft_jax.learning import state_parts
from marft_jax.learning.algorithms import find_algorithm
from marft_jax.learning.learner import Learner, TrainState
from marft_jax.learning.teaching import Teaching
from marft_jax.plugins import load_extra
from marft_jax.run.checkpoints import Checkpoints
from marft_jax.run.compatibility import identity_of
from marft_jax.run.models import TeamModels


def make_learner(models: TeamModels, teaching: Teaching | None = None) -> Learner:
    """Makes the learner of a team."""
    algorithm = find_algorithm(models.config.algo.name)
    how = models.team, algorithm, models.devices.learning, teaching
    return Learner(models.learning, models.bases, *how)


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
    run = settings.init
    if run is not None and run.startswith("hub:"):
        run = str(load_extra("lora.hub")(run))
        settings = dataclasses.replace(settings, init=run)
    if run is not None and (Path(run).expanduser() / "checkpoints").is_dir():
        with Checkpoints(Path(run).expanduser(), {}, keep=1) as checkpoints:
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
