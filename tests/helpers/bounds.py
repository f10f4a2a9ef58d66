"""Bounds on differences that are rounding alone.

Two programs that compute the same numbers in another order (another batch, mesh, CPU or library)
round differently. A bound is a number of roundings (``EPS``) of the size of what is compared:

- A rounding is as often up as down, so n of them, in a sum or one operation after another, are off
  by about √n roundings of the size of the result.
- Of thousands of numbers the worst is off by some four such deviations.
- What is near zero because larger numbers cancel has their rounding: a size is that of the largest
  number of an array, or is given.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import small

from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.models.ops.state import CHUNK

EPS = float(np.finfo(np.float32).eps)
FEW = 16.0
"""Roundings of a formula on few numbers: products, quotients, exponentials."""
BFLOAT16 = 2.0**-7
"""``EPS`` of bfloat16."""
LOGITS = 16.0
"""Size of the small models' logits, and so of their log-probs before these are near zero."""


def sums(*terms: float) -> float:
    """Roundings of sums of so many terms, each over results of the sum before it."""
    return FEW + 4 * sum(terms) ** 0.5


def forward(
    config: DecoderConfig = small.CONFIG, layers: int = 0, tokens: int = small.CONTEXT
) -> float:
    """Roundings of a forward pass: eight sums a layer, over channels or tokens, then the softmax.

    The sums are two norms, the projections in and out of the mixer, its scores and their average,
    and those in and out of the mlp. A recurrent state has one for each token, and solves triangles.
    """
    shapes = [own[0] for matrices in config.adaptable().values() for own in matrices]
    recurrent = CHUNK * tokens * sum(layer.mixer.recurrent for layer in config.layers)
    widest = max(tokens, *shapes)
    return sums(8 * (layers or config.n_layers) * widest, recurrent, config.vocab_size)


def backward(
    config: DecoderConfig = small.CONFIG, layers: int = 0, tokens: int = small.CONTEXT
) -> float:
    """Roundings of a gradient, whose products are three for each of the forward pass, and of its
    sum over tokens."""
    return 3**0.5 * forward(config, layers, tokens) + sums(tokens)


def update(
    config: DecoderConfig = small.CONFIG, layers: int = 0, tokens: int = small.CONTEXT
) -> float:
    """Roundings of a policy's gradient: its factor, e to a difference of log-probs, has those of
    numbers of the size of logits."""
    return backward(config, layers, tokens) + LOGITS * forward(config, layers, tokens)


def of(roundings: float = FEW, size: float = 1.0) -> float:
    """So many roundings of a number of this size."""
    return roundings * EPS * size


def logprobs(
    config: DecoderConfig = small.CONFIG, layers: int = 0, tokens: int = small.CONTEXT
) -> float:
    """Bound on a difference of log-probs, of a small model at a temperature of about 1."""
    return of(forward(config, layers, tokens), LOGITS)


def close(
    got: Any, expected: Any, roundings: float = FEW, size: float = 0.0, eps: float = EPS
) -> None:
    """Compares two trees of arrays, each array by the size of its largest number.

    Args:
        size: of the numbers where that is larger, as of what they are a small difference of.
        eps: of the dtype.
    """
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True
    ):
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        largest = np.abs(y[np.isfinite(y)]).max(initial=size)
        np.testing.assert_allclose(
            x, y, rtol=0, atol=roundings * eps * largest, err_msg=jax.tree_util.keystr(path)
        )


def close_steps(
    got: Any, expected: Any, square: Any, rate: float, roundings: float, steps: int = 1
) -> None:
    """Compares parameters after steps of Adam, by the second moments that these left.

    A step is rate · m / √v. The rounding of a gradient is that of the largest ones, so of a small
    gradient nothing but rounding may be left: the step is then anything from -rate to rate.
    """
    leaves = zip(*map(jax.tree.leaves, (got, expected, square)), strict=True)
    doubts = []
    for x, y, v in (tuple(np.asarray(z, np.float64) for z in own) for own in leaves):
        root = np.sqrt(v)
        doubt = of(roundings, root.max(initial=0)) / np.where(root > 0, root, np.inf)
        bound = of(FEW, np.abs(y).max(initial=0)) + steps * rate * np.minimum(2, steps * doubt)
        np.testing.assert_array_less(np.abs(x - y), bound + 1e-30)
        doubts.append(doubt.ravel())
    assert np.quantile(np.concatenate(doubts), 0.25) < 0.1, "steps are rounding: this shows nothing"


def close_members(got: Any, expected: Any, rate: float, roundings: float, steps: int = 1) -> None:
    """Compares pairs of parameters and their Adam states after so many steps."""
    if not jax.tree.leaves((got, expected)):  # of a part that an algorithm has not
        return
    (params, (_, adam)), (others, (_, other)) = got, expected
    assert np.array_equal(adam.count, other.count)
    close(adam.mu, other.mu, roundings)
    close(adam.nu, other.nu, 2 * roundings)
    close_steps(params, others, other.nu, rate, roundings, steps)
