"""Watches a run for updates that are not finite and for collapse, and says when to roll back.

What is outside its bound for so many steps in a row leads to a rollback: to the newest checkpoint
before the first of these steps, with other sampling keys and tasks and a lower learning rate. After
too many rollbacks the run stops. The guard reads only the numbers of a step, and its memory is part
of every checkpoint. So a run that was killed and continued takes the same decisions.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from marft_jax.run.reporters import Events
from marft_jax.settings import config as config_lib
from marft_jax.team.prompts import Team
from marft_jax.types import Episode

LOGGER = logging.getLogger("marft_jax")

Nonfinite = Mapping[str, Mapping[str, float]]
"""Counts of numbers that were not finite, by agent (or ``critic``) and tensor."""


class Finding(NamedTuple):
    """Something outside its bound.

    Attributes:
        kind: nonfinite, kl, entropy or reward.
        who: the agent, ``critic`` or ``team``.
        value, bound: the measured number, and the bound that it is outside of.
        tensors: names of the tensors that were not finite.
    """

    kind: str
    who: str
    value: float
    bound: float
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" in {', '.join(self.tensors)}" if self.tensors else ""
        if self.kind == "kl" and self.value <= self.bound:
            where = ", without a move since it was outside"
        return f"{self.kind} of {self.who}: {self.value:.4g}, bound {self.bound:.4g}{where}"


class Verdict(NamedTuple):
    """Order to roll back because of a finding; ``good`` is the last step before it began."""

    finding: Finding
    good: int


class Guard:
    """Checks the numbers of each step; writes what it finds to the run's events."""

    def __init__(self, settings: config_lib.Guard, agents: Sequence[str], events: Events):
        self.settings, self._agents, self.events = settings, tuple(agents), events
        self.memory: dict[str, Any] = {}
        self.recall({})

    @property
    def rollbacks(self) -> int:
        """Rollbacks of this run so far; part of every sampling key."""
        return self.memory["rollbacks"]

    @property
    def good(self) -> int | None:
        """Earliest step that the next verdicts could roll back to; None where there is none yet."""
        best = [] if self.memory["best"] is None else [self.memory["best_step"]]
        return min([*best, *(since - 1 for since in self.memory["since"].values())], default=None)

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Takes over the memory of a checkpoint; what it lacks is as in a new run."""
        fresh = {"rollbacks": 0, "since": {}, "inside": {}, "rewards": []}
        fresh |= {"best": None, "best_step": 0, "deviation": 0.0}
        self.memory = copy.deepcopy({key: memory.get(key, fresh[key]) for key in fresh})
        self.events.rollbacks = self.rollbacks

    def rolled_back(self, memory: Mapping[str, Any]) -> None:
        """Takes over the memory of a checkpoint, and counts one more rollback."""
        self.recall({**memory, "rollbacks": self.rollbacks + 1})

    def note(self, step: int, event: str, finding: Finding, **more: Any) -> None:
        self.events.note(event, step=step, **finding._asdict(), **more)

    def look(
        self,
        step: int,
        episodes: Sequence[Episode],
        metrics: Mapping[str, float],
        nonfinite: Nonfinite,
    ) -> tuple[dict[str, float], Verdict | None]:
        """Returns the ``guard/`` metrics of a step, and a verdict where something was outside its
        bound for too many steps in a row. Each finding is noted and logged."""
        findings = [*_not_finite(nonfinite), *self._collapsing(episodes, metrics)]
        before, since, verdict = self.memory["since"], dict[str, int](), None
        for finding in findings:
            key, is_skipped = f"{finding.kind} {finding.who}", finding.kind == "nonfinite"
            since[key] = before.get(key, step)
            limits = ("skips", self.settings.skips), ("patience", self.settings.patience)
            limit, allowed = limits[0 if is_skipped else 1]
            count = step - since[key] + 1
            if allowed is not None and count >= allowed and verdict is None:
                # a reward sinks for a while before it leaves its bound
                is_sinking = finding.kind == "reward"
                verdict = Verdict(
                    finding, self.memory["best_step"] if is_sinking else since[key] - 1
                )
            self.note(step, "skipped" if is_skipped else "outside", finding)
            where = f"{finding}; step {count} in a row (--guard.{limit} {allowed})"
            LOGGER.warning("step %d: %s", step, where)
        self.memory["since"] = since
        self._remember(step, metrics)
        return {
            "guard/skipped": float(skipped_updates(nonfinite)),
            "guard/findings": float(len(findings)),
            "guard/rollbacks": float(self.rollbacks),
        }, verdict

    def _collapsing(
        self, episodes: Sequence[Episode], metrics: Mapping[str, float]
    ) -> Iterator[Finding]:
        """Yields what is outside its bound. A KL that was outside stays so until the agent moves
        again: a team that one step destroyed fails in every task, and nothing moves it."""
        s = self.settings
        acted = {turn.agent for episode in episodes for turn in episode.turns}
        for name in (name for agent, name in enumerate(self._agents) if agent in acted):
            kl, entropy = metrics.get(f"agent/{name}/approx_kl", 0.0), f"agent/{name}/entropy"
            if entropy not in metrics:  # nobody learns on its base
                continue
            stuck = f"kl {name}" in self.memory["since"] and kl < _MOVED
            if s.max_kl is not None and (stuck or not kl <= s.max_kl):  # NaN is outside, too
                yield Finding("kl", name, kl, s.max_kl)
            if s.min_entropy is not None and self._fell(name, metrics[entropy], s.min_entropy):
                yield Finding("entropy", name, metrics[entropy], s.min_entropy)
        best, reward = self.memory["best"], metrics["reward/mean"]
        if s.reward_drop is not None and best is not None:
            bound = best - s.reward_drop * self.memory["deviation"]
            if reward < bound:
                yield Finding("reward", "team", reward, bound)

    def _fell(self, name: str, entropy: float, bound: float) -> bool:
        """True where an agent's entropy is below its bound and was above it before, for as many
        steps in a row as a collapse takes: some bases always have an entropy near 0."""
        key, above = f"entropy {name}", self.memory["inside"]
        if above.get(key, 0) >= self.settings.patience:
            return not entropy >= bound
        above[key] = above.get(key, 0) + 1 if entropy >= bound else 0
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


_MOVED = 1e-6  # nats; rounding gives a policy that did not move a KL of up to 1e-9


def by_agent(nonfinite: Mapping[str, Any], team: Team) -> Nonfinite:
    """Returns the learner's counts by agent and tensor."""
    counts: dict[str, dict[str, float]] = {name: {} for name in ("critic", *team.names)}
    for tensor, numbers in jax.device_get(dict(nonfinite)).items():
        names = team.names if np.ndim(numbers) else ("critic",)
        for name, count in zip(names, np.atleast_1d(numbers), strict=True):
            counts[name][tensor] = float(count)
    return counts


def skipped_updates(nonfinite: Nonfinite) -> float:
    """Counts the updates that a step skipped: one per adapter and minibatch, and the critic's."""
    return sum(
        max((n for tensor, n in tensors.items() if "gradient" in tensor), default=0)
        for tensors in nonfinite.values()
    )


def _not_finite(nonfinite: Nonfinite) -> Iterator[Finding]:
    for who, tensors in nonfinite.items():
        if names := tuple(sorted(name for name, count in tensors.items() if count > 0)):
            yield Finding("nonfinite", who, sum(tensors.values()), 0, names)
