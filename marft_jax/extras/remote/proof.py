"""Which adapters sampled: log-probs of a server, compared with those of several versions.

What was sampled tells who sampled it. A server's logits differ from ours by rounding, δ. To first
order the log-prob of a token of probability p then differs by (1 − p) (δ of the token − mean δ of
the others), and by the rounding of the log-prob itself. So the noise of a token is

    √( (σ (1 − p))² + ρ² ),   ρ = 1e-5,

with the server's precision σ, which is measured when a run begins. Differences are counted in this
noise. Two things must hold of what an agent sampled:

- no other version is nearer than the claimed one, where the two can be told apart: where
  Σ (claimed − other)² ≥ 12², so that noise hardly ever makes the other one the nearer;
- the root mean square difference to the claimed version is at most 4 (1 + 4 / √tokens) in all
  actions together, and 10 (1 + 4 / √tokens) in each of them. Behind a stale cache what is sampled
  is a mixture, which can be nearest to the claimed version and is far from all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

_APART = 12.0  # distance of two versions from which they can be told apart
_WITHIN, _OF_ACTION = 4.0, 10.0  # root mean square distance to the claimed version, at most
_SAME = 1e-6  # versions with smaller differences are one function: adapters that change nothing
_ROUNDING = 1e-5  # ρ

LEAST_PRECISION = 1e-4  # of float32, where one text has ten times the rounding of another

Logprobs = Sequence[np.ndarray]
"""Of each action, ``[tokens]``."""


class Verdict(NamedTuple):
    """What log-probs say of the version that sampled them.

    Attributes:
        gap: root mean square difference to the claimed version.
        nearer: the other version that is the nearest; "" where the claimed one is.
        misfit: of an action, or of all, the largest distance to the claimed version over the
            largest that noise explains; at most 1 where noise explains all.
        unproven: number of other versions that are too close to tell apart.
    """

    gap: float
    nearer: str
    misfit: float
    unproven: int


def rms(x: np.ndarray) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def gap(sampled: Logprobs, scored: Logprobs) -> float:
    """Root mean square difference of log-probs, over all tokens."""
    return rms(np.concatenate([*sampled]) - np.concatenate([*scored]))


def precision(sampled: Logprobs, scored: Logprobs) -> float:
    """σ of a server whose log-probs are of the version that scored."""
    spread = rms(np.expm1(np.concatenate([*scored])))
    return max(gap(sampled, scored) / max(spread, 1e-3), LEAST_PRECISION)


def misfit(sampled: Logprobs, scored: Logprobs, precision: float, within: float = _WITHIN) -> float:
    """Distance of log-probs over the largest that noise explains."""
    sent, ours = (np.concatenate([*x]) for x in (sampled, scored))
    return rms((sent - ours) / _noise(ours, precision)) / (within * (1 + 4 / len(ours) ** 0.5))


def _noise(scored: np.ndarray, precision: float) -> np.ndarray:
    return np.hypot(precision * np.expm1(scored), _ROUNDING)


def judge(
    sampled: Logprobs, claimed: Logprobs, others: Mapping[str, Logprobs], precision: float
) -> Verdict:
    """Judges what a server sampled for an agent.

    Args:
        sampled: log-probs that the server sent.
        claimed: those of the version that it names.
        others: those of other versions, of the first actions; the names are for messages.
        precision: σ of the server, over the temperature.
    """
    parts = zip(sampled, claimed, strict=True)
    worst = max(misfit([x], [y], precision, _OF_ACTION) for x, y in parts)
    worst = max(misfit(sampled, claimed, precision), worst)
    nearest, unproven, nearer = np.inf, 0, ""
    for name, scored in others.items():
        sent, ours = (np.concatenate(x[: len(scored)]) for x in (sampled, claimed))
        other, noise = np.concatenate([*scored]), _noise(ours, precision)
        if np.abs(ours - other).max() < _SAME:
            continue
        if np.square((ours - other) / noise).sum() < _APART**2:
            unproven += 1
        elif (distance := rms((sent - other) / noise)) < min(nearest, rms((sent - ours) / noise)):
            nearest, nearer = distance, name
    return Verdict(gap(sampled, claimed), nearer, worst, unproven)
