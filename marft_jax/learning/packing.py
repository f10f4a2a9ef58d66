"""Packing: which token sequences stand in one row, and which episodes in one block.

Turns of one owner whose token sequences are nested become one sequence. Several sequences are
packed into a row, where they may share a prefix.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from marft_jax.config import Update
from marft_jax.parallel.ladder import bucket, round_up
from marft_jax.types import Episode

# Width of a row, as a multiple of the model's width, at which attention costs as much as all other
# products: 2.3 on a CPU; 4, because wide rows have less padding.
_ATTENTION_DOUBLES = 4
# Wider rows are taken if they cost less than this part of the narrowest rows.
_WORTH_IT = 0.95
# Width up to which a row may be four times as wide as its longest sequence; beyond, attention needs
# memory, and a row may be twice as wide.
_SHORT = 2048


class TokenSequence(NamedTuple):
    """Tokens of a turn, or of nested turns.

    Attributes:
        ids: prompt and action of the last turn.
        agents: whose turn each token leads to or belongs to.
        owner: the adapter that all tokens pass through.
        spans: (episode, turn) of each action, in order.
        starts: position of the first token of each action.
        acted: number of tokens of each action that are in the sequence.
    """

    ids: np.ndarray
    agents: np.ndarray
    owner: int
    spans: list[tuple[int, int]]
    starts: list[int]
    acted: list[int]

    @property
    def read(self) -> int:
        """Number of tokens without the last token, which predicts nothing."""
        return len(self.ids) - 1

    @property
    def sort_key(self) -> bytes:
        """Sort key that puts sequences which share a prefix side by side."""
        return np.stack([self.ids, self.agents], axis=1).astype(">u4").tobytes()

    def prompt(self) -> TokenSequence:
        """Cuts the sequence behind the first token of its last action."""
        end = self.starts[-1] + 1
        acted = [*self.acted[:-1], 1]
        return self._replace(ids=self.ids[:end], agents=self.agents[:end], acted=acted)

    def shared_with(self, other: TokenSequence) -> int:
        """Tokens of the longest prefix that both have."""
        n = min(self.read, other.read) if self.owner == other.owner else 0
        same = (self.ids[:n] == other.ids[:n]) & (self.agents[:n] == other.agents[:n])
        return n if same.all() else int(same.argmin())


def known_before(sequences: Sequence[tuple[Any, np.ndarray]]) -> np.ndarray:
    """Counts the first tokens of each (owner, ids) that are known from the others.

    These are the tokens that it shares with the one before it, when all are sorted.
    """
    keys = [(owner, ids.astype(">u4").tobytes()) for owner, ids in sequences]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    known = np.zeros(len(keys), int)
    for i, j in itertools.pairwise(order):
        if keys[i][0] == keys[j][0]:
            n = min(len(sequences[i][1]), len(sequences[j][1]))
            same = sequences[i][1][:n] == sequences[j][1][:n]
            known[j] = n if same.all() else same.argmin()
    return known


def merge_prefixes(e: int, episode: Episode, owners: Mapping[int, int]) -> list[TokenSequence]:
    """Makes the sequences of episode e: a turn that continues an earlier turn extends its sequence.

    Args:
        owners: the adapter of each agent; turns of other agents are left out.
    """
    sequences: list[TokenSequence] = []
    for k, turn in enumerate(episode.turns):
        if turn.agent not in owners:
            continue
        ids, owner = np.concatenate([turn.prompt, turn.action]), owners[turn.agent]
        agents, start = np.full(len(ids), turn.agent), len(turn.prompt)
        new = TokenSequence(ids, agents, owner, [(e, k)], [start], [len(turn.action)])
        for i, known in enumerate(sequences):
            n = len(known.ids)
            if known.owner == owner and n <= start and np.array_equal(known.ids, ids[:n]):
                agents[: n - 1] = known.agents[:-1]
                sequences[i] = new._replace(
                    spans=known.spans + new.spans,
                    starts=known.starts + new.starts,
                    acted=known.acted + new.acted,
                )
                break
        else:
            sequences.append(new)
    return sequences


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


class Layout(NamedTuple):
    """Rows of one width; ``passes`` microbatches of ``height`` rows hold a block."""

    packed: list[list[list[TokenSequence]]]  # sequences of each row of each block
    width: int
    passes: int
    height: int

    def cost(self, d_model: int) -> float:
        """Tokens of a block with padding; tokens of wide rows cost more, because of attention."""
        attention = self.width / (_ATTENTION_DOUBLES * d_model)
        return self.passes * self.height * self.width * (1 + attention)


def layout(
    blocks: Sequence[Sequence[TokenSequence]],
    share: bool,
    config: Update,
    shards: int,
    d_model: int,
) -> Layout:
    """Chooses the cheapest rows, each with sequences of one block.

    A row is as wide as the longest sequence, or up to four times as wide: short sequences fill a
    wide row better, and more of them share a prefix. Widths are rungs of a ladder, so that few
    programs are compiled. Every row is computed as if it had as many action tokens as the fullest
    row. So rows are limited to the rung that holds the mean, where that costs no more.
    """
    sequences = [s for block in blocks for s in block]
    shared = [
        np.array([share and b.shared_with(a) for a, b in itertools.pairwise(block)], int)
        for block in blocks
    ]
    acted = sum(sum(s.acted) for s in sequences)

    def at(width: int, most: int = acted) -> Layout:
        packed = [_pack(x, width, y, most) for x, y in zip(blocks, shared, strict=True) if x]
        limit = max(1, config.microbatch_tokens // width // shards) * shards
        fullest = max(map(len, packed))
        passes = -(-fullest // limit)
        height = round_up(bucket(-(-fullest // passes), least=1, rungs=2), shards)
        return Layout(packed, width, passes, min(limit, height))

    longest = bucket(max(s.read for s in sequences))
    widest = max(2 * longest, min(4 * longest, _SHORT)) if share else 2 * longest
    widest = min(widest, config.microbatch_tokens // shards)
    rungs = 1 if share else 4  # shared prefixes may be cut almost anywhere
    widths = {bucket(width, rungs=rungs) for width in range(longest + 1, widest + 1)}
    usual, wider = at(longest), [at(width) for width in sorted(widths) if width <= widest]
    best = min(wider, key=lambda layout: layout.cost(d_model), default=usual)
    best = best if best.cost(d_model) < _WORTH_IT * usual.cost(d_model) else usual
    even = at(best.width, most=action_slots(acted // sum(map(len, best.packed))))
    return even if even.cost(d_model) <= best.cost(d_model) else best


def action_slots(n: int) -> int:
    """Rung of the ladder of action tokens per row that holds ``n``."""
    return bucket(n, least=16, rungs=1)


def _pack(
    sequences: Sequence[TokenSequence], width: int, shared: np.ndarray, most: int
) -> list[list[TokenSequence]]:
    """Packs each, longest first, into the row with the longest shared prefix, else the first fit.

    Args:
        shared: tokens that each sequence and the next share; the sequences are sorted.
        most: action tokens of a row, if it has more than one sequence.
    """
    read = np.array([s.read for s in sequences])
    acted = np.array([sum(s.acted) for s in sequences])
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
    return [[sequences[i] for i in sorted(row)] for row in rows]
