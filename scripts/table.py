"""Learns the quickstart's task in many ways and prints one table: what was chosen, how it went.

    python scripts/table.py                       # every row, one after the other
    python scripts/table.py --only grpo debate    # rows whose name contains one of these
    python scripts/table.py --json results.json   # also keep the numbers

Each row is one ``python -m marft_jax.train`` with the flags that stand in the table, so any of them
can be repeated alone.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

from marft_jax import cli
from marft_jax.errors import BadInput

GROUPS = ["--algo.group_size", "8"]
ROWS: dict[str, list[str]] = {
    "appo (the quickstart)": [],
    "tppo": ["--algo.name", "tppo"],
    "grpo": ["--algo.name", "grpo", *GROUPS],
    "gspo": ["--algo.name", "gspo", *GROUPS],
    "reinforce": ["--algo.name", "reinforce", *GROUPS],
    "one adapter for all": ["--lora.mode", "shared"],
    "critic: a head each": ["--critic.mode", "heads"],
    "critic: adapters": ["--critic.mode", "lora"],
    "dag": ["--team.file", "configs/quickstart/dag.yaml"],
    "orchestrated": ["--team.file", "configs/quickstart/orchestrated.yaml"],
    "debate": ["--team.file", "configs/quickstart/debate.yaml", "--team.rounds", "1"],
    "shared conversation": ["--team.context", "shared"],
}
LAST = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--json", metavar="FILE", help="where the numbers go")
    parser.add_argument("--keep", metavar="FOLDER", help="where the run directories stay")
    own = parser.parse_args()
    chosen = [name for name in ROWS if any(word in name for word in own.only)]
    if not chosen:
        raise BadInput(f"--only: expected words of {', '.join(ROWS)}, got {' '.join(own.only)}")
    print(f"| | flags | first reward | mean of the last {LAST} of {own.steps} | first >= 0.9 | s |")
    print("|---|---|---|---|---|---|", flush=True)
    results = {}
    for name in chosen:
        results[name] = result = learn(name, ROWS[name], own.steps, own.keep)
        reached = result["reached"] or "-"
        print(
            f"| {name} | `{' '.join(ROWS[name])}` | {result['first']:.2f} | {result['last']:.2f} "
            f"| {reached} | {result['seconds']:.0f} |",
            flush=True,
        )
    if own.json:
        Path(own.json).write_text(json.dumps(results, indent=1), encoding="utf-8")


def learn(
    name: str, flags: list[str], steps: int, keep: str | None
) -> dict[str, float | int | None]:
    """Trains once in a folder of its own; rewards, the first good step, and seconds in all."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(keep or scratch) / re.sub(r"\W+", "_", name)
        command = [sys.executable, "-m", "marft_jax.train", "--run.dir", str(run)]
        command += ["--run.steps", str(steps), "--run.transcripts_every", str(steps), *flags]
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - started
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
        lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    rewards = [json.loads(line)["reward/mean"] for line in lines]
    reached = next((step for step, reward in enumerate(rewards, 1) if reward >= 0.9), None)
    first, last = rewards[0], mean(rewards[-LAST:])
    return {"first": first, "last": last, "reached": reached, "seconds": seconds}


if __name__ == "__main__":
    with cli.boundary():
        main()
