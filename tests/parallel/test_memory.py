"""Memory that is no longer needed goes back to the system."""

from __future__ import annotations

import ctypes
import resource
import subprocess
import sys
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


LARGE = """
import ctypes, resource, threading
from marft_jax.parallel import compilation
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
ctypes.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def use():
    block = libc.malloc(200_000_000)
    ctypes.memset(block, 1, 200_000_000)
    libc.free(block)
compilation.keep_freed()
faults = []
for _ in range(2):
    thread = threading.Thread(target=use)
    thread.start(), thread.join()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
assert faults[1] - faults[0] < 1000, faults
"""


@pytest.mark.skipif(not hasattr(LIBC, "mallopt"), reason="the C library cannot")
def test_memory_that_one_program_freed_serves_the_next_one_on_any_thread():
    subprocess.run([sys.executable, "-c", LARGE], check=True, timeout=60)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="not Linux")
def test_programs_are_dropped_where_their_mappings_become_too_many():
    double = jax.jit(lambda x: 2 * x)
    assert double(1) == 2
    assert not compilation.drop_programs_when_crowded(share=1.0)
    assert double._cache_size() == 1
    assert compilation.drop_programs_when_crowded(share=0.0)
    assert double._cache_size() == 0
    assert double(1) == 2
