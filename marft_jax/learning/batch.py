"""Batches: the episodes of a training step as packed rows, with the chain of their decisions.

A turn is prompt ids and action ids with an owner. Turns of one owner whose token sequences are
nested (the later prompt begins with the earlier prompt and action) are one sequence. Sequences are
packed into rows of equal length (``packing.py``, ``rows.py``), rows into microbatches, microbatches
into blocks with about as many decisions of each adapter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from marft_jax import random_keys
from marft_jax.config import Update
from marft_jax.learning.chain import Chain, make_chain
from marft_jax.learning.credit import reward_size
from marft_jax.learning.packing import (
    TokenSequence,
    action_slots,
    balance_blocks,
    layout,
    merge_prefixes,
)
from marft_jax.learning.rows import Level, Rows, empty_rows, fill_row
from marft_jax.parallel.ladder import bucket
from marft_jax.random_keys import Stream
from marft_jax.types import MAIN, Episode


class Prompts(NamedTuple):
    """Rows up to the last prompt token of each sequence: all that the value of an action reads.

    Attributes:
        rows: packed on their own; their microbatches belong to no minibatch.
        flat_UBK: for each turn of the batch's rows, its flat position among the turns of ``rows``.
    """

    rows: Rows[np.ndarray]
    flat_UBK: np.ndarray


class Taught(NamedTuple):
    """The same actions behind the prompts that their teachers read.

    Attributes:
        rows: of each base that teaches.
        chain: the links of the batch's chain, with their places in these rows; those without a
            teacher are padding.
    """

    rows: dict[str, Rows[np.ndarray]]
    chain: Chain


class Batch(NamedTuple):
    """Everything that one training step learns from.

    Attributes:
        rows: packed sequences of each base whose agents acted.
        chain: their decisions in acting order.
        prefix_shared: tokens that sequences share with others of their row.
        blocks: sets of as many consecutive microbatches of each base, with about as many decisions
            of each adapter; a multiple of the minibatches.
        prompts: of each base, for a critic that reads no more than these.
        taught: what teachers read, see ``teaching.py``.
    """

    rows: dict[str, Rows[np.ndarray]]
    chain: Chain
    prefix_shared: int
    blocks: int
    prompts: dict[str, Prompts] | None = None
    taught: Taught | None = None


class PackedTurns(NamedTuple):
    """Turns of episodes in rows; ``rows``, ``prefix_shared``, ``blocks`` and ``prompts`` as of
    ``Batch``.

    Attributes:
        decisions: flat positions of the decisions of each (episode, turn), as of ``Positions``.
        shapes: as of ``Positions``.
    """

    rows: dict[str, Rows[np.ndarray]]
    decisions: dict[tuple[int, int], range]
    shapes: dict[str, tuple[int, ...]]
    prefix_shared: int
    blocks: int
    prompts: dict[str, Prompts] | None


def build(
    episodes: Sequence[Episode],
    rewards: Sequence[np.ndarray],
    owners: Sequence[int],
    config: Update,
    level: Level,
    **how: Any,
) -> Batch:
    """Packs episodes for the learner.

    Args:
        episodes: finished episodes; may be fewer than ``config.episodes``, if some failed.
        rewards: ``float32 [turns]`` for each.
        owners: the adapter of each agent, among those of its base.
        config: the algorithm's settings.
        level: ``action`` or ``token``: what a decision is.
        how: further arguments of ``pack_turns``.
    """
    packed = pack_turns(episodes, owners, config, level, **how)
    sizes = [reward_size(episode, config) for episode in episodes]
    chain = make_chain(episodes, rewards, packed.decisions, packed.shapes, sizes)
    return Batch(packed.rows, chain, packed.prefix_shared, packed.blocks, packed.prompts)


def pack_turns(
    episodes: Sequence[Episode],
    owners: Sequence[int | None],
    config: Update,
    level: Level,
    *,
    shards: int = 1,
    seed: Sequence[int] = (0,),
    share: bool = False,
    recurrent: Container[str] = (),
    bases: Sequence[str] | None = None,
    d_models: Mapping[str, int] | None = None,
    prompts: bool = False,
) -> PackedTurns:
    """Packs the turns of episodes into rows.

    Args:
        owners: the adapter of each agent, among those of its base; None: its turns are left out.
        shards: the rows of a microbatch are a multiple of this.
        seed: decides which episodes are in one minibatch.
        share: sequences of a row share their prefixes.
        recurrent: bases whose sequences share none: their layers keep one state for each sequence.
        bases: the base of each agent; by default all are on ``main``.
        d_models: width of each base, by default 2048; the rows of a narrow base are less wide.
        prompts: packs the prompts on their own too; decisions are actions.
    """
    on = [MAIN] * len(owners) if bases is None else bases
    sequences: dict[str, list[list[TokenSequence]]] = {}  # of each base, in each episode
    for base in dict.fromkeys(on):
        of_agents = zip(on, owners, strict=True)
        own = {i: n for i, (name, n) in enumerate(of_agents) if name == base and n is not None}
        merged = [merge_prefixes(e, episode, own) for e, episode in enumerate(episodes)]
        if any(merged):
            sequences[base] = merged
    run_seed, *draw = seed
    rng = random_keys.generator(run_seed, Stream.ROWS, *draw)
    groups = [episode.group for episode in episodes]
    loads = np.concatenate([_loads(own, level) for own in sequences.values()], axis=1)
    blocks = balance_blocks(loads, groups, _blocks(config, groups), rng)

    def pack(base: str, of_blocks: list[list[TokenSequence]]) -> _Packed:
        return _pack(
            episodes, config, of_blocks, level=level, shards=shards, rng=rng,
            share=share and base not in recurrent, d_model=(d_models or {}).get(base, 2048),
        )  # fmt: skip

    packed = {
        base: pack(base, [[s for e in block for s in own[e]] for block in blocks])
        for base, own in sequences.items()
    }
    shapes = {base: own.rows.decision_mask(level).shape for base, own in packed.items()}
    decisions, first = dict[tuple[int, int], range](), 0
    for base, own in packed.items():
        decisions |= {k: range(first + r.start, first + r.stop) for k, r in own.decisions.items()}
        first += math.prod(shapes[base])
    cut = None
    if prompts:
        cut = {
            base: _prompts(packed[base], pack(base, [[s.prompt() for x in own for s in x]]))
            for base, own in sequences.items()
        }
    shared = sum(own.prefix_shared for own in packed.values())
    rows = {base: own.rows for base, own in packed.items()}
    return PackedTurns(rows, decisions, shapes, shared, len(blocks), cut)


def _prompts(whole: _Packed, cut: _Packed) -> Prompts:
    """Finds the turns of the whole rows among those of rows that end with their prompts."""
    flat_UBK = np.zeros_like(whole.rows.turns.prompt_end_BK)
    for turn, [place] in whole.decisions.items():
        flat_UBK.flat[place] = cut.decisions[turn][0]
    return Prompts(cut.rows, flat_UBK)


def microbatches(rows: Rows[np.ndarray]) -> list[Rows[np.ndarray]]:
    """Splits the rows of a batch along the axis U."""
    count = len(rows.tokens.ids_BT)
    return [jax.tree.map(lambda x, u=u: x[u], rows) for u in range(count)]


def _blocks(config: Update, groups: Sequence[int]) -> int:
    """Number of blocks of a batch: one for each minibatch, or two.

    With two blocks in a minibatch, each epoch can combine others. Groups must not be divided for
    that, and blocks must have about as many episodes.
    """
    n = config.minibatches
    even = len(groups) % (2 * n) == 0 or len(groups) >= 16 * n
    return 2 * n if n > 1 and config.epochs > 1 and len(set(groups)) >= 2 * n and even else n


def _loads(sequences_E: Sequence[Sequence[TokenSequence]], level: Level) -> np.ndarray:
    """Decisions of each adapter, and tokens, of each episode, ``[E, adapters + 1]``.

    Minibatches should have about as many decisions of each adapter, as an optimiser step from a few
    decisions moves an adapter as far as a step from many.
    """
    adapters = 1 + max(s.owner for sequences in sequences_E for s in sequences)
    loads = np.zeros((len(sequences_E), adapters + 1), int)
    for e, sequences in enumerate(sequences_E):
        for s in sequences:
            loads[e, s.owner] += len(s.acted) if level == "action" else sum(s.acted)
            loads[e, -1] += s.read
    return loads


class _Packed(NamedTuple):
    """Rows, the flat positions of the decisions of each (episode, turn), and as of ``Batch``."""

    rows: Rows[np.ndarray]
    decisions: dict[tuple[int, int], range]
    prefix_shared: int


def _pack(
    episodes: Sequence[Episode],
    config: Update,
    blocks: list[list[TokenSequence]],
    *,
    level: Level,
    shards: int,
    rng: np.random.Generator,
    share: bool,
    d_model: int,
) -> _Packed:
    """Packs the sequences of each block; arguments as of ``build``."""
    if share:
        blocks = [sorted(block, key=lambda s: (s.owner, s.sort_key)) for block in blocks]
    packed, width, passes, height = layout(blocks, share, config, shards, d_model)
    acted = [[n for s in row for n in s.acted] for rows in packed for row in rows]
    most_actions, most_turns = max(map(sum, acted)), max(map(len, acted))
    shape = len(blocks) * passes, height
    turns = bucket(most_turns, least=16, rungs=1)
    rows = empty_rows(shape, width, action_slots(most_actions), turns)
    mask_UBX, decisions = rows.decision_mask(level), dict[tuple[int, int], range]()
    for first, of_block in zip(itertools.count(step=passes), packed):
        for i, row in enumerate(rng.permutation(len(of_block))):
            at = first + i % passes, i // passes
            one = jax.tree.map(lambda x, at=at: x[at], rows)
            slots = fill_row(one, of_block[row], episodes, share, config.ratio)
            start = int(np.ravel_multi_index((*at, 0), mask_UBX.shape))
            for turn, (k, actions) in slots.items():
                own = range(k, k + 1) if level == "action" else actions
                decisions[turn] = range(start + own.start, start + own.stop)
    filled = int((rows.tokens.owners_BT >= 0).sum())
    return _Packed(rows, decisions, sum(s.read for block in blocks for s in block) - filled)
