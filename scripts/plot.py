"""Draws a metric of one or more runs over their steps (needs matplotlib: the extra ``plot``).

python scripts/plot.py runs/a runs/b --out reward.png
python scripts/plot.py runs/a --metric agent/solver/entropy --out entropy.png
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marft_jax import cli
from marft_jax.errors import BadInput

Points = list[tuple[float, float]]
"""Steps and values."""


def main(argv: Sequence[str] | None = None) -> None:
    """Leaves with 1: the picture cannot be written; 2: bad input."""
    parser = cli.Parser("scripts/plot.py", __doc__)
    parser.add_argument("runs", nargs="+", help="run directories")
    parser.add_argument("--metric", default="reward/mean", help="a name in metrics.jsonl")
    parser.add_argument("--out", required=True, help="the picture to write")
    with cli.boundary():
        own = parser.parse_args(argv)
        draw({Path(run).name: [points(run, own.metric)] for run in own.runs}, own.metric, own.out)


def points(run: str, metric: str) -> Points:
    """Step and value, wherever the metric has one.

    Raises:
        BadInput: there is no run, or none of its steps has the metric.
    """
    file = Path(run) / "metrics.jsonl"
    try:
        lines = file.read_text("utf-8", errors="replace").splitlines()
    except (OSError, ValueError) as error:
        raise BadInput(f"{run}: expected a run directory with metrics.jsonl, found none") from error
    rows = [_row(line, f"{file}, line {i + 1}") for i, line in enumerate(lines) if line.strip()]
    names = {name for row in rows for name in row}
    if metric not in names:
        near = difflib.get_close_matches(metric, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(names))}"
        raise BadInput(f"--metric {metric}: {run} has no such metric in {len(rows)} steps; {hint}")
    found = [
        (row["step"], row[metric]) for row in rows if isinstance(row.get(metric), (int, float))
    ]
    if not found:
        raise BadInput(f"--metric {metric}: {run} has no number for it")
    return found


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("step"), (int, float)):
        raise BadInput(f"{where}: expected an object with a step, got {line!r:.60}")
    return row


def draw(curves: dict[str, list[Points]], metric: str, out: str) -> None:
    """Writes the picture: a line for each name, the mean of its runs, with a band around all."""
    try:
        import matplotlib
    except ImportError as error:
        raise BadInput(f"needs matplotlib: pip install 'marft_jax[plot]' ({error})") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    many = len(curves) > 18  # more than a legend inside has room for
    size = (9, 0.17 * len(curves)) if many else (7, 3.2)
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    if many:
        colours = pyplot.get_cmap("turbo")([n / len(curves) for n in range(len(curves))])
        axes.set_prop_cycle(color=colours)
    for name, runs in curves.items():
        steps = sorted(set.intersection(*({step for step, _ in run} for run in runs)))
        values = [[dict(run)[step] for run in runs] for step in steps]
        [line] = axes.plot(steps, [sum(own) / len(own) for own in values], label=name)
        if len(runs) > 1:
            band = [min(own) for own in values], [max(own) for own in values]
            axes.fill_between(steps, *band, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel="step", ylabel=metric)
    axes.grid(alpha=0.3)
    if many:
        figure.legend(loc="outside right upper", fontsize="x-small")
    else:
        axes.legend()
    try:
        figure.savefig(out, dpi=120)
    except ValueError as error:  # a kind of picture that is not known
        raise BadInput(f"--out {out}: {error}") from error


if __name__ == "__main__":
    main()
