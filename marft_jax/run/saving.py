"""Saving the steps of a run, continuing it, and rolling it back: checkpoints and guard together."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from marft_jax.errors import BadInput, RunFailed, Stopped
from marft_jax.learning.learner import Learner, TrainState
from marft_jax.run.checkpoints import Checkpoints
from marft_jax.run.compatibility import Changed, identity_of, setting_changes, team_changes
from marft_jax.run.guard import Guard, Verdict
from marft_jax.run.models import TeamModels
from marft_jax.run.signals import GRACE_S
from marft_jax.run.states import fresh_state, initial_state
from marft_jax.run.storage import RunStorage
from marft_jax.run.training import Training

LOGGER = logging.getLogger("marft_jax")


def open_checkpoints(models: TeamModels, run: str | Path | RunStorage) -> Checkpoints:
    """Opens the checkpoints of the run directory; this process must hold its lock."""
    settings = models.config.run
    identity = identity_of(models.config, models.bases, models.team)
    checkpoints = Checkpoints(run, identity, settings.keep, settings.best_metric, True)
    checkpoints.clean()
    return checkpoints


def resume(
    models: TeamModels, learner: Learner, checkpoints: Checkpoints, guard: Guard
) -> tuple[TrainState, list[str | Changed]]:
    """Returns the newest saved state, or the initial one, lines to print, and each change since.

    Raises:
        BadInput: the saved run is of other settings that cannot change, no checkpoint is intact,
            or the run is done, so that changed settings would have no effect.
    """
    fresh = fresh_state(models, learner)
    saved = checkpoints.restore(fresh)
    if saved is None:
        if checkpoints.steps:
            there = ", ".join(map(str, checkpoints.steps))
            raise BadInput(
                f"{checkpoints.run}: none of its checkpoints ({there}) is intact: "
                f"{checkpoints.skipped[-1]}; bring one back from a copy, move checkpoints/ away to "
                "begin anew, or choose another --run.dir"
            )
        return initial_state(models, fresh), []
    done = int(saved.state.step)
    models.date(checkpoints.identity["started"])
    guard.recall(saved.meta["guard"])
    changed = setting_changes(saved.meta["config"], checkpoints.identity["config"])
    changed += team_changes(saved.meta["team"], checkpoints.identity["team"])
    if changed and done >= models.config.run.steps:
        raise BadInput(
            f"{checkpoints.run} is done, after {done} steps, and these would change nothing: "
            f"{'; '.join(map(str, changed))}; go on with --run.steps {2 * done}, or name another "
            "--run.dir"
        )
    return saved.state, [*checkpoints.skipped, *changed]


def save(run: Training, state: TrainState, metrics: Mapping[str, float]) -> None:
    """Holds a copy of the state, and saves it where that is due."""
    done, guard = int(state.step), run.guard
    metric = metrics.get(run.config.run.best_metric or "")
    now = run.schedule.is_due(done)
    run.checkpoints.save(done, state, guard.memory, metric, guard.good, now)


def roll_back(run: Training, step: int, verdict: Verdict) -> TrainState:
    """Returns the last good state, with lower learning rates; removes later checkpoints and
    reports, and drops steps that are played ahead.

    Raises:
        RunFailed: the run was already rolled back ``guard.rollbacks`` times.
    """
    guard, finding = run.guard, verdict.finding
    run.pipeline.clear()
    if guard.rollbacks >= guard.settings.rollbacks:
        guard.note(step, "stopped", finding)
        raise RunFailed(
            f"stopped at step {step} after {guard.rollbacks} rollbacks: {finding}; every event is "
            "in events.jsonl; the newest good checkpoint stays loadable: try a lower "
            "--algo.lr, or see --guard"
        )
    fresh = fresh_state(run.models, run.learner)
    saved = run.checkpoints.restore(fresh, most=verdict.good)
    state = saved.state if saved else initial_state(run.models, fresh)
    good = int(state.step)
    guard.note(step, "rolled back", finding, to=good)
    run.checkpoints.drop_after(good)
    guard.rolled_back(saved.meta["guard"] if saved else {})
    scale = guard.settings.lr_factor**guard.rollbacks
    where = f"rollback {guard.rollbacks} to step {good}, learning rates times {scale:g}"
    LOGGER.warning("step %d: %s; %s", step, finding, where)
    run.reporter.rewind(good + 1)
    return state._replace(lr_scale=jax.device_put(np.float32(scale), state.lr_scale.sharding))


@contextlib.contextmanager
def saved_when_stopped(run: Training) -> Iterator[None]:
    """Saves the last finished step when a signal comes; ``Stopped`` ends the block in order."""
    # other processes come to a stop when their episodes are played
    grace_s = run.config.mesh.wait_seconds if jax.process_count() > 1 else None
    run.stop.protect(functools.partial(save_and_close, run), grace_s)
    run.announce(int(run.state.step), "compiling")
    try:
        yield
    except Stopped:
        run.checkpoints.flush()
        run.reporter.event(stopped(run))


def stopped(run: Training) -> str:
    """Notes that a run was stopped; says which step is saved, and what starting again does."""
    done = run.checkpoints.step
    run.guard.events.note("stopped", step=done)
    if not done:
        return "stopped before a step was finished: nothing is saved; start again to begin anew"
    is_last, where = done == run.config.run.steps, f"which is saved in {run.config.run.dir}"
    return f"stopped after step {done}, {where}; " + (
        "it was the last" if is_last else "start again to continue"
    )


def save_and_close(run: Training) -> str:
    """Saves the last finished step, says which, and closes the loggers.

    A signal calls this from another thread than the one that trains.
    """
    run.checkpoints.flush()
    closing = threading.Thread(target=run.reporter.finish, daemon=True)
    closing.start()
    closing.join(GRACE_S)  # a logger may call a server that does not answer
    return stopped(run)
