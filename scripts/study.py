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
      muted: {command: evaluate, from: team, evaluate: {team.workflow: muted}}
      "appo, {rate}": {settings: {algo.name: appo}}  # a row for each rate; `from` may name it, too

Every run is a directory below ``runs/studies/NAME``, and every figure a line of ``results.jsonl``.
Started again after a kill, the same command keeps what is finished and continues what was begun; a
row whose settings changed is run anew.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import os
import platform
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from scipy.stats import t as student

from marft_jax import cli
from marft_jax.errors import BadInput, RunFailed
from marft_jax.formats import documents

_LAST = 5
"""Steps at the end of a run over which its training reward is averaged."""
_COMMANDS = ("train", "imitate", "evaluate")
_KEYS = {"about", "configs", "settings", "evaluate", "seeds", "reach", "axes", "rows"}
_ROW_KEYS = {"command", "from", "options", "settings", "evaluate"}
_STOPPED = 75
_AXIS = re.compile(r"\{(\w*)\}")

Result = dict[str, Any]


class Row(NamedTuple):
    """One way of doing it.

    Attributes:
        command: ``train``, ``imitate``, or ``evaluate`` for what is played without learning.
        start: the row whose adapters it begins with; None for the bare base.
        settings, evaluate: those of the study with its own on top.
        own: its own settings alone, with those of the axes that its name has.
        options: flags of the command that are no settings, such as ``demonstrations``.
    """

    name: str
    command: str
    start: str | None
    settings: Mapping[str, Any]
    evaluate: Mapping[str, Any]
    own: Mapping[str, Any]
    options: Mapping[str, Any]


class Study(NamedTuple):
    """A study file; ``rows`` in an order in which each comes after the one that it starts from."""

    name: str
    about: str
    configs: Sequence[Path]
    seeds: Sequence[int]
    reach: float
    rows: Mapping[str, Row]


def main(argv: Sequence[str] | None = None) -> None:
    """Leaves with 1: a run failed, the others are finished; 2: bad input; 75: stopped."""
    parser = cli.Parser("scripts/study.py", __doc__)
    parser.add_argument("study", help="a YAML file")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="these rows, and what they need")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="these seeds only")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; each has its cores")
    parser.add_argument("--runs", default="runs/studies", help="where run directories go")
    parser.add_argument("--out", help="where the figures go (results/ beside the study)")
    with cli.boundary():
        own = parser.parse_args(argv)
        study = read(Path(own.study))
        chosen = _needed(study, own.only or list(study.rows))
        out = Path(own.out) if own.out else Path(own.study).parent / "results" / study.name
        runner = Runner(study, Path(own.runs) / study.name, out, own.jobs)
        failed = runner.run(chosen, own.seeds or study.seeds)
        report(study, runner.results(), out)
        if failed:
            raise RunFailed(f"{len(failed)} runs failed: {', '.join(failed)}")


def read(file: Path) -> Study:
    """Reads a study.

    Raises:
        BadInput: an unknown key or command, or a row that starts from one that comes later.
    """
    tree = documents.read(str(file), "the study")
    if not isinstance(tree, dict) or not isinstance(tree.get("rows"), dict):
        raise BadInput(f"{file}: expected a study with `rows:`, got {tree!r:.80}")
    _check_keys(f"{file}", tree, _KEYS)
    rows: dict[str, Row] = {}
    for pattern, given in tree["rows"].items():
        given = given or {}
        _check_keys(f"{file}, row {pattern}", given, _ROW_KEYS)
        command = given.get("command", "train")
        if command not in _COMMANDS:
            raise BadInput(f"{file}, row {pattern}: command: expected {_COMMANDS}, got {command!r}")
        for values, swept in _sweep(f"{file}, row {pattern}", pattern, tree.get("axes", {})):
            name, start = _filled(pattern, values), given.get("from")
            if name in rows:
                raise BadInput(f"{file}, row {name}: expected one row of this name, got two")
            if start is not None and (start := _filled(start, values)) not in rows:
                raise BadInput(f"{file}, row {name}: from: expected a row above it, got {start!r}")
            below = rows[start].settings if command == "evaluate" and start else {}
            own = {**swept, **given.get("settings", {})}
            settings = {**tree.get("settings", {}), **below, **own}
            evaluate = {**tree.get("evaluate", {}), **given.get("evaluate", {})}
            options = given.get("options", {})
            rows[name] = Row(name, command, start, settings, evaluate, own, options)
    configs = [file.parent / name for name in tree.get("configs", ())]
    seeds, reach = tree.get("seeds", [0]), tree.get("reach", 0.9)
    return Study(file.stem, tree.get("about", ""), configs, seeds, reach, rows)


