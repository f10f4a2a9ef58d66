"""Saving a training step, taking steps back, and what a run that was stopped has saved."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from marft_jax.config import Run
from marft_jax.learning.state import TrainState
from marft_jax.run.checkpoints import Checkpoints, Schedule
from marft_jax.run.guard import Guard, Verdict
from marft_jax.run.recovery import roll_back
from marft_jax.run.reporters import Reporter
from marft_jax.run.signals import GRACE_S


class Saving(NamedTuple):
    """Everything that saves the steps of a run.

    Attributes:
        fresh: makes a state to restore into.
        begin: makes the state that a run begins with of a fresh one.
    """

    settings: Run
    checkpoints: Checkpoints
    schedule: Schedule
    guard: Guard
    reporter: Reporter
    fresh: Callable[[], TrainState]
    begin: Callable[[TrainState], TrainState]

    def save(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        """Holds a copy of the state, and begins to save it where that is due."""
        done = int(state.step)
        metric = metrics.get(self.settings.best_metric or "")
        now = self.schedule.is_due(done)
        self.checkpoints.save(done, state, self.guard.memory, metric, self.guard.good, now)

    def roll_back(self, done: int, verdict: Verdict) -> TrainState:
        """Returns the last good state before the step ``done``, with lower learning rates."""
        state = roll_back(self.checkpoints, self.guard, done, verdict, self.fresh(), self.begin)
        self.reporter.rewind(int(state.step) + 1)
        return state

    def stopped(self) -> str:
        """Says which step a run that was stopped has saved, and what starting again does."""
        if not (done := self.checkpoints.step):
            return "stopped before a step was finished: nothing is saved; start again to begin anew"
        where = f"which is saved in {self.settings.dir}"
        return f"stopped after step {done}, {where}; start again to continue"

    def save_and_close(self) -> str:
        """Saves the last finished step, says which, and closes the loggers.

        A signal calls this from another thread than the one that trains.
        """
        self.checkpoints.flush()
        closing = threading.Thread(target=self.reporter.close, daemon=True)
        closing.start()
        closing.join(GRACE_S)  # a logger may call a server that does not answer
        return self.stopped()
