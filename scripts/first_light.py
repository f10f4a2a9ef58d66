"""First light on a machine: what works there and how fast, in under ten minutes.

    bash scripts/first_light.sh                    # one accelerator host; prints a table
    bash scripts/first_light.sh --out mine.json    # the same to send back; first_light.json if not

Each part is a command of its own with a time limit, so that one that fails, hangs or takes the
process down stops no other. Nothing is installed and nothing downloaded. The exit code is 1 where a
check failed. On a CPU it runs too, with a small model: it shows that the parts work, not how fast.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from marft_jax import __version__, cli
from marft_jax.errors import described
from marft_jax.extras.planning.chips import GPUS, TPUS

_HERE = Path(__file__).parent
_PACKAGES = re.compile(
    r"jax|jaxlib|jax[-_](cuda|rocm).*|nvidia-cudnn.*|libtpu|flax|optax|orbax-checkpoint|qwix|numpy"
)


class Peak(NamedTuple):
    """Limits of one device, from its data sheet.

    Attributes:
        flops: dense bfloat16 operations per second, summed in float32.
        bandwidth: of its memory, bytes per second.
    """

    flops: float
    bandwidth: float


def _of(chip: str) -> Peak:
    limits = TPUS.get(chip) or GPUS[chip]
    return Peak(limits.flops, limits.bandwidth)


PEAKS = {
    "H200 NVL": Peak(835e12, 4.8e12),
    "H200": _of("h200"),
    "H100 NVL": Peak(835e12, 3.9e12),
    "H100 PCIe": Peak(756e12, 2.0e12),
    "H100 HBM3": _of("h100"),
    "B200": _of("b200"),
    "A100 80GB PCIe": Peak(312e12, 1.935e12),
    "A100 SXM4 80GB": _of("a100"),
    "A100 40GB": Peak(312e12, 1.555e12),
    "L40S": _of("l40s"),
    "L4": _of("l4"),
    "RTX 4090": _of("rtx4090"),
    "TPU v5 lite": _of("v5e"),
    "TPU v5e": _of("v5e"),
    "TPU v5p": _of("v5p"),
    "TPU v5": _of("v5p"),
    "TPU v6 lite": _of("v6e"),
    "TPU v6e": _of("v6e"),
}
"""By words of the device's kind; the first whose words are all there counts."""


def peak_of(kind: str) -> Peak | None:
    """Data sheet's limits of a device of that kind; None for one that is not known, or is a
    share of one (MIG) or another of the same name (laptops)."""
    words = set(re.split(r"[\s-]+", kind))
    if words & {"MIG", "Laptop"}:
        return None
    return next((peak for name, peak in PEAKS.items() if words.issuperset(name.split())), None)


class Line(NamedTuple):
    """A line of the table; ``passed`` is None for what is measured and not judged."""

    what: str
    measured: str
    beside: str = ""
    passed: bool | None = None


class Part(NamedTuple):
    """A command, and how what it leaves is read.

    Attributes:
        read: its standard output, as far as it came, to lines of the table and to what is sent.
    """

    name: str
    limit_s: float
    command: Sequence[str]
    read: Callable[[str], tuple[list[Line], Any]]


class Ended(NamedTuple):
    """How a command ended; ``code`` is None where its time was up."""

    code: int | None
    seconds: float
    out: str
    log: str


def describe_machine() -> dict[str, Any]:
    """Versions and devices. It starts JAX, so it is called in a process of its own."""
    import jax

    from marft_jax.parallel import processes
    from marft_jax.settings.config import Mesh

    processes.start(Mesh())
    device = jax.devices()[0]
    found = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "devices": len(jax.devices()),
        "device_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        "driver": device.client.platform_version,
        "host": platform.platform(),
        "host_cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "host_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "marft_jax": __version__,
        "packages": {name: found[name] for name in sorted(found) if _PACKAGES.fullmatch(name)},
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("JAX_", "XLA_"))},
    }


