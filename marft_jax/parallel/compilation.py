"""Compiler options and memory handling of each platform."""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
from jax.sharding import Mesh

LINE_SECONDS = 10.0
"""Seconds between two lines about a program that is being compiled."""
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_LOGGER = logging.getLogger("marft_jax")


@functools.cache
def watch() -> Callable[..., None]:
    """Begins to say which program is being compiled, every ten seconds until it is done.

    The lines go to the run's log and display where these are open, else to stderr.

    Returns:
        The listener of JAX's events: the same in one process.
    """
    ends: dict[int, threading.Event] = {}  # of the compilation in each thread

    def note(event: str, duration_secs: float, **about: str | int) -> None:
        if event not in (_LOWERED, _COMPILED):
            return
        ends.pop(threading.get_ident(), threading.Event()).set()
        if event == _LOWERED:  # the compiler is next
            end = ends[threading.get_ident()] = threading.Event()
            threading.Thread(
                target=_tell, args=(about.get("fun_name", ""), end), daemon=True
            ).start()

    jax.monitoring.register_event_duration_secs_listener(note)
    return note


def _tell(program: str, end: threading.Event) -> None:
    start = time.monotonic()
    while not end.wait(LINE_SECONDS):
        line = f"compiling {program}: {time.monotonic() - start:.0f} s"
        if _LOGGER.isEnabledFor(logging.INFO):  # a run is open
            _LOGGER.info("%s", line)
        else:
            print(line, file=sys.stderr, flush=True)


def give_back_freed() -> None:
    """Returns freed memory to the system, if the C library can (glibc's ``malloc_trim``).

    XLA makes millions of small allocations to compile. After they are freed glibc keeps them, as
    others between them are in use, so the process would hold gigabytes of unused memory.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def is_crowded(share: float = 0.5) -> bool:
    """True if this process uses this share of the memory mappings that Linux allows.

    On a CPU XLA maps each kernel of a program by itself, hundreds to thousands per program, and
    aborts when Linux allows no more mappings (``vm.max_map_count``, usually 65530).
    """
    try:
        most = int(Path("/proc/sys/vm/max_map_count").read_text())
        mapped = Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return False
    return mapped > share * most


def drop_programs() -> None:
    """Drops all compiled programs; a later call loads them from the compilation cache. No other
    thread may run a program meanwhile."""
    jax.clear_caches()
    gc.collect()


def compiler_options(mesh: Mesh) -> dict[str, str]:
    """Returns compiler options for programs that differentiate.

    On a CPU, XLA's default order of operations is made for concurrency: it recomputes everything
    that the backward pass needs at once. The memory-optimised order takes a fraction of the memory
    and the same time. Matrix products use YNNPACK, which has bfloat16 instructions of CPUs; its
    sums are many times slower than those of XLA, so only products use it.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return {}
    return {
        "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
        "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
    }


def decode_options(mesh: Mesh) -> dict[str, str]:
    """Returns compiler options for decode steps.

    On a GPU, XLA would join products that read the same rows: it would copy their matrices side by
    side into a new matrix in every step.
    """
    gpu = mesh.devices.flat[0].platform == "gpu"
    return {"xla_gpu_dot_merger_threshold_mb": "0"} if gpu else {}


def prefill_tokens(mesh: Mesh) -> int:
    """Returns the most tokens of a prefill: a CPU is hardly faster with more tokens."""
    return 512 if mesh.devices.flat[0].platform == "cpu" else 8192
