"""Compiler options and memory handling of each platform."""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

LINE_SECONDS = 10.0
"""Seconds between two lines about a program that is being compiled."""
_LOGGER = logging.getLogger("marft_jax")


class Watch:
    """Says which program is being compiled, every ten seconds, until it is done.

    The lines go to the run's log and display where these are open, else to stderr.
    """

    def __init__(self) -> None:
        self._ends: dict[int, threading.Event] = {}  # of the compilation in each thread
        self._done = 0
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration_secs: float, fun_name: str = "", **_: Any) -> None:
        thread = threading.get_ident()
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":  # the compiler is next
            self._end(thread)
            end = self._ends[thread] = threading.Event()
            how = fun_name, time.monotonic(), end
            threading.Thread(target=self._tell, args=how, daemon=True).start()
        elif event == "/jax/core/compile/backend_compile_duration":
            self._end(thread)
            self._done += 1

    def _end(self, thread: int) -> None:
        if end := self._ends.pop(thread, None):
            end.set()

    def _tell(self, program: str, start: float, end: threading.Event) -> None:
        while not end.wait(LINE_SECONDS):
            seconds = time.monotonic() - start
            line = f"compiling {program}: {seconds:.0f} s; {self._done} programs are done"
            if _LOGGER.handlers:
                _LOGGER.info("%s", line)
            else:
                print(line, file=sys.stderr, flush=True)


@functools.cache
def watch() -> Watch:
    """Begins to say what is compiled, once in this process."""
    return Watch()


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
