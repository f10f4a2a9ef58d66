"""Checks of numbers in files that others made."""

from __future__ import annotations

from collections.abc import Mapping
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


def expert_sizes(
    config: Mapping[str, Any], experts: str, chosen: str, width: str, source: str
) -> dict[str, int]:
    """Sizes of ``ExpertsConfig``, from the settings of these names.

    Raises:
        BadInput: as of ``positive``.
    """
    n_experts = positive(config.get(experts), experts, 1 << 14, source)
    return {
        "n_experts": n_experts,
        "n_chosen": positive(config.get(chosen), chosen, n_experts, source),
        "d_expert": positive(config.get(width), width, 1 << 20, source),
    }


def check_heads(heads: int, kv_heads: int, width: int, source: str) -> None:
    """Raises ``BadInput`` for heads that cannot be grouped, or not be rotated in pairs."""
    if heads % kv_heads or width % 2:
        raise BadInput(
            f"{source}: expected query heads divisible by the key-value heads and an even head "
            f"width, got {heads}, {kv_heads} and {width}"
        )
