"""Run cards: what ran, with which settings, how long, where, and what went wrong."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from marft_jax.extras.report.reading import Row, RunRecord, defaults, spread
from marft_jax.formats import jsonlines
from marft_jax.run.reporters import clock
from marft_jax.settings.config import Config
from marft_jax.settings.setting import that_decide

_MOST = 50  # events and warnings that are shown
_MOST_POINTS = 60  # of the small curve


class Card(NamedTuple):
    """Summary of a run.

    Attributes:
        facts: what ran, where, and how long, as (name, text).
        state: progress in words.
        ended: ``finished``, ``stopped`` or "".
        written: time of the last step.
        earned: of a game: mean reward of each agent at the last step, in words; else "".
        curve: the reward, as points in a box of 100 by 24.
        changes: of settings by a later start, with their steps.
        events: of the guard.
        warnings: with their times, newest last.
    """

    run: RunRecord
    facts: list[tuple[str, str]]
    state: str
    ended: str
    written: str
    reward: float | None
    best: tuple[int, float] | None
    earned: str
    curve: str
    changes: list[str]
    events: list[str]
    warnings: list[str]


class Setting(NamedTuple):
    """Values of a setting in all runs, as words; ``derived``: none was given, it is the base's."""

    key: str
    default: str
    values: list[str]
    derived: bool = False

    @property
    def changed(self) -> str:
        """``auto`` or ``given`` if a value differs from a default that is auto or not; else ""."""
        differs = any(value not in ("", self.default) for value in self.values)
        kept = self.key in that_decide("start", Config) or not differs
        return "" if kept else "auto" if self.derived or self.default == "auto" else "given"


def card(run: RunRecord) -> Card:
    """Summarises a run."""
    done, total = max(run.metrics, default=0), run.settings.get("run.steps")
    starts = [row for row in run.events if row.get("event") in ("start", "stopped")]
    began = next((row for row in reversed(starts) if row["event"] == "start"), {})
    first, written = (starts or [{}])[0].get("time", "unknown"), run.written
    took = clock(sum(row.get("time/step_s", 0.0) for row in run.metrics.values()))
    stopped = bool(starts) and starts[-1]["event"] == "stopped"
    finished, rewards = isinstance(total, int) and done >= total, run.rewards
    return Card(
        run,
        facts=[
            ("What", str(began.get("what", "unknown"))),
            ("Where", str(began.get("where", "unknown"))),
            ("Time", f"{took} in steps; from {first} to {written}"),
        ],
        state=f"step {done}" if total is None else f"step {done} of {total}",
        ended="finished" if finished else "stopped" if stopped else "",
        written=written,
        reward=rewards[max(rewards)] if rewards else None,
        best=max(rewards.items(), key=lambda item: item[1], default=None),
        earned=_earned(run),
        curve=_points(list(rewards.values())),
        changes=[str(change) for change in run.changed[-_MOST:]],
        events=[_event(row) for row in run.events if "kind" in row][-_MOST:],
        warnings=[
            f"{row.get('time')} {row.get('text')}"
            for row in run.events
            if row.get("event") == "warning"
        ][-_MOST:],
    )


def settings(runs: Sequence[RunRecord]) -> list[Setting]:
    """Lists every setting of the runs, those first that differ from the default."""
    given = [_over_time(run) for run in runs]
    derived = [run.derived - {change.key for change in run.changed} for run in runs]
    both = itertools.chain(*(run.settings.items() for run in runs))
    known = {key: _in_words(value) for key, value in defaults(dict(both)).items()}
    listed = [
        Setting(
            key,
            known.get(key, "no such setting now"),
            [values.get(key, "") for values in given],
            all(key in keys for keys in derived),
        )
        for key in dict.fromkeys(itertools.chain(known, *given))
    ]
    return sorted(listed, key=lambda setting: not setting.changed)


def _over_time(run: RunRecord) -> dict[str, str]:
    """Returns the settings of a run: the last ones, or each with its first step."""
    values = {key: _in_words(value) for key, value in run.settings.items()}
    for change in run.changed:
        if change.key in values:
            before = values[change.key] if "; from step" in values[change.key] else change.old
            values[change.key] = f"{before}; from step {change.step}: {change.new}"
    return values


def _in_words(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_in_words, value)) or "none"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _earned(run: RunRecord) -> str:
    """Lists each agent's reward in a game, where the mean over players may be 0 at every step."""
    game = "players" in (run.settings.get("team.workflow"), run.team.get("workflow"))
    last = [*run.metrics.values()][-1] if game and run.metrics else {}
    paid = {agent: last.get(f"agent/{agent}/reward") for agent in run.agents}
    return ", ".join(f"{agent} {x:+.4g}" for agent, x in paid.items() if x is not None)


def _event(row: Row) -> str:
    place = f"step {row.get('step', '?')}: {row.get('event', 'event')}"
    rest = {k: v for k, v in row.items() if k not in ("step", "event", "rollbacks", "time")}
    return f"{place}: " + ", ".join(f"{k} {jsonlines.dumps(v)}" for k, v in rest.items())


def _points(values: Sequence[float]) -> str:
    """Writes a curve as the points of an SVG line."""
    if len(values) < 2:
        return ""
    shown = spread(values, _MOST_POINTS)
    low, last = min(shown), len(shown) - 1
    scale = 20 / ((max(shown) - low) or 1.0)
    return " ".join(
        f"{100 * i / last:.1f},{22 - scale * (y - low):.1f}" for i, y in enumerate(shown)
    )
