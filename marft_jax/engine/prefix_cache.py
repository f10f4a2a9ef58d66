"""Tokens of each slot, to find which prefix of a new prompt is in the cache already.

The samples of a group have one prompt, the prompts of an agent begin with its system prompt, and in
a shared conversation the next prompt continues the last. All of it lies in some slot, until another
row overwrites it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LEAST = 64  # shorter prefixes are not worth a program of their own
_SHARE = 4  # nor are those of less than a quarter of the prompt


class Start(NamedTuple):
    """A cached prefix: its slot, and how many tokens long it is; 0 is none."""

    slot: int
    tokens: int


NOWHERE = Start(0, 0)


class Prefixes:
    """Tokens whose keys and values lie in each slot, and the adapter that computed them."""

    def __init__(self, slots: int):
        self._slots: list[tuple[int, np.ndarray] | None] = [None] * slots

    def forget(self) -> None:
        """Drops all: adapters have changed."""
        self._slots = [None] * len(self._slots)

    def put(self, slot: int, owner: int, ids: np.ndarray) -> None:
        """From now on the slot holds these tokens."""
        self._slots[slot] = owner, ids

    def extend(self, slot: int, ids: np.ndarray) -> None:
        """Appends what has been sampled there."""
        if (cached := self._slots[slot]) is not None:
            self._slots[slot] = cached[0], np.concatenate([cached[1], ids])

    def find(self, owner: int, prompt: np.ndarray) -> Start:
        """Longest prefix in a slot, if it is worth copying."""
        best = NOWHERE
        if len(prompt) <= LEAST:  # most prompts of small tasks: nothing to look for
            return best
        for slot, cached in enumerate(self._slots):
            if cached is not None and cached[0] == owner:
                tokens = common(cached[1], prompt)
                best = Start(slot, tokens) if tokens > best.tokens else best
        return best if worthwhile(best.tokens, prompt) else NOWHERE


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix; one token of ``b`` is left, to predict the next."""
    n = min(len(a), len(b) - 1)
    if n < LEAST or not np.array_equal(a[:LEAST], b[:LEAST]):
        return 0
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def worthwhile(tokens: int, prompt: np.ndarray) -> bool:
    """True if a prefix of so many tokens is worth copying."""
    return tokens >= max(LEAST, len(prompt) // _SHARE)
