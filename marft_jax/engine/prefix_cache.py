"""Tokens of each slot, to find the prefix of a new prompt that is in the cache already.

The samples of a group have the same prompt, the prompts of an agent begin with its system prompt,
and in a shared conversation the next prompt continues the last. A slot holds such a prefix until
another row overwrites it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from marft_jax.models.ops.state import CHUNK

LEAST = 32  # tokens; the narrowest prefill computes as many anyway
_SHARE = 4  # a prefix shorter than a quarter of the prompt is not worth a program of its own


class Start(NamedTuple):
    """A cached prefix: its slot, and its length in tokens; length 0 is no prefix."""

    slot: int
    tokens: int


NO_PREFIX = Start(0, 0)


class Prefixes:
    """Tokens whose keys and values lie in each slot, and the adapter that computed them.

    Args:
        recurrent: layers have a recurrent state, which belongs to one position. A slot has the
            state at the beginning of its prompt's last chunk, and after the last token.
        slack: layers with a window keep the last positions of a slot alone: a prefix may lack this
            many of them. None: they keep all.
    """

    def __init__(self, slots: int, context: int, recurrent: bool = False, slack: int | None = None):
        self._recurrent, self._slack = recurrent, slack
        self._written_S = np.zeros(slots, np.int64)  # positions
        self._snapshots_S = np.zeros(slots, np.int32)  # positions of the earlier states
        self._ended_S = np.zeros(slots, bool)  # nothing more is sampled into the slot
        self._ids_SC = np.zeros((slots, context), np.int32)
        self._lengths_S = np.zeros(slots, np.int32)  # 0: it holds nothing
        self._owners_S = np.zeros(slots, np.int32)

    def forget(self, owner: int | None = None) -> None:
        """Forgets the slots of an adapter, or all: the adapters have changed."""
        self._lengths_S[... if owner is None else self._owners_S == owner] = 0

    def put(self, slot: int, owner: int, ids: np.ndarray, start: int = 0) -> None:
        """Notes that the slot holds these tokens from now on, the first ``start`` copied."""
        self._snapshots_S[slot] = start + (len(ids) - start - 1) // CHUNK * CHUNK
        self._ended_S[slot], self._written_S[slot] = False, len(ids)
        self._ids_SC[slot, : len(ids)] = ids
        self._lengths_S[slot], self._owners_S[slot] = len(ids), owner

    def grown(self, lengths_S: np.ndarray) -> None:
        """Notes how many positions of each slot have been written."""
        self._written_S[:] = lengths_S

    def extend(self, slot: int, ids: np.ndarray) -> None:
        """Appends sampled tokens to a slot, all that there will be."""
        self._ended_S[slot] = True
        if length := self._lengths_S[slot]:
            self._ids_SC[slot, length : length + len(ids)] = ids
            self._lengths_S[slot] += len(ids)

    def find(self, owner: int, prompt: np.ndarray, among: slice = slice(None)) -> Start:
        """Returns the longest prefix in one of these slots, if it is worth copying."""
        most = len(prompt) - 1  # one token is left, to predict the next
        if most < LEAST:
            return NO_PREFIX
        alike_S = (self._ids_SC[among, :LEAST] == prompt[:LEAST]).all(axis=1)
        alike_S &= (self._lengths_S[among] >= LEAST) & (self._owners_S[among] == owner)
        slots = np.flatnonzero(alike_S) + (among.start or 0)
        if not len(slots):
            return NO_PREFIX
        differ = self._ids_SC[slots, :most] != prompt[:most]
        differ |= np.arange(most) >= self._lengths_S[slots, None]
        tokens = np.where(differ.any(axis=1), differ.argmax(axis=1), most)
        if self._recurrent:
            whole = self._ended_S[slots] & (tokens == self._lengths_S[slots])
            earlier = self._snapshots_S[slots]
            tokens = np.where(whole, tokens, np.where(tokens >= earlier, earlier, 0))
        if self._slack is not None:
            tokens = np.where(tokens >= self._written_S[slots] - self._slack, tokens, 0)
        best = int(tokens.argmax())
        start = Start(int(slots[best]), int(tokens[best]))
        return start if worthwhile(start.tokens, prompt) else NO_PREFIX


def worthwhile(tokens: int, prompt: np.ndarray) -> bool:
    """True if a prefix of this many tokens is worth copying."""
    return tokens >= max(LEAST, len(prompt) // _SHARE)
