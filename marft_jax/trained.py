"""Opening what a run directory holds: its settings, its team and its newest adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from marft_jax import config as config_lib
from marft_jax.algorithms import find_algorithm
from marft_jax.checkpoint import Checkpoints, identity_of
from marft_jax.learner import Learner
from marft_jax.session import Session


def settings_of(
    run: str | None, base: str | None, flags: Sequence[str], prog: str = "marft_jax.evaluate"
) -> config_lib.Config:
    """The settings of a run, or the defaults on a base, with flags on top.

    Raises:
        BadInput: there is no run in that directory, or a setting is wrong.
    """
    if run is None:
        return config_lib.parse([*(("--model.base", base) if base else ()), *flags], prog=prog)
    settings, team = Path(run) / "config.yaml", Path(run) / "team.yaml"
    if not settings.is_file():
        raise config_lib.BadInput(
            f"--run {run}: expected a run directory with config.yaml, found none"
        )
    return config_lib.parse(
        ["--config", str(settings), "--run.dir", run, "--team.file", str(team), *flags], prog=prog
    )


def restore_team(session: Session, run: str | None) -> int:
    """Gives the engine the newest adapters of ``run``, or fresh ones that change nothing.

    Returns:
        The training step they come from; 0 for fresh ones.

    Raises:
        BadInput: the run has no checkpoint, or it belongs to another base or team.
    """
    config = session.config
    learner = Learner(
        config, session.base, session.team, find_algorithm(config.algo.name), session.mesh
    )
    state = learner.init()
    if run is not None:
        identity = identity_of(config, session.base, session.team)
        with Checkpoints(run, identity, config.run.keep) as checkpoints:
            if checkpoints.latest is None:
                raise config_lib.BadInput(f"--run {run}: it has no checkpoint yet")
            state = checkpoints.restore(state)
    session.engine.load(state.adapters)
    return int(state.step)
