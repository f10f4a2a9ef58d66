"""Memory that is no longer needed goes back to the system."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import pytest

from marft_jax.parallel import compilation

LIBC = ctypes.CDLL(None)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not hasattr(LIBC, "malloc_trim"), reason="the C library cannot")
def test_what_was_freed_between_what_lives_on_goes_back():
    LIBC.malloc.restype = ctypes.c_void_p
    LIBC.free.argtypes = [ctypes.c_void_p]
    blocks = [LIBC.malloc(20_000) for _ in range(10_000)]
    for block in blocks:
        ctypes.memset(block, 1, 20_000)
    for block in blocks[:-1]:  # the last lies above the others
        LIBC.free(block)
    before = resident_bytes()
    compilation.give_back_freed()
    given_back = before - resident_bytes()
    LIBC.free(blocks[-1])
    assert given_back > 100e6
