"""Continuing a run and rolling it back: checkpoints and guard together."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable

import jax
import numpy as np

from marft_jax.errors import BadInput, RunFailed
from marft_jax.learning.learner import TrainState
from marft_jax.parallel import processes
from marft_jax.run.checkpoints import Checkpoints
from marft_jax.run.compatibility import changes, identity_of, team_changes
from marft_jax.run.guard import Guard, Verdict
from marft_jax.run.setup import Session

LOGGER = logging.getLogger("marft_jax")

_HISTORY = (
    "metrics.jsonl transcripts tensorboard loggers wandb mlflow.db log.txt config.yaml team.yaml "
    "inputs.json code"
).split()

Begin = Callable[[TrainState], TrainState]
"""Makes the state that a run begins with from a fresh state."""


def open_checkpoints(session: Session) -> Checkpoints:
    """Opens the checkpoints of the run directory; this process must hold its lock."""
    settings = session.config.run
    identity = identity_of(session.config, session.base, session.team, session.workflow)
    checkpoints = Checkpoints(settings.dir, identity, settings.keep, settings.best_metric)
    checkpoints.clean()
    return checkpoints


def resume(
    checkpoints: Checkpoints, guard: Guard, fresh: TrainState, begin: Begin
) -> tuple[TrainState, list[str]]:
    """Returns the newest saved state, or the initial one, and a line for each change since.

    Raises:
        BadInput: the saved run is of other settings that cannot change, no checkpoint is intact,
            or the run is done, so that changed settings would have no effect.
    """
    saved = checkpoints.restore(fresh)
    if saved is None:
        lines = set_history_aside(checkpoints)
        guard.forget_after(0)
        return begin(fresh), lines
    guard.recall(saved.meta["guard"])
    guard.forget_after(int(saved.state.step))
    changed = changes(saved.meta, checkpoints.identity)
    where = ("mesh.coordinator", "mesh.processes", "mesh.process")  # of this start
    lines = [f"--{key} was {old}, is {new}" for key, old, new in changed if key not in where]
    lines += team_changes(saved.meta["team"], checkpoints.identity["team"])
    done = int(saved.state.step)
    if lines and done >= checkpoints.identity["config"]["run"]["steps"]:
        raise BadInput(
            f"{checkpoints.run} is done, after {done} steps, and these would change nothing: "
            f"{'; '.join(lines)}; go on with --run.steps {2 * done}, or name another --run.dir"
        )
    return saved.state, [*checkpoints.skipped, *lines]


def set_history_aside(checkpoints: Checkpoints) -> list[str]:
    """Moves the files of a run without a checkpoint to ``unsaved-N/``, as the run begins anew.

    Returns:
        A line that says so; nothing where there were no files.

    Raises:
        BadInput: there are checkpoints, but none is intact.
    """
    run, metrics = checkpoints.run, checkpoints.run / "metrics.jsonl"
    if checkpoints.steps:
        raise BadInput(
            f"{run}: none of its checkpoints ({', '.join(map(str, checkpoints.steps))}) is "
            f"intact: {checkpoints.skipped[-1]}; bring one back from a copy, move checkpoints/ "
            "away to begin anew, or choose another --run.dir"
        )
    written = metrics.is_file() and metrics.stat().st_size > 0
    history = written or any((run / "transcripts").glob("*.jsonl"))
    if not history or not processes.is_lead():
        return []
    aside = next(f for n in itertools.count(1) if not (f := run / f"unsaved-{n}").exists())
    aside.mkdir()
    for name in _HISTORY:
        with contextlib.suppress(FileNotFoundError):
            os.replace(run / name, aside / name)
    return [f"no checkpoint was saved yet: what is there of an earlier start is now in {aside}"]


def roll_back(
    checkpoints: Checkpoints,
    guard: Guard,
    step: int,
    verdict: Verdict,
    fresh: TrainState,
    begin: Begin,
) -> TrainState:
    """Returns the last good state, with a lower learning rate, and removes later checkpoints.

    Raises:
        RunFailed: the run was already rolled back ``guard.rollbacks`` times.
    """
    finding = verdict.finding
    if guard.rollbacks >= guard.settings.rollbacks:
        guard.note(step, "stopped", finding)
        raise RunFailed(
            f"stopped at step {step} after {guard.rollbacks} rollbacks: {finding}; every event is "
            "in transcripts/guard.jsonl; the newest good checkpoint stays loadable: try a lower "
            "--algo.lr, or see --guard"
        )
    saved = checkpoints.restore(fresh, most=verdict.good)
    good = int(saved.state.step) if saved else 0
    guard.note(step, "rolled back", finding, to=good)
    checkpoints.drop_after(good)
    guard.rolled_back(saved.meta["guard"] if saved else {})
    scale = guard.settings.lr_factor**guard.rollbacks
    where = f"rollback {guard.rollbacks} to step {good}, learning rates times {scale:g}"
    LOGGER.warning("step %d: %s; %s", step, finding, where)
    state = saved.state if saved else begin(fresh)
    return state._replace(lr_scale=jax.device_put(np.float32(scale), state.lr_scale.sharding))