def _sweep(
    where: str, pattern: str, axes: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """The names, by axis, and the settings of every combination of the axes in a row's name."""
    names = _AXIS.findall(pattern)
    if unknown := [name for name in names if name not in axes]:
        raise BadInput(f"{where}: expected axes of {', '.join(axes) or 'none'}, got {unknown[0]!r}")
    for chosen in itertools.product(*(axes[name].items() for name in names)):
        values = {name: str(value) for name, (value, _) in zip(names, chosen, strict=True)}
        yield values, {key: x for _, settings in chosen for key, x in settings.items()}


def _filled(name: str, values: Mapping[str, str]) -> str:
    return _AXIS.sub(lambda axis: values.get(axis[1], axis[0]), name)


def _check_keys(where: str, given: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(given) - known):
        raise BadInput(f"{where}: expected {', '.join(sorted(known))}, got {unknown[0]!r}")


def _needed(study: Study, names: Sequence[str]) -> list[Row]:
    """The rows of these names and all that they start from, in the study's order."""
    wanted = set()
    for name in names:
        if name not in study.rows:
            raise BadInput(f"--only: expected rows of {', '.join(study.rows)}, got {name!r}")
        row: str | None = name
        while row:
            wanted.add(row)
            row = study.rows[row].start
    return [row for row in study.rows.values() if row.name in wanted]


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
            self._cores.put(cores[job :: self._jobs] or cores)
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def results(self) -> list[Result]:
        """The figures of the study as it is now; those of changed rows are left out."""
        if not self._file.exists():
            return []
        lines = [json.loads(line) for line in self._file.read_text("utf-8").splitlines()]
        rows = self._study.rows
        found = {
            (line["row"], line["seed"]): line
            for line in lines
            if line["row"] in rows and line["id"] == self._id(rows[line["row"]], line["seed"])
        }
        return list(found.values())

    def run(self, rows: Sequence[Row], seeds: Sequence[int]) -> list[str]:
        """Runs every row with every seed; returns the names of those that failed."""
        finished = {(result["row"], result["seed"]) for result in self.results()}
        previous = signal.signal(signal.SIGTERM, lambda *_: self._stop())
        futures: dict[tuple[str, int], Future[None]] = {}
        failed = []
        try:
            with ThreadPoolExecutor(self._jobs) as pool:
                for seed in seeds:
                    for row in rows:
                        if (row.name, seed) not in finished:
                            before = futures.get((row.start or "", seed))
                            job = pool.submit(self._one, row, seed, before)
                            futures[row.name, seed] = job
                for (name, seed), future in futures.items():
                    if error := future.exception():
                        failed.append(f"{name} (seed {seed})")
                        print(f"{name}, seed {seed}: {error}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            self._stop()
        finally:
            signal.signal(signal.SIGTERM, previous)
        if self._stopped:
            raise SystemExit(_STOPPED)
        return failed

    def _stop(self) -> None:
        self._stopped = True
        for process in list(self._processes):
            process.terminate()

    def _one(self, row: Row, seed: int, before: Future[None] | None) -> None:
        if before is not None:
            before.result()
        folder, rest = self._folder(row, seed), ["--run.seed", str(seed)]
        cores = self._cores.get()
        try:
            if row.command != "evaluate":
                self._call(row.command, self._learning(row, seed), cores, f"{folder}.txt")
            played = self._evaluation(row, seed)
            self._call("evaluate", [*played, *rest], cores, f"{folder}-evaluation.txt")
        finally:
            self._cores.put(cores)
        result = self._measured(row, seed)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{row.name}, seed {seed}: {result['success']:.3f}", flush=True)

    def _call(self, command: str, flags: Sequence[str], cores: list[int], log: str) -> None:
        """Runs a command of the package to its end; its output goes to a file."""
        if self._stopped:
            raise RuntimeError("stopped")
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", f"marft_jax.{command}", *flags],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                preexec_fn=lambda: _prepare(cores),
            )
            self._processes.add(process)
            try:
                code = process.wait()
            finally:
                self._processes.discard(process)
        if code:
            lines = Path(log).read_text("utf-8", errors="replace").strip().splitlines()
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
        parts = [row.command, start, row.options, row.settings, row.evaluate, seed]
        parts += [file.read_text("utf-8") for file in self._study.configs]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]

    def _measured(self, row: Row, seed: int) -> Result:
        folder = self._folder(row, seed)
        summary = json.loads((folder / "evaluations" / "summary.json").read_text("utf-8"))
        [figures] = summary.values()
        [success] = [value for key, value in figures.items() if key.endswith("/accuracy")]
        result = {
            "row": row.name, "seed": seed, "id": self._id(row, seed), "success": success,
            "interval": figures["interval"], "tasks": figures["tasks"], **_origin(),
        }  # fmt: skip
        metrics = folder / "metrics.jsonl"
        if row.command == "evaluate" or not metrics.exists():
            return result
        steps = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
        rewards = [step["reward/mean"] for step in steps if "reward/mean" in step]
        reached = (n for n, reward in enumerate(rewards, 1) if reward >= self._study.reach)
        return result | {
            "rewards": [round(reward, 4) for reward in rewards],
            "last": mean(rewards[-_LAST:]) if rewards else None,
            "reached": next(reached, None),
            "tokens": sum(step.get("tokens/action", 0) for step in steps),
            "seconds": sum(step.get("time/step_s", 0.0) for step in steps),
        }


