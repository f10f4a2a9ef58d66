"""Checks of numbers in files that others made."""

from __future__ import annotations

from typing import Any

from marft_jax.errors import BadInput


def positive(value: Any, name: str, largest: int, source: str) -> int:
    """The value of a size.

    Raises:
        BadInput: it is missing, no positive integer, or above ``largest``.
    """
    if type(value) is int and 0 < value <= largest:
        return value
    got = "nothing" if value is None else f"{value!r:.40}"
    raise BadInput(
        f"{source}: expected a positive integer for {name!r}, at most {largest}, got {got}"
    )
