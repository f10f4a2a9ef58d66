"""Curves of several runs on common steps, grouped into charts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from marft_jax.extras.report.reading import RunRecord, spread
from marft_jax.settings.config import Config
from marft_jax.settings.setting import that_decide

_POINTS = 2000  # of a curve, at most
_OWN = {"run.seed"} | that_decide("start", Config)
"""Settings in which seeds of one run differ."""

MEANINGS = {
    "reward/mean": "mean reward of an episode",
    "agent/*/reward": "mean reward of an agent",
    "eval/*/accuracy": "accuracy on held-out tasks",
    "eval/*/reward": "mean reward on held-out tasks",
    "eval/*/won": "share of games won",
    "eval/*/exploitability": "exploitability: distance from an equilibrium",
    "eval/*/elo": "rating among the run's checkpoints",
    "agent/*/entropy": "entropy per token, in nats",
    "agent/*/approx_kl": "approximate KL within a step",
    "agent/*/clip_fraction": "share of decisions that were clipped",
    "agent/*/tokens": "tokens per action",
    "agent/*/truncated": "share of actions that reached their limit of tokens",
    "agent/*/grad_norm": "gradient norm",
    "tool/*/calls": "calls of a tool in a step",
    "episode/rewritten": "calls per episode in which a program rewrote its agent's earlier text",
    "agent/*/loss": "loss on demonstrations",
    "critic/loss": "loss of the critic",
    "critic/explained_variance": "explained variance of the critic",
}
"""Charts that are shown first; the other metrics follow."""


def charts(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Lists the charts, important ones first, in the form that ``page/curves.js`` reads.

    ``name`` of a chart has a ``*`` where its lines differ; ``label`` of a line is its part there.
    """
    lines: dict[str, list[dict[str, str]]] = {}
    for name in dict.fromkeys(name for run in runs for name in run.metric_names):
        kind, label = _kind(name)
        lines.setdefault(kind, []).append({"metric": name, "label": label})
    order = [kind for kind in MEANINGS if kind in lines]
    order += sorted(lines.keys() - MEANINGS.keys())
    return [{"name": k, "meaning": MEANINGS.get(k, ""), "lines": lines[k]} for k in order]


def curves(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Puts all metrics on common steps, in the form that ``page/curves.js`` reads.

    Of a long run, evenly spaced steps are drawn.
    """
    made = sorted({step for run in runs for step in run.metrics})
    steps = spread(made, _POINTS)
    drawn, differing = [], [key for key, values in settings_of(runs).items() if len(values) > 1]
    for run, variant in zip(runs, variants(runs), strict=True):
        rows = [run.metrics.get(step, {}) for step in steps]
        metrics = {name: [_short(row.get(name)) for row in rows] for name in run.metric_names}
        settings = {key: str(run.settings.get(key, "?")) for key in differing}
        changed = sorted({change.step for change in run.changed})
        of_run = {"name": run.name, "variant": variant, "settings": settings, "changed": changed}
        drawn.append(of_run | {"metrics": metrics})
    return {"steps": steps, "made": len(made), "runs": drawn}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def settings_of(runs: Sequence[RunRecord]) -> dict[str, set[str]]:
    """Lists the values of each setting, without those in which seeds of one run differ."""
    keys = {key for run in runs for key in run.settings if key not in _OWN}
    return {key: {str(run.settings.get(key, "?")) for run in runs} for key in sorted(keys)}


def variants(runs: Sequence[RunRecord]) -> list[str]:
    """Names the variant of each run: runs that differ only in their seed share one."""
    keys = list[str]()
    for run in runs:
        same = {key: value for key, value in run.settings.items() if key not in _OWN}
        keys.append(json.dumps([same, run.team], default=str) if same else str(run.folder))
    first = {key: run.name for key, run in reversed([*zip(keys, runs, strict=True)])}
    seeds = {key: f", {keys.count(key)} seeds" if keys.count(key) > 1 else "" for key in keys}
    return [first[key] + seeds[key] for key in keys]


def summaries(
    runs: Sequence[RunRecord], charts: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Lists the first, last, lowest and highest value of every metric of every run, as text."""
    rows = []
    for metric in (line["metric"] for chart in charts for line in chart["lines"]):
        for run in runs:
            if values := [row[metric] for row in run.metrics.values() if metric in row]:
                ends = dict(first=values[0], last=values[-1], low=min(values), high=max(values))
                rows.append(dict(run=run.name, metric=metric, **ends))
    return rows


def _kind(name: str) -> tuple[str, str]:
    """Splits ``agent/planner/tokens`` into ``agent/*/tokens`` and ``planner``."""
    first, _, rest = name.partition("/")
    label, _, last = rest.rpartition("/")
    is_of_one = first in ("agent", "eval", "tool") and label
    return (f"{first}/*/{last}", label) if is_of_one else (name, "")
