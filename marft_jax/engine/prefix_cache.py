"""Tokens of each slot, to find which prefix of a new prompt is in the cache already.

The samples of a group have one prompt, the prompts of an agent begin with its system prompt, and in
a shared conversation the next prompt continues the last. All of it lies in some slot, until another
row overwrites it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LEAST = 32  # prompts that are no longer are computed in the narrowest prefill anyway
_SHARE = 4  # a prefix of less than a quarter of the prompt is not worth a program of its own


class Start(NamedTuple):
    """A cached prefix: its slot, and how many tokens long it is; 0 is none."""

    slot: int
    tokens: int


NOWHERE = Start(0, 0)


class Prefixes:
    """Tokens whose keys and values lie in each slot, and the adapter that computed them."""

    def __init__(self, slots: int, context: int):
        self._ids_SC = np.zeros((slots, context), np.int32)
        self._lengths_S = np.zeros(slots, np.int32)  # 0: it holds nothing
        self._owners_S = np.zeros(slots, np.int32)

    def forget(self) -> None:
        """Drops all: adapters have changed."""
        self._lengths_S[:] = 0

    def put(self, slot: int, owner: int, ids: np.ndarray) -> None:
        """From now on the slot holds these tokens."""
        self._ids_SC[slot, : len(ids)] = ids
        self._lengths_S[slot], self._owners_S[slot] = len(ids), owner

    def extend(self, slot: int, ids: np.ndarray) -> None:
        """Appends what has been sampled there."""
        if length := self._lengths_S[slot]:
            self._ids_SC[slot, length : length + len(ids)] = ids
            self._lengths_S[slot] += len(ids)

    def find(self, owner: int, prompt: np.ndarray, among: slice = slice(None)) -> Start:
        """Longest prefix in one of these slots, if it is worth copying."""
        most = len(prompt) - 1  # one token is left, to predict the next
        if most < LEAST:
            return NOWHERE
        alike_S = (self._ids_SC[among, :LEAST] == prompt[:LEAST]).all(axis=1)
        alike_S &= (self._lengths_S[among] >= LEAST) & (self._owners_S[among] == owner)
        slots = np.flatnonzero(alike_S) + (among.start or 0)
        if not len(slots):
            return NOWHERE
        differ = self._ids_SC[slots, :most] != prompt[:most]
        differ |= np.arange(most) >= self._lengths_S[slots, None]
        tokens = np.where(differ.any(axis=1), differ.argmax(axis=1), most)
        best = int(tokens.argmax())
        start = Start(int(slots[best]), int(tokens[best]))
        return start if worthwhile(start.tokens, prompt) else NOWHERE


def worthwhile(tokens: int, prompt: np.ndarray) -> bool:
    """True if a prefix of so many tokens is worth copying."""
    return tokens >= max(LEAST, len(prompt) // _SHARE)
