"""Events of a run: starts and stops, settings that changed, warnings, and what the guard finds."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path
from typing import Any

from marft_jax.formats import jsonlines

LOGGER = logging.getLogger("marft_jax")


class Events(logging.Handler):
    """Writer of ``events.jsonl``: an object per line with ``event``, the ``step`` that it belongs
    to, ``time``, and what the event tells. In a ``with`` it also writes warnings of the log.

    Attributes:
        step: the step that is being made.
        rollbacks: rollbacks of the run so far; a step that is repeated after one is another step.
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__(logging.WARNING)
        self._file = run_dir / "events.jsonl"
        self.step, self.rollbacks = 1, 0

    def __enter__(self) -> Events:
        LOGGER.addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        LOGGER.removeHandler(self)

    def note(self, event: str, **more: Any) -> None:
        row = {"step": self.step, "rollbacks": self.rollbacks, "event": event}
        time = datetime.datetime.now().isoformat(" ", "seconds")
        jsonlines.append(self._file, [jsonlines.dumps(row | {"time": time} | more)])

    def emit(self, record: logging.LogRecord) -> None:
        self.note("warning", text=self.format(record))

    def forget_after(self, step: int) -> None:
        """Deletes the events of later steps, which will be made again."""
        now = (self.rollbacks, step)
        jsonlines.keep(self._file, lambda row: (row["rollbacks"], row["step"]) <= now)
        self.step = step + 1
