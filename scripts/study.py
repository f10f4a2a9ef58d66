"""Runs a table of settings x seeds, evaluates each on held-out tasks, and writes what came out.

    python scripts/study.py configs/studies/algorithms.yaml
    python scripts/study.py configs/studies/algorithms.yaml --only grpo --seeds 0 --jobs 2

A study is one YAML file:

    about: one line
    configs: [quickstart.yaml]           # files below the settings of every row, beside this one
    settings: {run.steps: 25}            # of every row
    evaluate: {eval.temperature: 0}      # of every evaluation
    seeds: [0, 1, 2]
    reach: 0.9                           # a training reward whose first step is told
    axes:                                # what rows may be swept over: names, and settings of each
      rate: {slow: {algo.lr: 1.0e-4}, fast: {algo.lr: 1.0e-3}}
    rows:
      untrained: {command: evaluate}
      start: {command: imitate, options: {demonstrations: 256}, settings: {run.steps: 8}}
      team: {from: start, settings: {...}}          # trains from the adapters of that row
      muted: {command: evaluate, from: team, evaluate: {team.workflow: "my_module:muted"}}
      alone: {match: {tokens: team}}                 # until it has sampled as many; or compute
      "appo, {rate}": {settings: {algo.name: appo}}  # a row for each rate; `from` may name it, too
    compare: [[team, alone]]             # differences, paired by seed and task
    chosen: what was tried before, and on which tasks

Every run is a directory below ``runs/studies/NAME``, and every figure a line of ``results.jsonl``.
Started again after a kill, the same command keeps what is finished and continues what was begun; a
row whose settings changed is run anew. It runs from committed code only, unless told ``--dirty``.
Budgets: `tokens` are those that were sampled, `compute` those of prompts as well. A row with
`match` begins with its own `run.steps`, which should cost less, and goes on to about as much.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from study_file import Row, Study, needed, needs, read
from study_report import LAST, Result, report

from marft_jax import cli
from marft_jax.errors import BadInput, RunFailed
from marft_jax.formats import jsonlines

_STOPPED = 75
_WRITTEN = ("results.jsonl", "table.md", "curves.png", "differences.png")
"""Files that a study writes itself."""


def main(argv: Sequence[str] | None = None) -> None:
    """Leaves with 1: a run failed, the others are finished; 2: bad input; 75: stopped."""
    parser = cli.Parser("scripts/study.py", __doc__)
    parser.add_argument("study", help="a YAML file")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="these rows, and what they need")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="these seeds only")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; each has its cores")
    parser.add_argument("--runs", default="runs/studies", help="where run directories go")
    parser.add_argument("--out", help="where the figures go (results/ beside the study)")
    parser.add_argument(
        "--dirty", action="store_true", help="run with changes that are not committed; rows say so"
    )
    with cli.boundary():
        own = parser.parse_args(argv)
        study = read(Path(own.study))
        chosen = needed(study, own.only or list(study.rows))
        out = Path(own.out) if own.out else Path(own.study).parent / "results" / study.name
        runner = Runner(study, Path(own.runs) / study.name, out, own.jobs)
        todo = runner.missing(chosen, own.seeds or study.seeds)
        if todo and not own.dirty and commit().endswith("-dirty"):
            raise BadInput(
                "expected committed code, so that figures can be had again, got changes (git "
                "status); commit them, or say --dirty: then rows are named so"
            )
        failed = runner.run(todo)
        report(study, runner.results(), out)
        if failed:
            raise RunFailed(f"{len(failed)} runs failed: {', '.join(failed)}")


class Runner:
    """Runs what is not finished, a few at a time.

    Args:
        runs: the folder of run directories.
        out: the folder of ``results.jsonl``.
        jobs: runs at a time; the cores are divided among them.
    """

    def __init__(self, study: Study, runs: Path, out: Path, jobs: int) -> None:
        self._study, self._runs, self._file = study, runs, out / "results.jsonl"
        self._jobs = max(1, jobs)
        self._cores: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        self._configs = [word for file in study.configs for word in ("--config", str(file))]
        cores = sorted(os.sched_getaffinity(0))
        for job in range(self._jobs):
            self._cores.put(list(cores[job :: self._jobs] or cores))
        self._workers: dict[int, subprocess.Popen[str]] = {}  # by their list of cores
        self._figures: dict[tuple[str, int], Result] = {}  # of rows that are finished
        self._stopped = False

    def results(self) -> list[Result]:
        """Figures of the study as it is now; those of changed rows are left out, and a line
        that was torn by a kill leaves the file."""
        found: dict[tuple[str, int], Result] = {}

        def is_whole(line: Result) -> bool:
            name, seed, digest = line["row"], line["seed"], line["id"]
            row = self._study.rows.get(name)
            if row is not None and digest == self._id(row, seed):
                found[name, seed] = line
            return True

        jsonlines.keep(self._file, is_whole)
        return list(found.values())

    def missing(self, rows: Sequence[Row], seeds: Sequence[int]) -> list[tuple[Row, int]]:
        """Rows and seeds that have no figures yet, seed by seed."""
        done = {(result["row"], result["seed"]) for result in self.results()}
        return [(row, seed) for seed in seeds for row in rows if (row.name, seed) not in done]

    def run(self, todo: Sequence[tuple[Row, int]]) -> list[str]:
        """Runs these rows, each after the one that it starts from; returns the names of those that
        failed."""
        previous = signal.signal(signal.SIGTERM, lambda *_: self._stop())
        futures: dict[tuple[str, int], Future[None]] = {}
        self._figures = {(found["row"], found["seed"]): found for found in self.results()}
        failed = []
        try:
            with ThreadPoolExecutor(self._jobs) as pool:
                for row, seed in todo:
                    before = [futures[n, seed] for n in needs(row) if (n, seed) in futures]
                    futures[row.name, seed] = pool.submit(self._one, row, seed, before)
                for (name, seed), future in futures.items():
                    if error := future.exception():
                        failed.append(f"{name} (seed {seed})")
                        print(f"{name}, seed {seed}: {error}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            self._stop()
        finally:
            signal.signal(signal.SIGTERM, previous)
            for worker in self._workers.values():
                worker.communicate()
        if self._stopped:
            raise SystemExit(_STOPPED)
        return failed

    def _stop(self) -> None:
        self._stopped = True
        for worker in list(self._workers.values()):
            worker.terminate()

    def _one(self, row: Row, seed: int, before: Sequence[Future[None]]) -> None:
        for needed_one in before:
            needed_one.result()
        folder, rest = self._folder(row, seed), ["--run.seed", str(seed)]
        cores = self._cores.get()
        try:
            if row.command != "evaluate":
                self._call(row.command, self._learning(row, seed), cores, f"{folder}.txt")
            if row.match:
                self._spend(row, seed, cores)
            played = self._evaluation(row, seed)
            self._call("evaluate", [*played, *rest], cores, f"{folder}-evaluation.txt")
        finally:
            self._cores.put(cores)
        result = self._measured(row, seed)
        jsonlines.append(self._file, [json.dumps(result)])
        self._figures[row.name, seed] = result
        print(f"{row.name}, seed {seed}: {result['success']:.3f}", flush=True)

    def _spend(self, row: Row, seed: int, cores: list[int]) -> None:
        """Learns on until another step would cost more than the row whose budget it has."""
        assert row.match is not None
        budget, other = row.match
        most = self._figures[other, seed][budget]
        while True:
            spent = _spent(_metrics(self._folder(row, seed)))
            steps, each = spent["steps"], spent[budget] / spent["steps"]
            more = int((most - spent[budget]) / each + 0.5)
            if more < 1:
                return
            flags = [*self._learning(row, seed), "--run.steps", str(steps + more)]
            self._call(row.command, flags, cores, f"{self._folder(row, seed)}.txt")

    def _call(self, command: str, flags: Sequence[str], cores: list[int], log: str) -> None:
        """Runs a command of the package to its end; its output goes to a file."""
        if self._stopped:
            raise RuntimeError("stopped")
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        worker = self._workers.get(id(cores))
        if worker is None or worker.poll() is not None:
            worker = self._workers[id(cores)] = _worker(cores)
        assert worker.stdin and worker.stdout
        worker.stdin.write(json.dumps([command, list(flags), log]) + "\n")
        worker.stdin.flush()
        answer = worker.stdout.readline()
        if answer.strip() != "0":
            lines = Path(log).read_text("utf-8", errors="replace").strip().splitlines()
            code = answer.strip() or worker.wait()
            raise RuntimeError(f"exit code {code}: {lines[-1] if lines else 'no output'} ({log})")

    def _learning(self, row: Row, seed: int) -> list[str]:
        flags = [*self._configs, *_words({**row.options, **row.settings}), "--run.seed", str(seed)]
        flags += [
            "--out" if row.command == "imitate" else "--run.dir",
            str(self._folder(row, seed)),
        ]
        if row.start:
            start = self._folder(self._study.rows[row.start], seed)
            flags += ["--lora.init", str(start)]
        return flags

    def _evaluation(self, row: Row, seed: int) -> list[str]:
        folder = self._folder(row, seed)
        source = self._study.rows[row.start] if row.start and row.command == "evaluate" else row
        if source.command != "evaluate":
            flags = ["--run", str(self._folder(source, seed)), *_words(row.evaluate)]
            return [*flags, "--out", str(folder / "evaluations")]
        settings = {**row.settings, **row.evaluate}
        played = {key: value for key, value in settings.items() if key.split(".")[0] in _PLAYED}
        flags = [*self._configs, *_words(played)]
        base = cli.parse_run(None, None, flags).model.base
        return ["--base", base, *flags, "--out", str(folder / "evaluations")]

    def _folder(self, row: Row, seed: int) -> Path:
        return self._runs / f"{row.name.replace(' ', '_')}-{seed}-{self._id(row, seed)}"

    def _id(self, row: Row, seed: int) -> str:
        """A digest of all that decides what the row does."""
        start = self._id(self._study.rows[row.start], seed) if row.start else None
        parts: list[Any] = [row.command, start, row.options, row.settings, row.evaluate, seed]
        if row.match:
            parts += [row.match[0], self._id(self._study.rows[row.match[1]], seed)]
        parts += [file.read_text("utf-8") for file in self._study.configs]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]

    def _measured(self, row: Row, seed: int) -> Result:
        folder = self._folder(row, seed)
        summary = json.loads((folder / "evaluations" / "summary.json").read_text("utf-8"))
        [figures] = summary.values()
        [success] = [value for key, value in figures.items() if key.endswith("/reward")]
        result = {
            "row": row.name, "seed": seed, "id": self._id(row, seed), "success": success,
            "interval": figures["interval"], "tasks": figures["tasks"],
            "outcomes": _outcomes(folder / "evaluations"), **_origin(),
        }  # fmt: skip
        if row.command == "evaluate" or not (folder / "metrics.jsonl").exists():
            return result
        steps = _metrics(folder)
        rewards = [step["reward/mean"] for step in steps if "reward/mean" in step]
        reached = (n for n, reward in enumerate(rewards, 1) if reward >= self._study.reach)
        spent = _spent(steps)
        return result | {
            "rewards": [round(reward, 4) for reward in rewards],
            "last": mean(rewards[-LAST:]) if rewards else None,
            "reached": next(reached, None),
            "tokens": spent["tokens"],
            "compute": spent["compute"],
            "rollbacks": steps[-1].get("guard/rollbacks", 0),
            "seconds": sum(step.get("time/step_s", 0.0) for step in steps),
        }


def _metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]


def _spent(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Number of a run's steps, and what they cost: sampled tokens, and those of prompts as well."""
    tokens = sum(step.get("tokens/action", 0) for step in steps)
    prompts = sum(step.get("tokens/prompt", 0) for step in steps)
    return {"steps": len(steps), "tokens": tokens, "compute": tokens + prompts}