def read_machine(out: str) -> tuple[list[Line], Any]:
    """What ``describe_machine`` found."""
    found = json.loads(out)
    versions = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    memory = f"{found['device_bytes'] / 1e9:.0f} GB" if found["device_bytes"] else "memory unknown"
    cores, size = found["host_cores"], found["host_bytes"] / 1e9
    return [
        Line("devices", f"{found['devices']} x {found['device']}", memory),
        Line("host", f"{cores} cores, {size:.0f} GB", f"python {found['python']}"),
        Line("packages", versions),
    ], found


def read_parity(out: str) -> tuple[list[Line], Any]:
    """A line per check of ``check_parity.py``."""
    found = [json.loads(line) for line in out.splitlines()]
    return [
        Line(
            c["check"],
            f"{c['measured']:.1e}" if c["error"] is None else c["error"],
            f"at most {c['bound']:.1e}",
            c["passed"],
        )
        for c in found
    ], found


def read_quickstart(file: Path, steps: int) -> tuple[list[Line], Any]:
    """From the metrics of a run: whether it learned, and how long its steps took."""
    seen = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if not seen:
        return [], seen
    rewards, seconds = ([m[key] for m in seen] for key in ("reward/mean", "time/step_s"))
    last = sum(rewards[-3:]) / len(rewards[-3:])
    middle = sorted(seconds)[len(seconds) // 2]
    gap = max(x for key, x in seen[0].items() if key.endswith("/logprob_gap"))
    return [
        Line(f"reward, first and last of {steps}", f"{rewards[0]:.2f}, {last:.2f}",
             "the last 3 above the first", len(seen) == steps and last > rewards[0]),
        Line("seconds of a step, first and median", f"{seconds[0]:.1f}, {middle:.2f}"),
        Line("logprob_gap of the first step", f"{gap:.1e}"),
    ], seen  # fmt: skip


def read_speed(out: str, on: dict[str, Any]) -> tuple[list[Line], Any]:
    """Throughput from ``benchmark.py --json``, beside the data sheet of the device."""
    found = json.loads(out)
    lines = []
    for name, r in found["results"].items():
        lines.append(Line(name, f"{r['tokens_per_s']:.0f} tokens/s", share(r, on)))
        if r["peer"]:
            times = r["peer"] / r["tokens_per_s"]
            lines.append(Line("", f"{times:.2f} times as long", "as one agent's"))
    peak = found["peak_bytes"] / 1e9
    return [*lines, Line("peak memory", f"{peak:.1f} GB", found["model"])], found


def share(result: dict[str, Any], on: dict[str, Any]) -> str:
    """Fraction of the devices' bandwidth or FLOP/s that the least work amounts to, and the tokens
    per second that would be all of it."""
    peak = peak_of(on["device"])
    if on["platform"] == "cpu":
        return "not an accelerator"
    if peak is None:
        return "no data sheet of this device here"
    if result["bytes_per_s"]:
        reached = result["bytes_per_s"] / on["devices"] / peak.bandwidth
        return f"{reached:.1%} of the bandwidth; bound {result['tokens_per_s'] / reached:.0f}"
    if result["flops_per_s"]:
        reached = result["flops_per_s"] / on["devices"] / peak.flops
        return f"{reached:.1%} of the FLOP/s (MFU); bound {result['tokens_per_s'] / reached:.0f}"
    return ""


def parts(on: dict[str, Any], folder: Path) -> list[Part]:
    """What is run on a machine, and what each part may take."""
    small = on["platform"] == "cpu"
    steps = 8 if small else 50
    one, many = (
        ["--model", "tiny" if small else shape, "--dtype", "float32" if small else "bfloat16"]
        for shape in ("smollm2-135m", "qwen2.5-1.5b")
    )
    rows, more = (["8"], "8 agents") if small else (["8", "64"], "iteration, 8")
    wanted = ["prefill", *(f"decode, {n} rows, 2" for n in rows), "update, 8 rows", more]

    def script(name: str, *arguments: str) -> list[str]:
        return [sys.executable, str(_HERE / name), "--json", *arguments]

    def speed(out: str) -> tuple[list[Line], Any]:
        return read_speed(out, on)

    quickstart = [sys.executable, "-m", "marft_jax.train", "--run.dir", str(folder / "run")]
    quickstart += ["--run.steps", str(steps)]
    metrics = folder / "run" / "metrics.jsonl"
    found = [
        Part("parity", 210, script("check_parity.py"), read_parity),
        Part("quickstart", 120, quickstart, lambda _: read_quickstart(metrics, steps)),
        Part("benchmark", 110, script("benchmark.py", *one, "--rows", *rows, "--only", *wanted),
             speed),
        Part("8 agents, 1 agent", 115, script("benchmark.py", *many, "--only", "8 agents"), speed),
    ]  # fmt: skip
    return found[:3] if small else found  # the last has another model


def run(command: Sequence[str], limit_s: float) -> Ended:
    """Runs a command to its end, or to its limit: then it and all that it started is killed."""
    started, environment = time.perf_counter(), os.environ | {"HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=out, stderr=log, env=environment, start_new_session=True
        )
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
        finally:  # also of what it has left running
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = [(stream.seek(0), stream.read())[1] for stream in (out, log)]
    return Ended(code, time.perf_counter() - started, *texts)


def take(part: Part, patience: float) -> dict[str, Any]:
    """Runs a part and reads what it left; a fault is a line that failed."""
    limit_s = part.limit_s * patience
    ended = run(part.command, limit_s)
    lines, data, fault = list[Line](), None, None
    try:
        lines, data = part.read(ended.out)
    except Exception as error:  # incomplete output
        fault = described(error)
    if ended.code is None:
        fault = f"not done after {limit_s:.0f} s; on a busy machine: --patience {2 * patience:g}"
    elif ended.code and all(line.passed is not False for line in lines):
        last = [text for text in ended.log.splitlines() if text.strip()][-1:]
        fault = f"exit code {ended.code}: {''.join(last)}"
    if fault:
        lines = [*lines, Line("the part itself", fault, "", False)]
    return {
        "part": part.name,
        "seconds": round(ended.seconds, 1),
        "passed": all(line.passed is not False for line in lines),
        "lines": [line._asdict() for line in lines],
        "data": data,
        "command": list(part.command),
        "log": ended.log[-8000:] if fault else "",
    }


def table(results: Sequence[dict[str, Any]], title: str) -> Table:
    """All lines of all parts."""
    made = Table(title=title, title_justify="left")
    for heading in ("part", "what", "measured", "beside it", ""):
        made.add_column(heading, overflow="fold")
    for result in results:
        first = f"{result['part']}, {result['seconds']:.0f} s"
        for line in result["lines"]:
            mark = {True: "passed", False: "[red]FAILED[/red]", None: ""}[line["passed"]]
            made.add_row(first, *(escape(line[x]) for x in ("what", "measured", "beside")), mark)
            first = ""
        made.add_section()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("first_light.json"))
    parser.add_argument("--patience", type=float, default=1, help="multiplies every time limit")
    parser.add_argument("--machine", action="store_true", help="only versions and devices")
    own = parser.parse_args()
    if own.machine:
        return print(json.dumps(describe_machine()))
    started, say = time.perf_counter(), Console(stderr=True, highlight=False).print
    look = [sys.executable, __file__, "--machine"]
    results = [take(Part("machine", 45, look, read_machine), own.patience)]
    on = results[0]["data"] or {"platform": "cpu", "device": "unknown", "devices": 1}
    with tempfile.TemporaryDirectory() as folder:
        for part in parts(on, Path(folder)):
            say(f"{part.name}: at most {part.limit_s * own.patience:.0f} s ...")
            results.append(take(part, own.patience))
    passed = all(result["passed"] for result in results)
    note = "; not an accelerator: sizes are small" if on["platform"] == "cpu" else ""
    took = time.perf_counter() - started
    Console(width=140, highlight=False).print(
        table(results, f"first light on {on['devices']} x {on['device']}, {took:.0f} s{note}")
    )
    sent = {"passed": passed, "seconds": round(took, 1), "parts": results}
    own.out.write_text(json.dumps(sent, indent=1) + "\n")
    late = any("--patience" in line["measured"] for part in results for line in part["lines"])
    why = f" (not in time: on a busy machine start with --patience {2 * own.patience:g})" * late
    say(f"{'passed' if passed else 'FAILED'}{why}; send back {own.out}")
    sys.exit(not passed)


if __name__ == "__main__":
    with cli.boundary():
        main()
