"""Speed of rollout and update, beside what this machine could do at best.

    python scripts/benchmark.py                            # SmolLM2-135M's shape, random weights
    python scripts/benchmark.py --model qwen2.5-1.5b --dtype bfloat16 --rows 64
    python scripts/benchmark.py --model experts --peer hf  # the same work in transformers + peft
    python scripts/benchmark.py --model FOLDER --peer vllm --url http://127.0.0.1:8000
    python scripts/benchmark.py --only "update, 8 rows" --scopes    # where its time goes
    python scripts/benchmark.py --json > results.json

The matmul peak and the memory bandwidth are measured right before each work, and a peer runs in
turn with ours, so that ratios mean something on a noisy machine. ``--model`` takes a shape by name,
or anything ``--model.base`` takes. Every number is the best of ``--repeats`` runs after one that
compiles.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import benchmark_scopes as scopes
import jax
import jax.numpy as jnp
from benchmark_works import (
    NEW,
    PROMPT,
    SCHEMA,
    SHAPES,
    Bench,
    Work,
    decode,
    generate,
    generate_apart,
    iteration,
    lesson,
    open_base,
    prefill,
    update,
)
from rich.console import Console
from rich.table import Table

from marft_jax import cli
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.parallel import processes
from marft_jax.run.metrics import peak_bytes
from marft_jax.settings import config as config_lib


class Limits(NamedTuple):
    """Best of this machine: FLOP/s of a large matmul, bytes/s of a large read."""

    flops: float
    bytes: float


Begin = Callable[[], Work]
"""Sets a work up, when its turn has come."""


class Result(NamedTuple):
    """A line of the table.

    Attributes:
        tokens_per_s: of the work's own unit.
        first_s: seconds of the first run, compilation included.
        bound: tokens/s that the measured peak and bandwidth would allow, one after the other.
        flops_per_s, bytes_per_s: the least that it computes and reads, over its seconds.
        python_ms: of the host between two steps of decoding, while the device waits.
        limits: measured right before.
        peer: the peer's tokens/s, in turn.
        scopes: where the time of a further run went.
    """

    tokens_per_s: float
    first_s: float
    bound: float | None
    flops_per_s: float
    bytes_per_s: float
    python_ms: float | None
    limits: Limits
    peer: float | None
    scopes: scopes.Times | None = None


def timed(runs: Sequence[Callable[[], float | None]], repeats: int) -> list[tuple[float, float]]:
    """(seconds of the first run, of the best of so many later ones) of each, run in turn."""
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(1 + repeats):
        for run, own in zip(runs, seconds, strict=True):
            started = time.perf_counter()
            counted = run()
            own.append(time.perf_counter() - started if counted is None else counted)
    return [(own[0], min(own[1:])) for own in seconds]


def measure(work: Work, limits: Limits, repeats: int) -> Result:
    """Runs it, and its peer if it has one."""
    first, best = zip(*timed([run for run in (work.run, work.peer) if run], repeats), strict=True)
    bound_s = work.flops / limits.flops + work.bytes / limits.bytes
    return Result(
        work.tokens / best[0],
        first[0],
        work.tokens / bound_s if bound_s else None,
        work.flops / best[0],
        work.bytes / best[0],
        1e3 * min(work.python_s) if work.python_s else None,
        limits,
        work.tokens / best[1] if work.peer else None,
    )


def limits(dtype) -> Limits:
    """Measured now: a square matmul, and a sum over more memory than any cache holds."""
    on_cpu = jax.default_backend() == "cpu"
    n, elements = (2048, 2**26) if on_cpu else (8192, 2**30)
    square, flat = jnp.ones((n, n), dtype), jnp.ones((elements,), dtype)
    multiply, add = (
        jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32)),
        jax.jit(lambda x: x.sum(dtype=jnp.float32)),
    )

    def matmul() -> None:
        multiply(square).block_until_ready()

    def read() -> None:
        add(flat).block_until_ready()

    [(_, multiplied), (_, summed)] = timed([matmul, read], 5)
    return Limits(2 * n**3 / multiplied, flat.nbytes / summed)


def works(bench: Bench, rows: Sequence[int], agents: Sequence[int]) -> dict[str, Begin]:
    """All that can be measured, by name."""
    todo: dict[str, Begin] = {f"prefill, 8 rows x {PROMPT} tokens": lambda: prefill(bench, 8)}
    for n in rows:
        todo[f"decode, {n} rows, 2 agents"] = lambda n=n: decode(bench, n, 2)
    for n in agents:
        todo[f"decode, 8 rows, {n} agents; peer: 1 agent"] = lambda n=n: decode(
            bench, 8, n
        )._replace(peer=decode(bench, 8, 1).run)
    todo |= {
        f"generate, 8 rows x {PROMPT} + {NEW} tokens": lambda: generate(bench, 8),
        "generate, 8 rows with a JSON schema; peer: without": lambda: generate(
            bench, 8, form=SCHEMA
        )._replace(peer=generate(bench, 8).run),
        "generate, half of each prompt shared": lambda: generate(bench, 8, PROMPT // 2),
        "update, 8 rows x 320 tokens": lambda: update(bench, 8, 2),
    }
    for what, shared in (("half of each prompt shared", 128), ("all prompts the same", 256)):
        todo[f"update, {what}; peer: each turn apart"] = lambda shared=shared: lesson(
            bench, 8, 2, shared=shared
        )._replace(peer=lesson(bench, 8, 2, shared=shared, share=False).run)
    for n in agents:
        todo[f"update, {n} agents; peer: 1 agent"] = lambda n=n: update(bench, 8, n)._replace(
            peer=lesson(bench, 8, 1).run
        )
    todo |= {
        "generate, 2 bases; peer: 1 base": lambda: generate_apart(bench, 8)._replace(
            peer=generate(bench, 8).run
        ),
        "update, 2 bases; peer: 1 base": lambda: lesson(bench, 8, 2, apart=True)._replace(
            peer=lesson(bench, 8, 2).run
        ),
        "iteration, 2 bases; peer: 1 base": lambda: iteration(bench, apart=True)._replace(
            peer=iteration(bench).run
        ),
    }
    return todo | {
        "update with a critic (appo)": lambda: update(bench, 8, 2, "appo"),
        f"iteration, 8 episodes x 2 agents x {NEW} tokens (appo)": lambda: iteration(bench),
        "iteration, mixed lengths, natural stopping": lambda: iteration(bench, mixed=True),
    }


def machine(mesh) -> dict[str, Any]:
    """Where this was measured."""
    return {
        "device": mesh.devices.flat[0].device_kind,
        "devices": mesh.devices.size,
        "host": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help=f"{', '.join(SHAPES)}, or a model")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--agents", type=int, nargs="+", default=[8])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--microbatch_tokens", type=int, default=1280)
    parser.add_argument("--remat", default="products", choices=["none", "products", "block"])
    parser.add_argument("--layers", default="auto", choices=["auto", "stacked", "unrolled"])
    parser.add_argument("--quantize", default="none", choices=["none", "int8", "int4", "nf4"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="what has such a word in its name"
    )
    parser.add_argument("--peer", choices=["hf", "vllm"], help="also measure the same work there")
    served = "address of vLLM, and names of adapters there; without any, its base is measured"
    parser.add_argument("--url", nargs="+", metavar=("URL", "NAME"), help=served)
    profiled = "also profile a run of each, and say where its time goes"
    parser.add_argument("--scopes", action="store_true", help=profiled)
    parser.add_argument("--json", action="store_true")
    own = parser.parse_args()
    processes.start(config_lib.Mesh())
    mesh = mesh_lib.make_mesh(config_lib.Mesh())
    base = open_base(own.model, own.dtype, mesh, own.remat, own.layers, own.quantize)
    bench = Bench(base, mesh, own.rank, own.repeats, own.microbatch_tokens)
    say = Console(stderr=True, highlight=False).print
    peers = {}
    if own.peer == "vllm":
        import benchmark_vllm  # beside this file

        url, *names = own.url or ["http://127.0.0.1:8000"]
        peers = benchmark_vllm.works(url, names, base.config.vocab_size, PROMPT, NEW)
    elif own.peer:
        import benchmark_hf  # beside this file

        peers = benchmark_hf.works(SHAPES.get(own.model, own.model), own.rank, PROMPT, NEW)
    todo = works(bench, own.rows, own.agents)
    wanted = [name for name in todo if any(word in name for word in own.only)]
    if not importlib.util.find_spec("llguidance"):
        say('left out for lack of llguidance (pip install -e ".[structured]"): a JSON schema')
        wanted = [name for name in wanted if "schema" not in name]
    if not wanted:
        parser.error(f"--only: expected a part of {'; '.join(todo)}, got {' '.join(own.only)}")
    results = {}
    for name in wanted:
        best = limits(jnp.dtype(own.dtype))
        with scopes.known() as names:
            work = todo[name]()
            result = measure(work._replace(peer=peers.get(name, work.peer)), best, own.repeats)
        if own.scopes:
            result = result._replace(scopes=scopes.times(work.run, names))
        results[name] = result
        than = f", peer {result.peer:.0f}" if result.peer else ""
        say(
            f"{name}: {result.tokens_per_s:.0f} tokens/s{than}, at {best.flops / 1e9:.0f} "
            f"GFLOP/s and {best.bytes / 1e9:.1f} GB/s"
        )
    if own.json:
        everything = {
            "machine": machine(mesh),
            "model": own.model,
            "results": {name: _numbers(result) for name, result in results.items()},
            "peak_bytes": peak_bytes(),
            "config": dataclasses.asdict(bench.base.config),
        }
        print(json.dumps(everything, indent=1))
    else:
        Console(width=120).print(_table(own.model, results))
        for name, result in results.items():
            if result.scopes:
                Console(width=120).print(_scopes(name, result.scopes))


def _numbers(result: Result) -> dict[str, Any]:
    return result._asdict() | {"limits": result.limits._asdict()}


def _table(model: str, results: dict[str, Result]) -> Table:
    table = Table(title=f"{model}; peak memory {peak_bytes() / 1e9:.1f} GB")
    headings = "work|tokens/s|of the limit|GFLOP/s, GB/s|Python, ms/step|first run, s|peer|ratio"
    for heading in headings.split("|"):
        table.add_column(heading)
    for name, r in results.items():
        rate = r.tokens_per_s
        table.add_row(
            name,
            f"{rate:.0f}",
            f"{rate / r.bound:.0%}" if r.bound else "-",
            f"{r.limits.flops / 1e9:.0f}, {r.limits.bytes / 1e9:.1f}",
            f"{r.python_ms:.2f}" if r.python_ms is not None else "-",
            f"{r.first_s:.1f}",
            f"{r.peer:.0f}" if r.peer else "-",
            f"{rate / r.peer:.2f}" if r.peer else "-",
        )
    return table


def _scopes(name: str, times: scopes.Times) -> Table:
    """Shares of all that takes a thousandth, the largest first."""
    table = Table("of the time", "scope", *scopes.PASSES, title=name)
    each = {scope: sum(own.values()) for scope, own in times.items()}
    seconds = sum(each.values())
    for scope in sorted(times, key=lambda scope: -each[scope]):
        if each[scope] >= 1e-3 * seconds:
            parts = [times[scope].get(which, 0) / seconds for which in scopes.PASSES]
            table.add_row(f"{each[scope] / seconds:.1%}", scope, *map("{:.1%}".format, parts))
    return table


if __name__ == "__main__":
    with cli.boundary():
        main()
