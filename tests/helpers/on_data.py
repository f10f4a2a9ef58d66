"""Passes over data that are packed for one pass alone."""

from __future__ import annotations

from typing import Any

from marft_jax import policy as verbs


def forward(policy: Any, data: Any) -> list[Any]:
    return verbs.forward(policy, verbs.pack(policy, data))


def top(policy: Any, data: Any, k: int) -> list[Any]:
    return verbs.top(policy, verbs.pack(policy, data), k)


def forward_backward(policy: Any, data: Any, loss: Any, sums: Any = None) -> tuple[Any, list[Any]]:
    """``loss``: one, or a list with one for each datum."""
    each, found = loss if isinstance(loss, list) else [loss] * len(data), {}
    for one in dict.fromkeys(each):
        numbers = [i for i, x in enumerate(each) if x == one]
        packed = verbs.pack(policy, [data[i] for i in numbers])
        sums, results = verbs.forward_backward(policy, packed, one, sums)
        found |= dict(zip(numbers, results.by_datum(), strict=True))
    return sums, [found[i] for i in range(len(data))]
