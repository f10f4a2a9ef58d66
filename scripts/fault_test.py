"""Kills a training run again and again, and checks that it ends as if nobody had.

    python scripts/fault_test.py --kills 24

One run is left alone. Another, with the same settings, is killed (SIGKILL) at random moments: while
it starts, in the middle of steps, and while a checkpoint is being written; then it finishes. Both
must have the same metrics, transcripts, events of the guard and final state, bit for bit, and no
start may lose more than the steps since the last checkpoint. Further flags are those of training.
With ``--at s3://bucket/path`` the killed run is there, and no checkpoint that is read there may be
incomplete. With ``--rollout.sampler http``, whose samples do not repeat, only the metrics of
saved steps may not change.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from marft_jax import cli
from marft_jax.run.manifest import damage
from marft_jax.run.storage import storage_of

MOMENTS = ("starting", "in a step", "in a save")
_MEASURED = re.compile(r"time$|time/|throughput/|device/")
_DEADLINE = 900.0
_ADDRESSES: dict[Path, str] = {}
"""Where a run is, if not in its folder; the folder then has its output alone."""
_SAVED: list[dict[str, Any]] = []
"""Metrics of the steps of the killed run that were saved."""


def main(argv: Sequence[str] | None = None) -> None:
    """Leaves with 0 if the killed run equals the other, with 1 and what differs if not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--dir", help="where the two runs go; a temporary folder by default")
    parser.add_argument("--at", help="address of the killed run in object storage")
    own, flags = parser.parse_known_args(argv)
    folder = Path(own.dir or tempfile.mkdtemp(prefix="fault_test-"))
    flags = [*flags, "--run.steps", str(own.steps), "--run.save_every", str(own.save_every)]
    whole, killed, repeats = folder / "whole", folder / "killed", "http" not in flags
    if own.at is not None:
        _ADDRESSES[killed] = own.at
    started = time.monotonic()
    if repeats:
        if finish(whole, flags) != 0:
            raise SystemExit(f"the undisturbed run failed; see {whole}/output.txt")
        print(f"undisturbed run: {time.monotonic() - started:.0f} s", flush=True)
    kills = kill_often(killed, flags, own.kills, own.save_every, random.Random(own.seed))
    if finish(killed, flags) != 0:
        raise SystemExit(f"the killed run did not finish; see {killed}/output.txt")
    check_saved(killed)
    differing = differences(whole, killed) if repeats else []
    counts = ", ".join(f"{kills.count(moment)} {moment}" for moment in MOMENTS)
    print(
        f"{len(kills)} kills ({counts}) over {own.steps} steps, {time.monotonic() - started:.0f} s"
    )
    same = "metrics, transcripts, events and final state are equal"
    print("\n".join(differing) or (same if repeats else "metrics of saved steps did not change"))
    raise SystemExit(1 if differing else 0)


def kill_often(
    run: Path, flags: Sequence[str], kills: int, save_every: int, rng: random.Random
) -> list[str]:
    """Starts the run so many times and kills each; the moments at which it did."""
    done: list[str] = []
    while len(done) < kills:
        moment = MOMENTS[len(done) % len(MOMENTS)]
        newest, begun = newest_checkpoint(run), len(_output(run))
        process = start(run, flags)
        try:
            wait_for(MOMENT_OF[moment](run, rng), process)
            process.kill()
        finally:
            process.kill()
            process.wait()
        if process.returncode != -signal.SIGKILL:
            raise SystemExit(f"the run ended by itself ({process.returncode}) before kill "
                             f"{len(done) + 1}; give it more --steps")  # fmt: skip
        done.append(moment)
        check_start(run, begun, newest, save_every)
        print(f"kill {len(done)}, {moment}: at step {last_step(run)}", flush=True)
    return done


def while_starting(run: Path, rng: random.Random) -> Callable[[], bool]:
    """Some time in the first seconds, wherever that is."""
    until = time.monotonic() + rng.uniform(0.0, 12.0)
    return lambda: time.monotonic() > until


def in_a_step(run: Path, rng: random.Random) -> Callable[[], bool]:
    """A random moment after a random number of steps."""
    steps, wait = rng.randint(0, 3), rng.uniform(0.0, 1.0)
    seen: list[float] = []
    begun = len(_output(run))

    def now() -> bool:
        log = _output(run)[begun:]
        if log.count("\nstep ") + log.startswith("step ") > steps and not seen:
            seen.append(time.monotonic())
        return bool(seen) and time.monotonic() > seen[0] + wait

    return now


def in_a_save(run: Path, rng: random.Random) -> Callable[[], bool]:
    """While the draft of a checkpoint lies there, a random part of a save later."""
    address = _ADDRESSES.get(run)
    wait, begun = rng.uniform(0.0, 1.0 if address else 0.03), time.time()  # it is also uploaded
    folder = storage_of(address, trains=True).path if address else run

    def now() -> bool:
        for draft in (folder / "checkpoints").glob(".saving-*[0-9]"):
            with contextlib.suppress(FileNotFoundError):
                if draft.stat().st_mtime > begun:  # not that of a save that was killed before
                    time.sleep(wait)
                    return True
        return False

    return now