_PLAYED = {"run", "model", "team", "env", "rollout", "mesh", "eval"}
"""Sections that an evaluation of a bare base reads."""


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


def _origin() -> Result:
    """Where and when a figure was made."""
    git = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    machine = f"{os.cpu_count()} x {names[0] if names else platform.machine()}"
    return {"commit": commit, "machine": machine, "date": time.strftime("%Y-%m-%d")}


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean of independent runs and the bounds of its 95 % interval (Student's t; NaN for one).

    >>> [round(bound, 3) for bound in interval([0.8, 0.9, 1.0])]
    [0.9, 0.652, 1.148]
    """
    middle = mean(values)
    if len(values) < 2:
        return middle, float("nan"), float("nan")
    margin = student.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return middle, middle - margin, middle + margin


def report(study: Study, results: Sequence[Result], out: Path) -> None:
    """Writes ``table.md`` and, where matplotlib is installed, ``curves.png``."""
    if not results:
        raise BadInput(f"{study.name}: no run is finished, nothing to report")
    rows = {name: [r for r in results if r["row"] == name] for name in study.rows}
    lines = [
        f"# {study.name}", "", study.about.strip(), "",
        "| | settings | held-out success (95 %) | more than where it starts (95 %) "
        f"| last {_LAST} steps | first >= {study.reach} | then at least "
        "| tokens | seconds | seeds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    lines += [_line(study.rows[name], found, rows) for name, found in rows.items() if found]
    last = results[-1]
    lines += [
        "",
        f"{last['date']}, {last['commit']}, {last['machine']}: `python scripts/study.py "
        f"configs/studies/{study.name}.yaml`. Intervals: over seeds (Student's t), or over the "
        f"{last['tasks']} tasks (Wilson) where all seeds give the same. Tokens: of actions that "
        f"were sampled, or learned from demonstrations. Then at least: in {_LAST} steps on end.",
    ]
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print((out / "table.md").read_text("utf-8"))
    curves = {
        name: [list(enumerate(r["rewards"], 1)) for r in found if r.get("rewards")]
        for name, found in rows.items()
        if study.rows[name].command == "train"
    }
    import plot

    try:
        plot.draw({k: v for k, v in curves.items() if v}, "reward/mean", str(out / "curves.png"))
    except BadInput as error:
        print(f"no picture: {error}", file=sys.stderr)


def _line(row: Row, found: Sequence[Result], rows: Mapping[str, Sequence[Result]]) -> str:
    middle, low, high = interval([r["success"] for r in found])
    if not low < high:  # one seed, or an untrained base, which is the same for all
        low, high = found[0]["interval"]
    own = [f"{key}={value}" for key, value in {**row.options, **row.own}.items()]
    if row.start:
        own.insert(0, f"from {row.start}")
    cells = [row.name, " ".join(own), f"{middle:.3f} ({max(low, 0):.3f} to {min(high, 1):.3f})"]
    before = {r["seed"]: r["success"] for r in rows.get(row.start or "", ())}
    gains = [r["success"] - before[r["seed"]] for r in found if r["seed"] in before]
    gain = "{:+.3f} ({:+.3f} to {:+.3f})" if len(gains) > 1 else "{:+.3f}"
    cells.append(gain.format(*interval(gains)) if gains else "")
    learned = [r for r in found if r.get("last") is not None]
    sampled = learned if row.command == "train" else []
    cells.append(f"{mean(r['last'] for r in sampled):.3f}" if sampled else "")
    cells.append(", ".join(str(r["reached"] or "-") for r in sampled))
    cells.append(", ".join(_least_after(r) for r in sampled))
    cells.append(f"{mean(r['tokens'] for r in learned):,.0f}" if learned else "")
    cells.append(f"{mean(r['seconds'] for r in learned):,.0f}" if learned else "")
    return f"| {' | '.join([*cells, str(len(found))])} |"


def _least_after(result: Result) -> str:
    """The lowest mean of some steps on end, from the one on that reached what there is to reach."""
    if result["reached"] is None:
        return "-"
    later = result["rewards"][result["reached"] - 1 :]
    ends = range(_LAST, len(later) + 1)
    return f"{min((mean(later[end - _LAST : end]) for end in ends), default=mean(later)):.2f}"


if __name__ == "__main__":
    main()
