"""Memory that is no longer needed goes back to the system."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import jax
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


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="not Linux")
def test_programs_are_dropped_where_their_mappings_become_too_many():
    double = jax.jit(lambda x: 2 * x)
    assert double(1) == 2
    assert not compilation.drop_programs_when_crowded(share=1.0)
    assert double._cache_size() == 1
    assert compilation.drop_programs_when_crowded(share=0.0)
    assert double._cache_size() == 0
    assert double(1) == 2
