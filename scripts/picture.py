"""Draws the picture of the first page: success over the steps, beside dialogues of the first run,
of its first and its last step.

    python scripts/picture.py runs/quickstart runs/seed1 --out .assets/quickstart.png

It needs `pip install -e ".[plot]"`.
"""

from __future__ import annotations

import argparse
import itertools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

from marft_jax.formats import jsonlines  # noqa: E402

Row = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    parser.add_argument("--out", required=True, type=Path, metavar="PNG")
    given = parser.parse_args(argv)
    rows = [rows_of(run / "metrics.jsonl") for run in given.runs]
    figure, (curves, dialogue) = pyplot.subplots(
        1, 2, figsize=(10, 3.4), layout="constrained", width_ratios=(5, 3)
    )
    for seed, steps in enumerate(rows):
        success = [step["reward/mean"] for step in steps]
        curves.plot(range(1, len(steps) + 1), success, label=f"seed {seed}")
    curves.set(xlabel="step", ylabel="success")
    curves.grid(alpha=0.3)
    curves.legend(loc="lower right")
    dialogue.axis("off")
    folder, last = given.runs[0] / "transcripts", len(rows[0])
    lines = [*spoken(folder / "1.jsonl", 1, 0.0), "", *spoken(folder / f"{last}.jsonl", last, 1.0)]
    text = "\n".join(lines)
    dialogue.text(0.05, 0.97, text, family="monospace", fontsize=12, va="top", linespacing=1.5)
    figure.savefig(given.out, dpi=100)


def rows_of(file: Path) -> list[Row]:
    return list(jsonlines.objects(file))


def spoken(file: Path, step: int, reward: float) -> Iterator[str]:
    """Yields the lines of the first episode of a step that earned ``reward``."""
    episode = next(row for row in rows_of(file) if row["reward"] == reward)
    yield f"step {step}: {episode['task']}"
    for turn in episode["turns"]:
        said = textwrap.wrap(turn["text"], 34) or [""]
        for name, line in itertools.zip_longest([turn["agent"]], said, fillvalue=""):
            yield f"  {name:<9}{line}"
    yield f"  reward   {reward:g}"


if __name__ == "__main__":
    main()
