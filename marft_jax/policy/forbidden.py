"""Masks of a policy: the tokens that choices or a form forbid where a learned token stands.

A token that was drawn among some tokens has its log-prob among these: log p(token) − log P(them).
With the log-prob of the whole vocabulary an update would also move P(them), which no sample chose.
Few sets of tokens differ, so each is kept once, as bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Array = TypeVar("Array", bound=np.ndarray | jax.Array)


class Forbidden(NamedTuple, Generic[Array]):
    """Tokens that could not be drawn, of A learned tokens. The arrays of rows begin with an axis B.

    Attributes:
        set_A: number of the set of each learned token; set 0 is empty.
        bits_QW: the Q sets, as ``uint32``: bit i of word w is token 32 w + i.
    """

    set_A: Array
    bits_QW: Array

    def at(self, set_BC: jax.Array, vocabulary: int) -> jax.Array:
        """The sets of these numbers in rows, ``bool [B, C, V]``."""
        words_BCW = jnp.take_along_axis(jnp.asarray(self.bits_QW), set_BC[..., None], axis=1)
        shifts = jnp.arange(32, dtype=jnp.uint32).reshape(1, 1, 1, 32)
        bits = words_BCW[..., None] >> shifts & 1
        bits_BCV = bits.reshape(*set_BC.shape, -1)[..., :vocabulary].astype(bool)
        rest = vocabulary - bits_BCV.shape[-1]  # of a teacher with more ids, which are no tokens
        return jnp.pad(bits_BCV, ((0, 0), (0, 0), (0, rest)))


def forbidden_by(allowed: Iterable[np.ndarray | None]) -> Forbidden[np.ndarray] | None:
    """The complement of what was allowed at each learned token, ``bool [V]``, or None for any
    token; None where nothing is forbidden."""
    forbidden = _numbered(b"" if mask is None or mask.all() else _words(~mask) for mask in allowed)
    return forbidden if len(forbidden.bits_QW) > 1 else None


def joined(parts: Iterable[tuple[Forbidden[np.ndarray] | None, int]]) -> Forbidden[np.ndarray]:
    """Of parts that follow one another, each with its number of learned tokens."""

    def words() -> Iterable[bytes]:
        for part, count in parts:
            if part is None:
                yield from [b""] * count
            else:
                sets = [b"", *(x.tobytes() for x in part.bits_QW[1:])]
                yield from (sets[n] for n in part.set_A)

    return _numbered(words())


def _words(mask: np.ndarray) -> bytes:
    return np.packbits(np.pad(mask, (0, -len(mask) % 32)), bitorder="little").tobytes()


def _numbered(sets: Iterable[bytes]) -> Forbidden[np.ndarray]:
    known = {b"": 0}
    set_A = np.array([known.setdefault(words, len(known)) for words in sets], np.int32)
    bits_QW = np.zeros((len(known), max(map(len, known)) // 4), np.uint32)
    for n, words in enumerate(known):
        bits_QW[n, : len(words) // 4] = np.frombuffer(words, np.uint32)
    return Forbidden(set_A, bits_QW)
