"""What the engine is asked for, and what it answers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from marft_jax.types import Sampling


class Request(NamedTuple):
    """An action to sample.

    Attributes:
        prompt: ids, at least one.
        owner: the adapter, or -1 for the bare base.
        sampling: how to draw them.
        key: numbers of their random stream, as of ``random_keys.ActionKey``.
        choices: the actions that may be drawn, ids with their end; () for any.
    """

    prompt: np.ndarray
    owner: int
    sampling: Sampling
    key: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...] = ()


class Completion(NamedTuple):
    """Sampled tokens with their behaviour log-probs.

    Attributes:
        finished: the turn was ended, by its end-of-turn token or a stop text.
        kept: the probability that choices, top-k, top-p and min-p left to sample from, mean of its
            tokens.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    finished: bool
    kept: float = 1.0
