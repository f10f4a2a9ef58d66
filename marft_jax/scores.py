"""What a benchmark's responses say, with how far to trust it.

Everything is computed from the saved records, so a figure can be had again from the file alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Record = Mapping[str, Any]
_Z = 1.96  # 95 % of a normal distribution


class Estimate(NamedTuple):
    """A mean over tasks and half the width of its 95 % confidence interval.

    The tasks are the independent draws; the answers to one task are not.
    """

    mean: float
    margin: float

    def __str__(self) -> str:
        return f"{self.mean:.4f} ± {self.margin:.4f}"


class AgentScore(NamedTuple):
    """What one agent did: turns, tokens per turn, turns cut off, and right answers if graded."""

    turns: int
    tokens: float
    truncated: float
    right: float | None


class Score(NamedTuple):
    """Attributes:
    tasks, samples: how many tasks, and answers to each.
    accuracy: avg@n: the mean reward.
    passed: pass@k for k = 1, 2, 4, ... up to the number of samples, and that.
    failed: episodes in which the environment or the workflow raised; they count as wrong.
    agents: by name.
    """

    tasks: int
    samples: int
    accuracy: Estimate
    passed: Mapping[int, Estimate]
    failed: int
    agents: Mapping[str, AgentScore]

    def metrics(self, name: str) -> dict[str, float]:
        """As metrics, under the documented names."""
        found = {f"eval/{name}/accuracy": self.accuracy.mean}
        return found | {f"eval/{name}/pass@{k}": e.mean for k, e in self.passed.items() if k > 1}

    def __str__(self) -> str:
        times = f" x {self.samples} samples" if self.samples > 1 else ""
        text = f"accuracy {self.accuracy} ({self.tasks} tasks{times})"
        k = max(self.passed)
        text += f", pass@{k} {self.passed[k]}" if k > 1 else ""
        return text + (f", {self.failed} episodes failed" if self.failed else "")


def score(records: Sequence[Record]) -> Score:
    """The score of the records of one benchmark; every task must have as many samples."""
    tasks: dict[int, list[Record]] = {}
    for record in records:
        tasks.setdefault(record["index"], []).append(record)
    samples = max(len(task) for task in tasks.values())
    rewards = [sum(r["reward"] for r in task) / len(task) for task in tasks.values()]
    solved = [sum(is_solved(r) for r in task) for task in tasks.values()]
    ks = sorted({1 << i for i in range(samples.bit_length())} | {samples})
    passed = {k: estimate([pass_at(k, samples, c) for c in solved]) for k in ks if k <= samples}
    failed = sum(not record["turns"] for record in records)
    return Score(len(tasks), samples, estimate(rewards), passed, failed, _agents(records))


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 95 % margin: 1.96 standard errors; no margin from a single task."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return Estimate(mean, math.nan)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Estimate(mean, _Z * math.sqrt(variance / len(values)))


def pass_at(k: int, samples: int, solved: int) -> float:
    """The chance that k of the samples, drawn without replacement, hold a solved one.

    pass@k = 1 − C(n − c, k) / C(n, k) (Chen et al. 2021, section 2.1).
    """
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def is_solved(record: Record) -> bool:
    """Whether an answer was right; where the environment gives no verdicts, any reward will do."""
    verdicts = [v for result in record["results"] for v in result["info"].get("verdicts", ())]
    if verdicts:
        return any(verdict["verdict"] == "right" for verdict in verdicts)
    return record["reward"] > 0


def _agents(records: Sequence[Record]) -> dict[str, AgentScore]:
    turns: dict[str, list[Record]] = {}
    verdicts: dict[str, list[bool]] = {}
    for record in records:
        for turn in record["turns"]:
            turns.setdefault(turn["agent"], []).append(turn)
        for result in record["results"]:
            for verdict in result["info"].get("verdicts", ()):
                verdicts.setdefault(verdict["agent"], []).append(verdict["verdict"] == "right")
    return {
        name: AgentScore(
            len(own),
            sum(turn["tokens"][1] - turn["tokens"][0] for turn in own) / len(own),
            sum(turn["truncated"] for turn in own) / len(own),
            sum(verdicts[name]) / len(verdicts[name]) if name in verdicts else None,
        )
        for name, own in turns.items()
    }
