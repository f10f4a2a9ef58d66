"""Whose keys and values a new prompt can take over: what the slots hold, token by token.

The samples of a group have one prompt, the prompts of an agent begin with its system prompt, and in
a shared conversation the next prompt continues what was said. All of it lies in some slot already,
until another row overwrites it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LEAST = 64  # shorter beginnings are not worth a program of their own
_SHARE = 4  # nor are those of less than a quarter of the prompt


class Start(NamedTuple):
    """Where a prompt's beginning lies: its slot, and how many tokens long it is; 0 is nowhere."""

    slot: int
    tokens: int


NOWHERE = Start(0, 0)


class Prefixes:
    """The tokens whose keys and values lie in each slot, and the adapter they passed through."""

    def __init__(self, slots: int):
        self._held: list[tuple[int, np.ndarray] | None] = [None] * slots

    def forget(self) -> None:
        """Other adapters: nothing that is held counts any more."""
        self._held = [None] * len(self._held)

    def put(self, slot: int, owner: int, ids: np.ndarray) -> None:
        """From now on the slot holds these tokens."""
        self._held[slot] = owner, ids

    def extend(self, slot: int, ids: np.ndarray) -> None:
        """What has been sampled there, and is held too."""
        held = self._held[slot]
        if held is not None:
            self._held[slot] = held[0], np.concatenate([held[1], ids])

    def find(self, owner: int, prompt: np.ndarray) -> Start:
        """The longest beginning that a slot holds, if it is worth taking over."""
        best = NOWHERE
        for slot, held in enumerate(self._held):
            if held is not None and held[0] == owner:
                tokens = common(held[1], prompt)
                best = Start(slot, tokens) if tokens > best.tokens else best
        return best if worthwhile(best.tokens, prompt) else NOWHERE


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens both begin with; one of ``b`` is left, to predict what follows."""
    n = min(len(a), len(b) - 1)
    if n < LEAST or not np.array_equal(a[:LEAST], b[:LEAST]):
        return 0
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def worthwhile(tokens: int, prompt: np.ndarray) -> bool:
    """Whether so many tokens are worth taking over."""
    return tokens >= max(LEAST, len(prompt) // _SHARE)
