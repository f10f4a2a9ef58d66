"""Short ladders of sizes, so that programs are compiled for few shapes."""

from __future__ import annotations


def bucket(n: int, least: int = 32, rungs: int = 4) -> int:
    """Returns the smallest rung of a ladder that is at least ``n``.

    With four rungs per doubling: 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, …; at
    most a quarter of a rung is padding.

    Args:
        least: the lowest rung.
        rungs: rungs per doubling, a power of two; fewer rungs mean fewer shapes and more padding.
    """
    n = max(n, least)
    step = max(1, 2 ** (n - 1).bit_length() // 2 // rungs)
    return round_up(n, step)


def round_up(n: int, multiple: int) -> int:
    """Returns the smallest multiple that is at least ``n``.

    >>> round_up(9, 4)
    12
    """
    return -(-n // multiple) * multiple
