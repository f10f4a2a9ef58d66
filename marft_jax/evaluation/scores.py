"""Scores of a benchmark with confidence intervals, computed from the saved records alone."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

Record = Mapping[str, Any]
Z_95 = NormalDist().inv_cdf(0.975)
"""Standard deviations of a normal distribution that hold 95 % of it, to either side."""
_ROUNDINGS = 64 * sys.float_info.epsilon
"""Relative difference of values that a few sums and products leave of equal ones."""


class Estimate(NamedTuple):
    """Mean over tasks, with the bounds of its 95 % confidence interval; NaN: there are none.

    The tasks are the independent draws; the answers to one task are not.
    """

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        bounds = f"{self.low:.3f} to {self.high:.3f}"
        return f"{self.mean:.4f} ({'all equal' if math.isnan(self.low) else bounds})"


class AgentScore(NamedTuple):
    """Number of an agent's turns, tokens per turn, shares of truncated turns and right answers."""

    turns: int
    tokens: float
    truncated: float
    right: float | None  # where it is graded


class Score(NamedTuple):
    """Attributes:
    tasks, samples: number of tasks, and of answers to each task.
    accuracy: avg@n, the share of right answers.
    reward: the mean reward.
    graded: all answers are right or wrong: the environment says so, or every reward is 0 or 1.
    passed: k to pass@k, for k = 1, 2, 4, ... and the number of samples.
    failed: episodes in which the environment or the workflow raised; they count as wrong.
    agents: name of an agent to its score.
    """

    tasks: int
    samples: int
    accuracy: Estimate
    reward: Estimate
    graded: bool
    passed: Mapping[int, Estimate]
    failed: int
    agents: Mapping[str, AgentScore]

    def metrics(self, name: str) -> dict[str, float]:
        """Returns the score as metrics with the documented names."""
        estimates = {"accuracy": self.accuracy, "reward": self.reward}
        estimates |= {f"pass@{k}": passed for k, passed in self.passed.items() if k > 1}
        return {f"eval/{name}/{kind}": estimated.mean for kind, estimated in estimates.items()}

    @property
    def average(self) -> str:
        """Accuracy, where answers are right or wrong; and the mean reward, where that differs."""
        parts = [f"accuracy {self.accuracy}"] if self.graded else []
        if not self.graded or self.reward.mean != self.accuracy.mean:
            parts.append(f"mean reward {self.reward}")
        return ", ".join(parts)

    def __str__(self) -> str:
        times = f" x {self.samples} samples" if self.samples > 1 else ""
        text = f"{self.average} ({self.tasks} tasks{times})"
        k = max(self.passed)
        text += f", pass@{k} {self.passed[k]}" if k > 1 else ""
        return text + (f", {self.failed} episodes failed" if self.failed else "")


Scores = dict[tuple[str, str], Score]
"""(benchmark, variant of the team) to its score."""


def score(records: Sequence[Record]) -> Score:
    """Computes the score of a benchmark, with pass@k for k up to the fewest samples of a task."""
    tasks = defaultdict[int, list[Record]](list)
    for record in records:
        tasks[record["index"]].append(record)
    samples = min(len(task) for task in tasks.values())
    rewards = [math.fsum(r["reward"] for r in task) / len(task) for task in tasks.values()]
    solved = [(len(task), sum(map(is_solved, task))) for task in tasks.values()]
    passed = {k: share([pass_at(k, n, c) for n, c in solved]) for k in passes(samples)}
    failed = sum(not record["turns"] for record in records)
    graded = all(_verdicts(r) or not r["turns"] or r["reward"] in (0, 1) for r in records)
    reward, agents = estimate(rewards), _agents(records)
    return Score(len(tasks), samples, passed[1], reward, graded, passed, failed, agents)


def passes(samples: int) -> list[int]:
    """Lists the k of pass@k: 1, 2, 4, ... and the number of samples."""
    return sorted({1 << i for i in range(samples.bit_length())} | {samples})


def estimate(values: Sequence[float]) -> Estimate:
    """Estimates the mean over tasks and its 95 % interval.

    Values that are all 0 or 1 are shares, see ``share``. Others have Student's t interval, mean ±
    t₀.₉₇₅(n − 1) · s/√n, or no bounds where all are equal up to rounding.
    """
    if set(values) <= {0, 1}:
        return share(values)
    mean = math.fsum(values) / len(values)
    if are_equal(values):
        return Estimate(mean, math.nan, math.nan)
    from scipy import stats  # takes a second

    error = float(stats.sem(values))
    return Estimate(mean, *map(float, stats.t.interval(0.95, len(values) - 1, mean, error)))


def share(values: Sequence[float]) -> Estimate:
    """Estimates how many answers are right from the share of them in each task.

    The 95 % interval is Wilson's (1927), which stays honest at 0 of 4 and at 117 of 117:

        (p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n)

    with n the number of tasks; where tasks are answered several times, so that values lie between 0
    and 1, n is p(1 − p) over their variance times as large.
    """
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
    odds = max(mean * (1 - mean), 0.0)
    n = len(values) * (1.0 if are_equal(values) else odds / variance)
    spread = Z_95 * math.sqrt(odds / n + Z_95**2 / (4 * n**2))
    low, high = ((mean + Z_95**2 / (2 * n) + side * spread) / (1 + Z_95**2 / n) for side in (-1, 1))
    return Estimate(mean, max(low, 0.0), min(high, 1.0))


def are_equal(values: Sequence[float]) -> bool:
    """True for values that differ by nothing but rounding."""
    return max(values) - min(values) <= _ROUNDINGS * max(map(abs, values))


def pass_at(k: int, samples: int, solved: int) -> float:
    """Computes the probability that k samples, drawn without replacement, include a solved one.

    pass@k = 1 − C(n − c, k) / C(n, k) (Chen et al. 2021, section 2.1).
    """
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def is_solved(record: Record) -> bool:
    """True for a right answer; without verdicts of the environment, for a positive reward."""
    if verdicts := _verdicts(record):
        return any(verdict["verdict"] == "right" for verdict in verdicts)
    return record["reward"] > 0


def _agents(records: Sequence[Record]) -> dict[str, AgentScore]:
    turns, verdicts = defaultdict[str, list[Record]](list), defaultdict[str, list[bool]](list)
    for record in records:
        for turn in record["turns"]:
            turns[turn["agent"]].append(turn)
        for verdict in _verdicts(record):
            verdicts[verdict["agent"]].append(verdict["verdict"] == "right")
    return {
        name: AgentScore(
            len(of_agent),
            sum(turn["tokens"][1] - turn["tokens"][0] for turn in of_agent) / len(of_agent),
            sum(turn["truncated"] for turn in of_agent) / len(of_agent),
            sum(verdicts[name]) / len(verdicts[name]) if name in verdicts else None,
        )
        for name, of_agent in turns.items()
    }


def _verdicts(record: Record) -> list[Record]:
    return [verdict for step in record["results"] for verdict in step["info"].get("verdicts", ())]
