"""Programs for an engine without a model: they write down actions that are given.

With them a rollout goes the way that it would go, from request to request, on the host alone and in
no time: which groups are prefilled, how far the cache is read, when a slot is free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from marft_jax.engine.kv_cache import Settings


class Slots(NamedTuple):
    """Those fields of ``cache.Slots`` that the host reads, and how long each action will be."""

    length_S: np.ndarray
    count_S: np.ndarray
    active_S: np.ndarray
    ids_SA: np.ndarray
    logprobs_SA: np.ndarray
    total_S: np.ndarray


def empty(slots: int, longest: int) -> Slots:
    """Idle ones, for actions of up to ``longest`` tokens."""
    zeros_S = np.zeros(slots, np.int32)
    ids_SA = np.zeros((slots, longest), np.int32)
    return Slots(zeros_S, zeros_S, zeros_S.astype(bool), ids_SA, ids_SA.astype(np.float32), zeros_S)


def prefill(
    action: Callable[[int, int], np.ndarray],
    *,
    slots: Slots,
    lengths_B,
    folds_B3,
    settings: Settings,
    slots_B,
    **_: Any,
) -> Slots:
    """Fills slots with ``action`` of (episode, turn) and shows the first token of it.

    Further arguments are those of ``programs.prefill``, which a model would need.
    """
    slots = Slots(*map(np.copy, slots))
    columns = (np.asarray(x) for x in (slots_B, lengths_B, folds_B3, settings.limit))
    for slot, length, (_step, episode, turn), limit in zip(*columns, strict=True):
        if slot >= len(slots.total_S):
            continue  # padding
        ids = action(int(episode), int(turn))[:limit]
        slots.ids_SA[slot, : len(ids)] = ids
        slots.length_S[slot], slots.total_S[slot] = length, len(ids)
        slots.count_S[slot], slots.active_S[slot] = 1, len(ids) > 1
    return slots


def decode(*, slots: Slots, leave_at, chunk: int, **_: Any) -> Slots:
    """Shows as many more tokens of each action as ``programs.decode`` would sample."""
    left_S = np.where(slots.active_S, slots.total_S - slots.count_S, 0)
    steps = min(chunk, *np.sort(left_S)[::-1][int(leave_at) :][:1])
    moved_S = np.minimum(left_S, steps)
    return slots._replace(
        length_S=slots.length_S + moved_S,
        count_S=slots.count_S + moved_S,
        active_S=left_S > steps,
    )
