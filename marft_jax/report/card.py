"""The run card: what ran, with which settings, how long, where, and what went wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from marft_jax.formats import jsonlines
from marft_jax.report.reading import Checkpoint, Row, Run, defaults, moment
from marft_jax.run.reporters import clock

_MOST = 50  # events that are shown
_NAMES = ("env.name", "algo.name")
_SPARK = 60  # points of a small curve


class Card(NamedTuple):
    """Attributes:
    what, where: of the line that the run began with, as far as there is one.
    state: how far it is.
    took: seconds of all its steps, in words.
    rewards: the small curve of the reward: x and y, in a box of 100 by 24.
    warnings: lines of the log, the newest last.
    """

    name: str
    folder: str
    what: str
    where: str
    state: str
    finished: bool
    started: str
    written: str
    took: str
    reward: float | None
    best: tuple[int, float] | None
    rewards: str
    checkpoints: list[Checkpoint]
    versions: dict[str, str]
    agents: dict[str, str]
    events: list[str]
    warnings: list[str]
    notes: list[str]


class Setting(NamedTuple):
    """A setting of all runs: its values in their order, as words."""

    key: str
    default: str
    values: list[str]

    @property
    def changed(self) -> bool:
        return any(value not in ("", self.default) for value in self.values)


def card(run: Run) -> Card:
    """The card of a run."""
    done, total = max(run.metrics, default=0), run.settings.get("run.steps")
    what, where = _greeting(run.log)
    times = [time for line in run.log if (time := moment(line))]
    seconds = sum(row.get("time/step_s", 0.0) for row in run.metrics.values())
    rewards = {s: row["reward/mean"] for s, row in run.metrics.items() if "reward/mean" in row}
    best = max(rewards, key=lambda s: rewards[s]) if rewards else None
    return Card(
        name=run.name,
        folder=str(run.folder),
        what=what,
        where=where,
        state=f"step {done}" if total is None else f"step {done} of {total}",
        finished=isinstance(total, int) and done >= total,
        started=str(times[0]) if times else "unknown",
        written=str(times[-1]) if times else "unknown",
        took=clock(seconds),
        reward=rewards[max(rewards)] if rewards else None,
        best=None if best is None else (best, rewards[best]),
        rewards=_spark(list(rewards.values())),
        checkpoints=run.checkpoints,
        versions=dict(run.versions),
        agents=run.agents,
        events=[_event(row) for row in run.guard[-_MOST:]],
        warnings=[line for line in run.log if re.search(r" (WARNING|ERROR) ", line)][-_MOST:],
        notes=run.notes,
    )


def settings(runs: Sequence[Run]) -> list[Setting]:
    """Every setting of the runs, those first that differ from the default."""
    names = {key: str(run.settings[key]) for run in runs for key in _NAMES if key in run.settings}
    known = defaults(names)
    keys = dict.fromkeys([*known, *(key for run in runs for key in run.settings)])
    found = [
        Setting(
            key,
            _word(known[key]) if key in known else "no such setting now",
            [_word(run.settings[key]) if key in run.settings else "" for run in runs],
        )
        for key in keys
    ]
    return sorted(found, key=lambda one: not one.changed)


def _word(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_word, value)) or "none"
    return (
        "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def _greeting(log: Sequence[str]) -> tuple[str, str]:
    """What runs and where, of the last line that a start wrote: ``what; where mesh 1x1x1; ...``."""
    for line in reversed(log):
        if found := re.search(r" INFO (.*); (.* mesh \d+(?:x\d+)*); ", line):
            return found[1], found[2]
    return "unknown", "unknown"


def _event(row: Row) -> str:
    place = f"step {row.get('step', '?')}: {row.get('event', 'event')}"
    rest = {k: v for k, v in row.items() if k not in ("step", "event", "rollbacks")}
    return f"{place}: " + ", ".join(f"{k} {jsonlines.dumps(v)}" for k, v in rest.items())


def _spark(values: Sequence[float]) -> str:
    """Means of stretches of a curve as the points of a line."""
    if len(values) < 2:
        return ""
    width = math.ceil(len(values) / _SPARK)
    means = [math.fsum(part) / len(part) for i in range(0, len(values), width)
             if (part := values[i : i + width])]  # fmt: skip
    low, high = min(means), max(means)
    spread = (high - low) or 1.0
    last = max(len(means) - 1, 1)
    return " ".join(
        f"{100 * i / last:.1f},{22 - 20 * (y - low) / spread:.1f}" for i, y in enumerate(means)
    )
