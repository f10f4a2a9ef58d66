"""Minibatches: which episodes are in one, and in which order an update takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from marft_jax import random_keys
from marft_jax.random_keys import Stream
from marft_jax.settings.config import Update


def blocks_of(config: Update, groups: Sequence[int]) -> int:
    """Number of blocks of a batch: one for each minibatch, or two.

    With two blocks in a minibatch, each epoch can combine others. Groups must not be divided for
    that, and blocks must have about as many episodes.
    """
    n = config.minibatches
    even = len(groups) % (2 * n) == 0 or len(groups) >= 16 * n
    return 2 * n if n > 1 and config.epochs > 1 and len(set(groups)) >= 2 * n and even else n


def order(config: Update, seed: int, step: int, blocks: int) -> list[np.ndarray]:
    """Deals blocks out to the minibatches of each epoch: the blocks of each."""
    rng = random_keys.generator(seed, Stream.MINIBATCHES, step)
    epochs = [rng.permutation(blocks) for _ in range(config.epochs)]
    return [part for epoch in epochs for part in np.split(epoch, config.minibatches)]


def balance_blocks(
    loads: np.ndarray, groups: Sequence[int], blocks: int, rng: np.random.Generator
) -> list[list[int]]:
    """Distributes episodes over blocks, so that each block has about as much of every load.

    Episodes with the largest shares of any load come first, each into the block that has least of
    the same load. A group stays whole, because its samples share prefixes, unless its block would
    have one group more than others.

    Args:
        loads: of each episode and kind, ``[E, kinds]``.
        groups: of each episode.

    Returns:
        The episodes of each block.
    """
    members: dict[int, list[int]] = {}
    for e, group in enumerate(groups):
        members.setdefault(group, []).append(e)
    whole = list(members.values())
    shuffled = [whole[i] for i in rng.permutation(len(whole))]
    left = len(whole) % blocks
    units = shuffled[left:] + [[e] for group in shuffled[:left] for e in group]
    shares = np.stack([loads[unit].sum(0) for unit in units]) / np.maximum(loads.sum(0), 1)
    held, dealt = np.zeros((blocks, shares.shape[1])), [list[int]() for _ in range(blocks)]
    for i in np.argsort(-shares.sum(1), kind="stable"):
        block = int((held @ shares[i]).argmin())
        held[block] += shares[i]
        dealt[block] += units[i]
    return [sorted(block) for block in dealt]
