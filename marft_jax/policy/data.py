"""Data: one token sequence of one adapter each, with what a loss reads at each learned position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from marft_jax.policy.forbidden import Forbidden, forbidden_by


class Datum(NamedTuple):
    """One token sequence of one adapter, and for each of A learned tokens what a loss reads.

    Attributes:
        owner: number of the adapter, on the base of the policy that reads the datum.
        ids: the tokens that are read, ``[T]``.
        positions: where in ``ids`` the token stands that predicts each learned token, ``[A]``.
        targets: ids of the learned tokens; they need not be the next ones in ``ids``.
        logprobs: log-probs of the learned tokens under the policy that sampled them; 0 if none did.
        temperature: that these log-probs and those of the update are at.
        units: number of the unit that each learned token belongs to, from 0 and not falling. A unit
            has one ratio and one loss: a turn, or a token.
        divisors: what the log-prob of each unit is divided by, ``[units]``: 1 or its tokens, say.
        labels: of each token read, ``[T]``, such as the agent that it leads to or belongs to. Means
            are taken for each label, and only tokens of one label share a prefix.
        inputs: numbers by name that the loss reads, for each unit.
        forbidden: tokens that could not be drawn where learned tokens were; log-probs, entropy and
            gradients are among the others. None: all could.
    """

    owner: int
    ids: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    logprobs: np.ndarray
    temperature: np.ndarray
    units: np.ndarray
    divisors: np.ndarray
    labels: np.ndarray
    inputs: Mapping[str, np.ndarray] = MappingProxyType({})
    forbidden: Forbidden[np.ndarray] | None = None

    @classmethod
    def of(
        cls,
        owner: int,
        ids: Sequence[int] | np.ndarray,
        positions: Sequence[int] | np.ndarray,
        targets: Sequence[int] | np.ndarray,
        *,
        logprobs: Sequence[float] | np.ndarray | None = None,
        temperature: float = 1.0,
        units: Sequence[int] | np.ndarray | None = None,
        allowed: Sequence[np.ndarray | None] = (),
        **inputs: Sequence[float] | np.ndarray,
    ) -> Datum:
        """Makes a datum of anything like arrays; see ``Datum``.

        Args:
            units: by default each learned token is one.
            allowed: what each learned token was drawn among, ``bool [V]``, None for any token;
                by default none was drawn under a mask.
            inputs: numbers for each unit.

        Raises:
            ValueError: lengths do not fit, or a position or a unit is out of range.
        """
        at, count = np.asarray(positions, int), len(targets)
        numbers = np.arange(count) if units is None else np.asarray(units, int)
        sampled = np.zeros(count) if logprobs is None else np.asarray(logprobs)
        if not count or {*map(len, (at, numbers, sampled, allowed or at))} != {count}:
            raise ValueError("a datum: expected as many positions, targets, log-probs and units")
        if not all(mask is None or mask[i] for mask, i in zip(allowed, targets, strict=False)):
            raise ValueError("allowed: expected each learned token among those that it allows")
        if at.min() < 0 or at.max() >= len(ids):
            raise ValueError(f"positions: expected 0 to {len(ids) - 1}, got {at.min()}, {at.max()}")
        if numbers[0] or not np.isin(np.diff(numbers), (0, 1)).all():
            raise ValueError("units: expected numbers from 0 that rise by 1 or stay")
        made = {name: np.asarray(x, np.float32) for name, x in inputs.items()}
        if wrong := [name for name, x in made.items() if x.shape != (numbers[-1] + 1,)]:
            raise ValueError(f"{wrong[0]}: expected one number for each of {numbers[-1] + 1} units")
        return cls(
            owner,
            np.asarray(ids, np.int32),
            at,
            np.asarray(targets, np.int32),
            sampled,
            np.full(count, temperature),
            numbers,
            divisors=np.ones(numbers[-1] + 1),
            labels=np.full(len(ids), owner),
            inputs=made,
            forbidden=forbidden_by(allowed),
        )

    @property
    def sort_key(self) -> bytes:
        """Sort key that puts data which share a prefix side by side."""
        ids, labels = np.append(self.ids, self.targets[-1]), np.append(self.labels, self.labels[-1])
        return np.stack([ids, labels], axis=1).astype(">u4").tobytes()

    def prompt(self) -> Datum:
        """Cuts the datum behind the first token of its last unit."""
        n = int(np.searchsorted(self.units, self.units[-1])) + 1
        end = self.positions[n - 1] + 1
        learned = (x[:n] for x in self[2:7])
        return Datum(
            self.owner, self.ids[:end], *learned, divisors=self.divisors, labels=self.labels[:end]
        )

    def shared_with(self, other: Datum, branches: int = 1) -> int:
        """Tokens of the longest prefix that both have, of a multiple of ``branches``; 0: none."""
        n = min(len(self.ids), len(other.ids)) if branches and self.owner == other.owner else 0
        same = (self.ids[:n] == other.ids[:n]) & (self.labels[:n] == other.labels[:n])
        return (n if same.all() else int(same.argmin())) // max(1, branches) * branches
