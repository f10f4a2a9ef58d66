"""The host's memory: giving back what is no longer used."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import jax


def give_back_freed() -> None:
    """Hands freed memory back to the system, where the C library can (glibc's ``malloc_trim``).

    XLA compiles with millions of small allocations. glibc keeps them when they are freed, between
    others that live on, so that a process would go on holding gigabytes of nothing.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def drop_programs_when_crowded(share: float = 0.5) -> bool:
    """Forgets all compiled programs once they fill this share of the process's memory mappings.

    For a CPU XLA maps each kernel of a program on its own, hundreds to thousands for one, and
    aborts where Linux grants no more (``vm.max_map_count``, 65530 as a rule). A program that is
    wanted again comes from the compilation cache. Elsewhere than on Linux nothing is done.
    """
    try:
        most = int(Path("/proc/sys/vm/max_map_count").read_text())
        mapped = Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return False
    crowded = mapped > share * most
    if crowded:
        jax.clear_caches()
        gc.collect()
    return crowded