def _outcomes(evaluations: Path) -> list[float]:
    """Reward of each held-out task, in their order."""
    lines = [line for f in evaluations.glob("*.jsonl") for line in f.read_text().splitlines()]
    return [one["reward"] for one in sorted(map(json.loads, lines), key=lambda one: one["index"])]


_PLAYED = {"run", "model", "team", "env", "rollout", "mesh", "eval"}
"""Sections that an evaluation of a bare base reads."""


def _worker(cores: list[int]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("study_worker.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: _prepare(cores),
    )


def _prepare(cores: list[int]) -> None:
    """In the new process: its cores, and its end when we end, however that comes about."""
    os.sched_setaffinity(0, cores)
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _words(settings: Mapping[str, Any]) -> list[str]:
    words = []
    for key, value in settings.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{key}", *map(str, values)]
    return words


def commit() -> str:
    """Commit of the code, with ``-dirty`` behind it where files differ from it which no study
    writes."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no").splitlines()
    dirty = any(not line.endswith(_WRITTEN) for line in changed)
    return git("rev-parse", "--short", "HEAD") + "-dirty" * dirty


def _origin() -> Result:
    """Where and when a figure was made."""
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    machine = f"{os.cpu_count()} x {names[0] if names else platform.machine()}"
    return {"commit": commit(), "machine": machine, "date": time.strftime("%Y-%m-%d")}


if __name__ == "__main__":
    main()
