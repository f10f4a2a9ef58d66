"""A short ladder of sizes, so that programs are compiled for few shapes."""

from __future__ import annotations


def bucket(n: int, least: int = 32) -> int:
    """The smallest rung that holds ``n``: 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, …

    Four rungs per doubling: at most a quarter is padding, and a run sees only a few shapes.
    """
    n = max(n, least)
    step = max(1, 2 ** ((n - 1).bit_length() - 3))
    return -(-n // step) * step
