"""Opens the state that a run directory holds of any of its steps, or begins a new one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from marft_jax.config import Config
from marft_jax.errors import BadInput
from marft_jax.interop import initial
from marft_jax.learning.algorithms import find_algorithm
from marft_jax.learning.learner import Learner, TrainState
from marft_jax.run.checkpoints import Checkpoints, Which
from marft_jax.run.identity import identity_of
from marft_jax.run.setup import Session
from marft_jax.team.prompts import Team

Begin = Callable[[Config, Team, TrainState], TrainState]
"""(config, team, fresh state) to the state that a training begins with."""


def restore_team(session: Session, run: str | None, begin: Begin, step: str = "latest") -> int:
    """Gives the engine the adapters of ``run``; without a run those of ``begin``.

    Returns:
        The training step they come from; 0 without a run.

    Raises:
        BadInput: the run has no such checkpoint, or it belongs to another base or team.
    """
    state = restore_state(session, run, begin, step)
    session.engine.load(state.adapters)
    return int(state.step)


def restore_state(
    session: Session, run: str | None, begin: Begin, step: str = "latest"
) -> TrainState:
    """The state after a step of ``run``: a number, ``best`` or ``latest``; else that of ``begin``.

    Raises:
        BadInput: see ``restore_team``.
    """
    which = _which(step)
    config, team = session.config, session.team
    algorithm = find_algorithm(config.algo.name)
    state = Learner(config, session.base, team, algorithm, session.mesh).init()
    if run is None:
        if which != "latest":
            raise BadInput(f"--step {step}: only a --run has steps; leave it out")
        return begin(config, team, state)
    identity = identity_of(config, session.base, team)
    with Checkpoints(run, identity, config.run.keep) as checkpoints:
        saved = checkpoints.restore(state, which)
        if saved is None:
            there = ", ".join(map(str, checkpoints.steps)) or "none"
            raise BadInput(
                f"--run {run} --step {step}: it has no such intact checkpoint; there are: {there}"
            )
    return saved.state


def initial_state(config: Config, team: Team, fresh: TrainState) -> TrainState:
    """The state that a training begins with; ``lora.init`` may be a run directory, too: its newest
    adapters.

    Raises:
        BadInput: see ``interop.initial``; or the run has no intact checkpoint.
    """
    run = config.lora.init
    if run is None or not (Path(run) / "checkpoints").is_dir():
        return initial.initial_state(config, team, fresh)
    with Checkpoints(run, {}, keep=1) as checkpoints:
        saved = checkpoints.restore_adapters()
    if saved is None:
        raise BadInput(f"--lora.init {run}: it has no intact checkpoint yet")
    return initial.initial_state(config, team, fresh, saved)


def _which(word: str) -> Which:
    if word == "latest" or word == "best":
        return word
    try:
        return int(word)
    except ValueError:
        raise BadInput(f"--step: expected a step's number, best or latest, got {word!r}") from None
