"""The host's memory: giving back what is no longer used."""

from __future__ import annotations

import ctypes


def give_back_freed() -> None:
    """Hands freed memory back to the system, where the C library can (glibc's ``malloc_trim``).

    XLA compiles with millions of small allocations. glibc keeps them when they are freed, between
    others that live on, so that a process would go on holding gigabytes of nothing.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
