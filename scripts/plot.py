"""Draws a metric of one or more runs over their steps (needs matplotlib: the extra ``plot``).

python scripts/plot.py runs/a runs/b --out reward.png
python scripts/plot.py runs/a --metric agent/solver/entropy --out entropy.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="run directories")
    parser.add_argument("--metric", default="reward/mean", help="a name in metrics.jsonl")
    parser.add_argument("--out", required=True, help="the picture to write")
    arguments = parser.parse_args()
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for run in arguments.runs:
        lines = (Path(run) / "metrics.jsonl").read_text("utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        points = [(row["step"], row[arguments.metric]) for row in rows if arguments.metric in row]
        axes.plot(*zip(*points, strict=True), label=Path(run).name)
    axes.set(xlabel="step", ylabel=arguments.metric)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(arguments.out, dpi=120)


if __name__ == "__main__":
    main()