MOMENT_OF = dict(zip(MOMENTS, (while_starting, in_a_step, in_a_save), strict=True))


def start(run: Path, flags: Sequence[str]) -> subprocess.Popen[bytes]:
    """A training process of its own, with its output in ``output.txt``."""
    run.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "marft_jax.train",
        "--run.dir",
        _ADDRESSES.get(run, str(run)),
        *flags,
    ]
    with (run / "output.txt").open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def finish(run: Path, flags: Sequence[str]) -> int:
    """Trains to the end; the exit code."""
    return start(run, flags).wait()


def wait_for(moment: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _DEADLINE
    while process.poll() is None and not moment():
        if time.monotonic() > deadline:
            raise SystemExit("the moment to kill did not come")
        time.sleep(0.002)


def check_start(run: Path, begun: int, newest: int, save_every: int) -> None:
    """A start that came so far as to say where it begins began at the newest checkpoint."""
    begun = re.findall(
        r"continuing after step (\d+)|from the beginning$", _output(run)[begun:], re.M
    )
    if begun and int(begun[0] or -1) != newest:
        raise SystemExit(f"it began at step {begun[0]}, but there was a checkpoint {newest}")
    if last_step(run) - max(newest_checkpoint(run), 0) > save_every:
        raise SystemExit(f"step {last_step(run)} was reached, but only {newest} was saved")
    check_saved(run)


def check_saved(run: Path) -> None:
    """The metrics of steps that were saved before are as they were."""
    rows = metrics_of(run)
    if rows[: len(_SAVED)] != _SAVED:
        raise SystemExit(f"the metrics of the first {len(_SAVED)} steps changed")
    _SAVED[:] = [row for row in rows if row["step"] <= newest_checkpoint(run)]


def files_of(run: Path) -> Path:
    """The run directory; of a run in object storage, what another machine finds there."""
    if run not in _ADDRESSES:
        return run
    storage = storage_of(_ADDRESSES[run])
    storage.fetch("*")
    for folder in (storage.path / "checkpoints").glob("[0-9]*"):
        storage.fetch_checkpoint(int(folder.name))
        if (wrong := damage(folder)) is not None:
            raise SystemExit(f"checkpoint {folder.name} is read, but {wrong}")
    return storage.path


def newest_checkpoint(run: Path) -> int:
    folder = files_of(run) / "checkpoints"
    names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=-1)


def last_step(run: Path) -> int:
    return max((row["step"] for row in metrics_of(run)), default=0)


def metrics_of(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Rows of a file without what the clock and the machine decide."""
    file = files_of(run) / name
    lines = file.read_text().splitlines() if file.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [{k: v for k, v in row.items() if not _MEASURED.match(k)} for row in rows]


def findings_of(run: Path) -> list[dict[str, Any]]:
    """Events of the guard."""
    return [row for row in metrics_of(run, "events.jsonl") if "kind" in row]


def differences(whole: Path, killed: Path) -> list[str]:
    """Lists what is not equal in two finished runs."""
    found = []
    whole, killed = files_of(whole), files_of(killed)
    if metrics_of(whole) != metrics_of(killed):
        found.append("metrics.jsonl differs")
    if findings_of(whole) != findings_of(killed):
        found.append("events of the guard differ")
    # a kill in the middle of a write leaves a hidden draft, which nothing reads
    names = {p.name for run in (whole, killed) for p in (run / "transcripts").glob("[!.]*")}
    for name in sorted(names):
        files = [run / "transcripts" / name for run in (whole, killed)]
        one, other = (file.read_bytes() if file.is_file() else None for file in files)
        if one != other:
            found.append(f"transcripts/{name} differs")
    if newest_checkpoint(whole) != newest_checkpoint(killed):
        found.append("the last checkpoint is of another step")
    else:
        states = [state_of(run) for run in (whole, killed)]
        found += [f"{k} differs" for k in states[0] if not _same(k, *states)]
    return found


def state_of(run: Path) -> dict[str, np.ndarray]:
    """Every array of the newest checkpoint, by its path."""
    import jax
    import orbax.checkpoint as ocp

    folder = run.absolute() / "checkpoints" / str(newest_checkpoint(run)) / "state"
    tree = ocp.StandardCheckpointer().restore(folder)
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def _output(run: Path) -> str:
    file = run / "output.txt"
    return file.read_text(errors="replace") if file.is_file() else ""


def _same(name: str, whole: dict[str, np.ndarray], killed: dict[str, np.ndarray]) -> bool:
    return name in killed and whole[name].tobytes() == killed[name].tobytes()


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with cli.boundary():
        main()
