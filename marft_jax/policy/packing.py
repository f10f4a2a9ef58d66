"""Packing: which data stand in one row, where they may share a prefix, and which in one block."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, pairwise
from typing import Any, NamedTuple

import jax
import numpy as np

from marft_jax.parallel.ladder import bucket, round_up
from marft_jax.policy.data import Datum
from marft_jax.policy.forbidden import Forbidden, joined
from marft_jax.policy.rows import Rows, empty_rows, fill_row
from marft_jax.types import Level

# Width of a row, as a multiple of the model's width, at which attention costs as much as all other
# products: 2.3 on a CPU; 4, because wide rows have less padding.
_ATTENTION_DOUBLES = 4
# Wider rows are taken if they cost less than this part of the narrowest rows.
_WORTH_IT = 0.95
# Width up to which a row may be four times as wide as its longest sequence; beyond, attention needs
# memory, and a row may be twice as wide.
_SHORT = 2048


class PackedRows(NamedTuple):
    """Data in rows, on the host.

    Attributes:
        rows: arrays ``[U, B, ...]`` of U microbatches.
        blocks: sets of as many consecutive microbatches.
        units: flat position of each unit of the data, in their order, among those of ``rows``.
        tokens: that of each learned token.
        counts: (units, learned tokens) of each datum.
        read: tokens in the rows, without padding.
        prefix_shared: tokens that data share with others of their row.
    """

    rows: Rows[np.ndarray]
    blocks: int
    units: np.ndarray
    tokens: np.ndarray
    counts: np.ndarray
    read: int
    prefix_shared: int

    def by_datum(self, x: np.ndarray, level: Level) -> list[np.ndarray]:
        """Numbers of the units (``action``) or learned tokens (``token``) of each datum.

        Args:
            x: where these stand in rows, ``[U, B, K or A, ...]``.
        """
        places = self.units if level == "action" else self.tokens
        in_order = x.reshape(-1, *x.shape[3:])[places]
        return np.split(in_order, np.cumsum(self.counts[:, int(level == "token")])[:-1])

    def in_rows(self, of_data: Sequence[np.ndarray], level: Level) -> np.ndarray:
        """Numbers of each datum where they stand in rows, ``float32 [U, B, K or A]``; 0 for
        padding."""
        in_rows = np.zeros_like(self.rows.decision_mask(level))
        in_rows.flat[self.units if level == "action" else self.tokens] = np.concatenate(of_data)
        return in_rows


def pack_rows(
    data: Sequence[Datum],
    blocks: Sequence[Sequence[int]],
    microbatch_tokens: int,
    *,
    shards: int,
    rng: np.random.Generator,
    branches: int,
    d_model: int,
) -> PackedRows:
    """Packs data into rows.

    Args:
        blocks: numbers of the data of each set of as many microbatches.
        microbatch_tokens: most tokens of one, unless a datum is longer.
        shards: the rows of a microbatch are a multiple of this.
        rng: decides which microbatch of a block a row is in.
        branches: data of a row share prefixes of a multiple of so many tokens; 0: none. Where it is
            not 1 every datum begins at such a multiple, and none shares where that costs more.
        d_model: width of the base; the rows of a narrow base are less wide.
    """
    sizes = microbatch_tokens, shards, d_model
    if branches:
        blocks = [
            sorted(block, key=lambda i: (data[i].owner, data[i].sort_key)) for block in blocks
        ]
    chosen = layout(data, blocks, branches, *sizes)
    if branches > 1:
        apart = layout(data, blocks, 0, *sizes)
        if apart.cost(d_model) <= chosen.cost(d_model):
            chosen, branches = apart, 0
    packed, width, passes, height = chosen
    counts = np.array([(datum.units[-1] + 1, len(datum.targets)) for datum in data])
    units, actions = np.max([counts[row].sum(0) for block in packed for row in block], 0).tolist()
    tokens, turns = action_slots(actions), bucket(units, least=16, rungs=1)
    sets = [
        [joined((data[n].forbidden, len(data[n].targets)) for n in row) for row in of_block]
        for of_block in packed
    ]
    rows = empty_rows((len(blocks) * passes, height), width, tokens, turns, _room(sets))
    flat = np.zeros(counts.sum(0)[0], int), np.zeros(counts.sum(0)[1], int)
    ends, sizes = np.cumsum(counts, axis=0), (turns, tokens)
    for begin, of_block in zip(count(step=passes), packed):
        for i, row in enumerate(rng.permutation(len(of_block))):
            at, numbers = (begin + i % passes, i // passes), of_block[row]
            views = jax.tree.map(lambda x, at=at: x[at], rows)
            fill_row(views, [data[n] for n in numbers], branches, sets[begin // passes][row])
            for kind, places in enumerate(flat):
                spans = zip((ends - counts)[numbers, kind], ends[numbers, kind], strict=True)
                filled = np.concatenate([np.arange(*span) for span in spans])
                places[filled] = (at[0] * height + at[1]) * sizes[kind] + np.arange(len(filled))
    read = int((rows.tokens.owners_BT >= 0).sum())
    shared = sum(len(datum.ids) for datum in data) - read
    return PackedRows(rows, len(blocks), *flat, counts, read, shared)


def _room(sets: Sequence[Sequence[Forbidden[np.ndarray]]]) -> tuple[int, int] | None:
    """Sets of forbidden tokens that each row has room for, and their words; None without any."""
    most, words = np.max([row.bits_QW.shape for of_block in sets for row in of_block], axis=0)
    return (bucket(int(most), least=4, rungs=1), int(words)) if words else None


def known_before(sequences: Sequence[tuple[Any, np.ndarray]]) -> np.ndarray:
    """Counts the first tokens of each (owner, ids) that are known from the others.

    These are the tokens that it shares with the one before it, when all are sorted.
    """
    keys = [(owner, ids.astype(">u4").tobytes()) for owner, ids in sequences]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    known = np.zeros(len(keys), int)
    for i, j in pairwise(order):
        if keys[i][0] == keys[j][0]:
            n = min(len(sequences[i][1]), len(sequences[j][1]))
            same = sequences[i][1][:n] == sequences[j][1][:n]
            known[j] = n if same.all() else same.argmin()
    return known


class Layout(NamedTuple):
    """Rows of one width; ``passes`` microbatches of ``height`` rows hold a block."""

    packed: list[list[list[int]]]  # numbers of the data in each row of each block
    width: int
    passes: int
    height: int

    def cost(self, d_model: int) -> float:
        """Tokens of a block with padding; tokens of wide rows cost more, because of attention."""
        attention = self.width / (_ATTENTION_DOUBLES * d_model)
        return self.passes * self.height * self.width * (1 + attention)


def layout(
    data: Sequence[Datum],
    blocks: Sequence[Sequence[int]],
    branches: int,
    microbatch_tokens: int,
    shards: int,
    d_model: int,
) -> Layout:
    """Chooses the cheapest rows, each with data of one block.

    A row is as wide as the longest datum, or up to four times as wide: short ones fill a wide row
    better, and more of them share a prefix. Widths are rungs of a ladder, so that few programs are
    compiled. Every row is computed as if it had as many learned tokens as the fullest row. So rows
    are limited to the rung that holds the mean, where that costs no more.

    Args:
        blocks: numbers of the data of each; data that share a prefix are side by side.
        branches: as of ``pack_rows``.
    """
    shared = [
        np.array([data[j].shared_with(data[i], branches) for i, j in pairwise(block)], int)
        for block in blocks
    ]
    learned = sum(len(data[i].targets) for block in blocks for i in block)

    def at(width: int, most: int = learned) -> Layout:
        both = zip(blocks, shared, strict=True)
        packed = [_pack(data, x, width, y, most, max(1, branches)) for x, y in both if x]
        limit = max(1, microbatch_tokens // width // shards) * shards
        fullest = max(map(len, packed))
        passes = -(-fullest // limit)
        height = round_up(bucket(-(-fullest // passes), least=1, rungs=2), shards)
        return Layout(packed, width, passes, min(limit, height))

    longest = bucket(max(len(data[i].ids) for block in blocks for i in block))
    longest = round_up(longest, max(1, branches))
    widest = max(2 * longest, min(4 * longest, _SHORT)) if branches else 2 * longest
    widest = min(widest, microbatch_tokens // shards)
    rungs = 1 if branches else 4  # shared prefixes may be cut almost anywhere
    widths = {bucket(width, rungs=rungs) for width in range(longest + 1, widest + 1)}
    usual, wider = at(longest), [at(width) for width in sorted(widths) if width <= widest]
    best = min(wider, key=lambda layout: layout.cost(d_model), default=usual)
    best = best if best.cost(d_model) < _WORTH_IT * usual.cost(d_model) else usual
    even = at(best.width, most=action_slots(learned // sum(map(len, best.packed))))
    return even if even.cost(d_model) <= best.cost(d_model) else best


def action_slots(n: int) -> int:
    """Rung of the ladder of learned tokens per row that holds ``n``."""
    return bucket(n, least=16, rungs=1)


def _pack(
    data: Sequence[Datum],
    block: Sequence[int],
    width: int,
    shared: np.ndarray,
    most: int,
    step: int,
) -> list[list[int]]:
    """Packs each, longest first, into the row with the longest shared prefix, else the first fit.

    Args:
        shared: tokens that each datum of the block and the next share.
        most: learned tokens of a row, if it has more than one datum.
        step: each datum begins at a multiple of it, as the width is.
    """
    read = np.array([round_up(len(data[i].ids), step) for i in block])
    acted = np.array([len(data[i].targets) for i in block])
    most, row_of, rows = max(most, acted.max()), np.full(len(read), -1), list[list[int]]()
    room, spare = np.full(len(read), width), np.full(len(read), most)
    for i in np.argsort(-read, kind="stable").tolist():
        # the others, nearest first, and what i shares with each: the fewest tokens on the way there
        others = np.concatenate([np.arange(i)[::-1], np.arange(i + 1, len(read))])
        known = np.concatenate([np.minimum.accumulate(x) for x in (shared[:i][::-1], shared[i:])])
        homes = row_of[others]
        known[(homes < 0) | (room[homes] < read[i] - known) | (spare[homes] < acted[i])] = 0
        fits = (room >= read[i]) & (spare >= acted[i])
        row = int(homes[known.argmax()] if known.any() else fits.argmax())
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        room[row] -= read[i] - known.max(initial=0)
        spare[row] -= acted[i]
        row_of[i] = row
    return [[block[i] for i in sorted(row)] for row in rows]
