"""Watches a run for updates that are not finite and for collapse, and says when to roll back.

Whatever is outside its bound for so many steps in a row ends in a rollback to the newest checkpoint
from before the first of them, with fresh sampling keys and tasks and a lower learning rate; after
too many rollbacks, in a stop. Its memory is part of every checkpoint, and it looks at nothing but
the numbers of a step, so that a run that was killed and continued takes the same decisions.
"""

from __future__ import annotations

import copy
import logging
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from marft_jax import config as config_lib
from marft_jax.formats import jsonlines
from marft_jax.team.prompts import Team
from marft_jax.types import Episode

LOGGER = logging.getLogger("marft_jax")

Nonfinite = Mapping[str, Mapping[str, float]]
"""Counts of numbers that were not finite, by agent (or ``critic``) and tensor."""


class Finding(NamedTuple):
    """Something outside its bound.

    Attributes:
        kind: nonfinite, kl, standstill, entropy, length or reward.
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
    """Run must not go on like this; all was well after step ``good``."""

    finding: Finding
    good: int


class Guard:
    """Looks at every step; events go to ``file``, one JSON object per line."""

    def __init__(self, settings: config_lib.Guard, agents: Sequence[str], file: Path):
        self.settings, self._agents, self._file = settings, tuple(agents), file
        self.memory: dict[str, Any] = {}
        self.recall({})

    @property
    def rollbacks(self) -> int:
        """Times that the run was rolled back; part of every sampling key."""
        return self.memory["rollbacks"]

    @property
    def good(self) -> int | None:
        """Where a verdict of one of the next steps could lead back to; None where nowhere yet."""
        steps = [since - 1 for since in self.memory["since"].values()]
        steps += [] if self.memory["best"] is None else [self.memory["best_step"]]
        return min(steps, default=None)

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Goes on with the memory of a checkpoint; what it lacks is as at the beginning."""
        fresh = {"rollbacks": 0, "since": {}, "inside": {}, "met": [], "rewards": []}
        fresh |= {"best": None, "best_step": 0, "deviation": 0.0}
        self.memory = copy.deepcopy(fresh | dict(memory))

    def rolled_back(self, memory: Mapping[str, Any]) -> None:
        """Goes back to the memory of a checkpoint, but knows of one more rollback."""
        self.recall({**memory, "rollbacks": self.rollbacks + 1})

    def forget_after(self, step: int) -> None:
        """Drops the events of steps that will be taken again."""
        now = (self.rollbacks, step)
        jsonlines.keep(self._file, lambda row: (row["rollbacks"], row["step"]) <= now)

    def note(self, step: int, event: str, finding: Finding, **more: Any) -> None:
        row = {"step": step, "rollbacks": self.rollbacks, "event": event}
        jsonlines.append(self._file, [jsonlines.dumps(row | finding._asdict() | more)])

    def look(
        self,
        step: int,
        episodes: Sequence[Episode],
        metrics: Mapping[str, float],
        nonfinite: Nonfinite,
    ) -> tuple[dict[str, float], Verdict | None]:
        """Returns the ``guard/`` metrics of a step, and a verdict where something was outside its
        bound for too long. What is outside is noted, and said in the log."""
        findings = [*_not_finite(nonfinite), *self._collapsing(episodes, metrics)]
        before = self.memory["since"]
        since = {key: before[key] for key in self._unmoved(metrics) if key in before}
        found = [(f"{finding.kind} {finding.who}", finding) for finding in findings]
        found += self._standing(since, float(metrics["reward/mean"]))
        verdict = None
        for key, finding in found:
            skipped = finding.kind == "nonfinite"
            since[key] = before.get(key, step)
            allowed = self.settings.skips if skipped else self.settings.patience
            count = step - since[key] + 1
            if allowed is not None and count >= allowed and verdict is None:
                # a reward was sinking for a while before it left its bound
                sinking = finding.kind == "reward"
                good = self.memory["best_step"] if sinking else since[key] - 1
                verdict = Verdict(finding, good)
            self.note(step, "skipped" if skipped else "outside", finding)
            LOGGER.warning("step %d: %s; %s", step, finding, self._consequence(skipped, count))
        self.memory["since"] = since
        self._remember(step, metrics)
        numbers = {"skipped": skipped_updates(nonfinite), "findings": len(found)}
        numbers["rollbacks"] = self.rollbacks
        return {f"guard/{name}": float(value) for name, value in numbers.items()}, verdict

    def _consequence(self, skipped: bool, count: int) -> str:
        """Says what follows a finding that this many steps in a row have had."""
        s, name = self.settings, "skips" if skipped else "patience"
        effect = "that update was skipped; " if skipped else ""
        if (most := getattr(s, name)) is None:
            return f"{effect}nothing else follows (--guard.{name} none)"
        end = "roll the run back" if self.rollbacks < s.rollbacks else "stop the run"
        return f"{effect}step {count} in a row, {most} {end} (--guard.{name} {most})"

    def _collapsing(
        self, episodes: Sequence[Episode], metrics: Mapping[str, float]
    ) -> Iterator[Finding]:
        s = self.settings
        for agent, name in enumerate(self._agents):
            turns = [t for episode in episodes for t in episode.turns if t.agent == agent]
            if not turns:
                continue
            cut = float(np.mean([turn.truncated or len(turn.action) < 2 for turn in turns]))
            watched = (
                ("kl", metrics.get(f"agent/{name}/approx_kl", 0.0), operator.le, s.max_kl),
                ("entropy", metrics[f"agent/{name}/entropy"], operator.ge, s.min_entropy),
                ("length", cut, operator.le, s.max_cut),
            )
            for kind, value, holds, bound in watched:
                if bound is not None and self._is_outside(kind, name, holds(value, bound)):
                    yield Finding(kind, name, value, bound)
        best, reward = self.memory["best"], metrics["reward/mean"]
        if s.reward_drop is not None and best is not None:
            bound = best - s.reward_drop * self.memory["deviation"]
            if reward < bound:
                yield Finding("reward", "team", reward, bound)

    def _unmoved(self, metrics: Mapping[str, float]) -> list[str]:
        """Returns the KLs of agents whose policy did not move, as when all fail: such a step says
        nothing of one that was outside before."""
        kls = {f"kl {n}": metrics.get(f"agent/{n}/approx_kl", 0.0) for n in self._agents}
        return [key for key, kl in kls.items() if kl < _MOVED]

    def _standing(self, since: Mapping[str, int], reward: float) -> Iterator[tuple[str, Finding]]:
        """Agents that a step outside of the bound on the KL has brought to a standstill at which
        the team earns less than before: where all fail alike nothing teaches them any more."""
        recent = max(self.memory["rewards"], default=-math.inf)
        for key in since if reward < recent else ():
            yield key, Finding("standstill", key.partition(" ")[2], reward, recent)

    def _is_outside(self, kind: str, who: str, inside: bool) -> bool:
        """True outside of a bound on the KL; of another one only after a run that was inside for
        as long as a collapse takes to be one: else the base is like that."""
        key, runs, met = f"{kind} {who}", self.memory["inside"], self.memory["met"]
        if kind == "kl" or key in met:
            return not inside
        runs[key] = runs.get(key, 0) + 1 if inside else 0
        if runs[key] >= self.settings.patience:
            met.append(key)
        return False

    def _remember(self, step: int, metrics: Mapping[str, float]) -> None:
        reward, deviation = float(metrics["reward/mean"]), float(metrics["reward/std"])
        if not (math.isfinite(reward) and math.isfinite(deviation)):
            return
        m, window = self.memory, self.settings.patience
        m["rewards"] = [*m["rewards"], reward][-window:]
        m["deviation"] = max(m["deviation"], deviation)
        mean = sum(m["rewards"]) / window
        if len(m["rewards"]) == window and (m["best"] is None or mean >= m["best"]):
            m["best"], m["best_step"] = mean, step


_MOVED = 1e-6  # nats; rounding makes a KL of up to 1e-9 of a policy that stood still


def by_agent(nonfinite: Mapping[str, Any], team: Team) -> Nonfinite:
    """Returns the learner's counts by agent and tensor."""
    found: dict[str, dict[str, float]] = {name: {} for name in ("critic", *team.names)}
    for tensor, counts in jax.device_get(dict(nonfinite)).items():
        if np.ndim(counts) == 0:
            found["critic"][tensor] = float(counts)
            continue
        for name, count in zip(team.names, counts, strict=True):
            found[name][tensor] = float(count)
    return found


def skipped_updates(nonfinite: Nonfinite) -> float:
    """Updates that were not taken in a step: per adapter and minibatch, and the critic's."""
    return sum(
        max((n for tensor, n in tensors.items() if "gradient" in tensor), default=0)
        for tensors in nonfinite.values()
    )


def _not_finite(nonfinite: Nonfinite) -> Iterator[Finding]:
    for who, tensors in nonfinite.items():
        seen = tuple(sorted(name for name, count in tensors.items() if count > 0))
        if seen:
            yield Finding("nonfinite", who, sum(tensors.values()), 0, seen)
