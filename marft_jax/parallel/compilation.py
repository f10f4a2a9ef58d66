"""Compilation and memory of programs on each platform."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import jax
from jax.sharding import Mesh


def give_back_freed() -> None:
    """Hands freed memory back to the system, where the C library can (glibc's ``malloc_trim``).

    XLA compiles with millions of small allocations. glibc keeps them when they are freed, between
    others that live on, so that a process would go on holding gigabytes of nothing.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def is_crowded(share: float = 0.5) -> bool:
    """True once compiled programs fill this share of the process's memory mappings.

    For a CPU XLA maps each kernel of a program on its own, hundreds to thousands for one, and
    aborts where Linux grants no more (``vm.max_map_count``, 65530 as a rule).
    """
    try:
        most = int(Path("/proc/sys/vm/max_map_count").read_text())
        mapped = Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return False
    return mapped > share * most


def drop_programs() -> None:
    """Forgets all compiled programs; one that is wanted again comes from the compilation cache.
    No other thread may run one meanwhile."""
    jax.clear_caches()
    gc.collect()


def compiler_options(mesh: Mesh) -> dict[str, str]:
    """Options for compiling programs that differentiate.

    XLA's order of operations on a CPU is made for concurrency: all that is to be computed again in
    the backward pass it computes at once. In the other order the same program takes a fraction of
    the memory, and no longer. Products are YNNPACK's, which has a CPU's instructions for bfloat16;
    its sums are many times slower than XLA's own.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return {}
    return {
        "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
        "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
    }


def decode_options(mesh: Mesh) -> dict[str, str]:
    """Options for compiling steps of decoding.

    XLA would join the products of a GPU that read the same rows: their matrices, side by side, in
    one that is written and read anew in every step.
    """
    gpu = mesh.devices.flat[0].platform == "gpu"
    return {"xla_gpu_dot_merger_threshold_mb": "0"} if gpu else {}


def prefill_tokens(mesh: Mesh) -> int:
    """Most tokens of a prefill: a CPU is hardly faster with more, others while memory lasts."""
    return 512 if mesh.devices.flat[0].platform == "cpu" else 8192
