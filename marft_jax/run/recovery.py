"""How a run starts again, when it saves, and how it goes back: checkpoints and guard together."""

from __future__ import annotations

import difflib
import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set

import jax
import numpy as np

from marft_jax import config as config_lib
from marft_jax.errors import RunFailed
from marft_jax.learning.learner import TrainState
from marft_jax.run.checkpoints import Checkpoints
from marft_jax.run.compatibility import changes, identity_of, team_changes
from marft_jax.run.guard import Finding, Guard, Verdict
from marft_jax.run.setup import Session
from marft_jax.types import Episode

LOGGER = logging.getLogger("marft_jax")


class Schedule:
    """When to save: every so many steps, so many minutes after the last time, and at the end."""

    def __init__(self, settings: config_lib.Run, now: Callable[[], float] = time.monotonic):
        self._settings, self._now = settings, now
        self._saved = now()

    def is_due(self, done: int) -> bool:
        """Whether to save after this step; if so, the minutes start anew."""
        s = self._settings
        waited = self._now() - self._saved
        late = s.save_minutes > 0 and waited >= 60 * s.save_minutes
        due = done % s.save_every == 0 or done == s.steps or late
        if due:
            self._saved = self._now()
        return due


def open_checkpoints(config: config_lib.Config, session: Session) -> Checkpoints:
    """The checkpoints of the run directory, which this process holds the lock of."""
    identity = identity_of(config, session.base, session.team, session.workflow)
    checkpoints = Checkpoints(config.run.dir, identity, config.run.keep, config.run.best_metric)
    checkpoints.clean()
    return checkpoints


def resume(
    checkpoints: Checkpoints,
    guard: Guard,
    fresh: TrainState,
    begin: Callable[[TrainState], TrainState],
) -> tuple[TrainState, list[str]]:
    """The newest saved state, or else the initial one, and what there is to say about it.

    Args:
        fresh: a state of the right form.
        begin: makes the initial state of a fresh one.

    Raises:
        BadInput: what was saved does not belong to these settings, or none of it is intact.
    """
    saved = checkpoints.restore(fresh)
    if saved is None:
        told = checkpoints.set_history_aside()
        guard.forget_after(0)
        return begin(fresh), told
    guard.recall(saved.guard)
    guard.forget_after(int(saved.state.step))
    changed = changes({"config": saved.config}, checkpoints.identity)
    told = [f"--{key} was {old}, is {new}" for key, old, new in changed]
    told += team_changes(saved.team, checkpoints.identity["team"])
    return saved.state, [*checkpoints.skipped, *told]


def watch(
    guard: Guard,
    step: int,
    episodes: Sequence[Episode],
    metrics: dict[str, float],
    nonfinite: Mapping[str, Mapping[str, float]],
) -> Verdict | None:
    """Lets the guard look at a step, adds what it saw to the metrics, and says it in the log."""
    findings, verdict = guard.look(step, episodes, metrics, nonfinite)
    for finding in findings:
        LOGGER.warning("step %d: %s", step, finding)
    metrics["guard/skipped"] = skipped_updates(nonfinite)
    metrics["guard/findings"] = len(findings)
    metrics["guard/rollbacks"] = guard.rollbacks
    return verdict


def skipped_updates(nonfinite: Mapping[str, Mapping[str, float]]) -> float:
    """Updates that were not taken in a step: per adapter and minibatch, and the critic's."""
    return sum(
        max((n for tensor, n in tensors.items() if "gradient" in tensor), default=0)
        for tensors in nonfinite.values()
    )


def roll_back(
    checkpoints: Checkpoints,
    guard: Guard,
    step: int,
    verdict: Verdict,
    fresh: TrainState,
    begin: Callable[[TrainState], TrainState],
    settings: config_lib.Guard,
) -> TrainState:
    """The last good state, with a lower learning rate; later checkpoints are removed.

    Raises:
        RunFailed: the run was rolled back too often; the message is the report.
    """
    if guard.rollbacks >= settings.rollbacks:
        guard.note(step, "stopped", verdict.finding)
        raise RunFailed(_report(guard, step, verdict.finding))
    saved = checkpoints.restore(fresh, most=verdict.good)
    good = int(saved.state.step) if saved else 0
    guard.note(step, "rolled back", verdict.finding, to=good)
    checkpoints.drop_after(good)
    guard.rolled_back(saved.guard if saved else {})
    scale = settings.lr_factor**guard.rollbacks
    LOGGER.warning(
        "step %d: %s; rollback %d to step %d, learning rates times %g",
        step, verdict.finding, guard.rollbacks, good, scale,
    )  # fmt: skip
    state = saved.state if saved else begin(fresh)
    lowered = jax.device_put(np.float32(scale), state.lr_scale.sharding)
    return state._replace(lr_scale=lowered)


def check_best_metric(name: str | None, known: Set[str]) -> None:
    """Makes sure that the best checkpoint is chosen by a metric that there will be.

    Raises:
        BadInput: no step will ever have it.
    """
    if name is None or name in known:
        return
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    meant = f"did you mean {near[0]!r}? " if near else ""
    raise config_lib.BadInput(
        f"--run.best_metric: expected a metric of this run, or none, got {name!r}; {meant}those "
        "of eval/ need --eval.every"
    )


def _report(guard: Guard, step: int, finding: Finding) -> str:
    return (
        f"stopped at step {step} after {guard.rollbacks} rollbacks: {finding}; "
        "every event is in transcripts/guard.jsonl; the newest good checkpoint stays loadable: "
        "try a lower --algo.lr, or see --guard"
    )
