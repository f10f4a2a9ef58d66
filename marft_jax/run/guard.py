"""Watches a run for updates that are not finite and for collapse, and says when to roll back.

Whatever is outside its bound for so many steps in a row ends in a rollback to the newest checkpoint
from before the first of them, with fresh sampling keys and tasks and a lower learning rate; after
too many rollbacks, in a stop. Its memory is part of every checkpoint, and it looks at nothing but
the numbers of a step, so that a run that was killed and continued takes the same decisions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from marft_jax import config as config_lib
from marft_jax.formats import jsonlines
from marft_jax.team.prompts import Team
from marft_jax.types import Episode


class Finding(NamedTuple):
    """Something outside its bound.

    Attributes:
        kind: nonfinite, kl, entropy, length or reward.
        who: the agent, ``critic`` or ``team``.
        value, bound: what was measured, and what it should not pass.
        tensors: where numbers were not finite.
    """

    kind: str
    who: str
    value: float
    bound: float
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" in {', '.join(self.tensors)}" if self.tensors else ""
        return f"{self.kind} of {self.who}: {self.value:.4g}, bound {self.bound:.4g}{where}"


class Verdict(NamedTuple):
    """The run must not go on like this; all was well after step ``good``."""

    finding: Finding
    good: int


class Guard:
    """Looks at every step.

    Args:
        settings: the bounds.
        agents: names of the agents.
        file: where events go, one JSON object per line.
    """

    def __init__(self, settings: config_lib.Guard, agents: Sequence[str], file: Path):
        self._settings, self._agents, self._file = settings, tuple(agents), file
        self.memory: dict[str, Any] = {}
        self.recall({})

    @property
    def rollbacks(self) -> int:
        """How often the run was rolled back; part of every sampling key."""
        return self.memory["rollbacks"]

    @property
    def good(self) -> int | None:
        """Where a verdict of one of the next steps could lead back to; None where nowhere yet."""
        steps = [since - 1 for since in self.memory["since"].values()]
        steps += [] if self.memory["best"] is None else [self.memory["best_step"]]
        return min(steps, default=None)

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Takes up the memory of a checkpoint; that of a new run is empty.

        ``since``: the first step of each finding that has lasted until now. ``inside``: for
        how many steps in a row it was inside a bound. ``met``: bounds that it was inside of for
        long. ``rewards``: of the latest steps. ``best``: their best mean so far,
        None before there is one, and ``best_step``, when that was. ``deviation``: the largest so
        far over the episodes of a step.
        """
        fresh = {"rollbacks": 0, "since": {}, "inside": {}, "met": [], "rewards": []}
        fresh |= {"best": None, "best_step": 0, "deviation": 0.0}
        self.memory = copy.deepcopy(fresh | dict(memory))

    def forget_after(self, step: int) -> None:
        """Drops the events of steps that will be taken again."""
        now = (self.rollbacks, step)
        jsonlines.keep(self._file, lambda row: (row["rollbacks"], row["step"]) <= now)

    def rolled_back(self, memory: Mapping[str, Any]) -> None:
        """Goes back to the memory of a checkpoint, but knows of one more rollback."""
        count = self.rollbacks + 1
        self.recall(memory)
        self.memory["rollbacks"] = count

    def look(
        self,
        step: int,
        episodes: Sequence[Episode],
        metrics: Mapping[str, float],
        nonfinite: Mapping[str, Mapping[str, float]],
    ) -> tuple[list[Finding], Verdict | None]:
        """What is outside its bound after a step, and whether that has lasted too long.

        Args:
            step: training steps done.
            episodes: of the step.
            metrics: of the step, by their usual names.
            nonfinite: how many numbers were not finite, by agent and tensor.
        """
        findings = [*self._not_finite(nonfinite), *self._collapsing(episodes, metrics)]
        before, since = self.memory["since"], {}
        verdict = None
        for finding in findings:
            key = f"{finding.kind} {finding.who}"
            since[key] = before.get(key, step)
            allowed = self._settings.patience
            if finding.kind == "nonfinite":
                allowed = self._settings.skips
            if allowed is not None and step - since[key] + 1 >= allowed and verdict is None:
                before_it = since[key] - 1
                if finding.kind == "reward":  # it was sinking for a while before it left the bound
                    before_it = self.memory["best_step"]
                verdict = Verdict(finding, before_it)
        self.memory["since"] = since
        self._remember(step, metrics)
        for finding in findings:
            self.note(step, "skipped" if finding.kind == "nonfinite" else "outside", finding)
        return findings, verdict

    def note(self, step: int, event: str, finding: Finding, **more: Any) -> None:
        """Writes an event down."""
        row = {"step": step, "rollbacks": self.rollbacks, "event": event}
        jsonlines.append(self._file, [jsonlines.dumps(row | finding._asdict() | more)])

    def _not_finite(self, nonfinite: Mapping[str, Mapping[str, float]]) -> Iterator[Finding]:
        for who, tensors in nonfinite.items():
            seen = tuple(sorted(name for name, count in tensors.items() if count > 0))
            if seen:
                yield Finding("nonfinite", who, sum(tensors.values()), 0, seen)

    def _collapsing(
        self, episodes: Sequence[Episode], metrics: Mapping[str, float]
    ) -> Iterator[Finding]:
        s = self._settings
        for agent, name in enumerate(self._agents):
            turns = [t for episode in episodes for t in episode.turns if t.agent == agent]
            if not turns:
                continue
            kl = metrics.get(f"agent/{name}/approx_kl", 0.0)  # none, where all was recorded
            entropy = metrics[f"agent/{name}/entropy"]
            cut = float(np.mean([turn.truncated or len(turn.action) < 2 for turn in turns]))
            if s.max_kl is not None and not kl <= s.max_kl:
                yield Finding("kl", name, kl, s.max_kl)
            if s.min_entropy is not None and self._left("entropy", name, entropy >= s.min_entropy):
                yield Finding("entropy", name, entropy, s.min_entropy)
            if s.max_cut is not None and self._left("length", name, cut <= s.max_cut):
                yield Finding("length", name, cut, s.max_cut)
        best, reward = self.memory["best"], metrics["reward/mean"]
        if s.reward_drop is not None and best is not None:
            bound = best - s.reward_drop * self.memory["deviation"]
            if reward < bound:
                yield Finding("reward", "team", reward, bound)

    def _left(self, what: str, who: str, inside: bool) -> bool:
        """Whether a bound was left: where a run never was inside for as long as a collapse takes
        to be one, the base is like that."""
        key, runs, met = f"{what} {who}", self.memory["inside"], self.memory["met"]
        if key in met:
            return not inside
        runs[key] = runs.get(key, 0) + 1 if inside else 0
        if runs[key] >= self._settings.patience:
            met.append(key)
        return False

    def _remember(self, step: int, metrics: Mapping[str, float]) -> None:
        reward, deviation = float(metrics["reward/mean"]), float(metrics["reward/std"])
        if not (math.isfinite(reward) and math.isfinite(deviation)):
            return
        m, window = self.memory, self._settings.patience
        m["rewards"] = [*m["rewards"], reward][-window:]
        m["deviation"] = max(m["deviation"], deviation)
        if len(m["rewards"]) == window:
            mean = sum(m["rewards"]) / window
            if m["best"] is None or mean >= m["best"]:
                m["best"], m["best_step"] = mean, step


def by_agent(nonfinite: Mapping[str, Any], team: Team) -> dict[str, dict[str, float]]:
    """The learner's counts by who and tensor; those by adapter go to each agent that has it."""
    told: dict[str, dict[str, float]] = {"critic": {}} | {name: {} for name in team.names}
    for tensor, counts in jax.device_get(dict(nonfinite)).items():
        if np.ndim(counts) == 0:
            told["critic"][tensor] = float(counts)
            continue
        by_adapter = tensor.startswith("gradient")
        for i, name in enumerate(team.names):
            told[name][tensor] = float(counts[team.owners[i] if by_adapter else i])
    return told
