"""Token sequences to rows of equal length.

Turns of one owner whose token sequences are nested become one sequence; sequences are packed into
rows, several to a row, and those of a row that begin alike may share their beginning.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from marft_jax import config as config_lib
from marft_jax.parallel.ladder import bucket, round_up
from marft_jax.types import Episode

# tokens of a row, as a multiple of the model's width, at which attention costs as much as all else:
# 2.3 on a CPU; more, as wide rows have less padding
_TWICE_AS_DEAR = 4
# of the cost of the narrowest rows: wider ones must be cheaper than that
_WORTH_IT = 0.95
# sequences in alphabetical order that are looked at on either side of one, for rows to join
_NEAR = 256
# tokens up to which a row may be four times as wide as its longest sequence; beyond, where
# attention needs memory, twice
_SHORT = 2048


class TokenSequence(NamedTuple):
    """One turn, or nested ones.

    Attributes:
        ids: prompt and action of the last turn.
        agents: whose turn each token leads to or belongs to.
        owner: the adapter that all of it passes through.
        spans: (episode, turn) of each action, in order.
        starts: position of the first token of each action.
        acted: how many tokens of each action are in it.
    """

    ids: np.ndarray
    agents: np.ndarray
    owner: int
    spans: list[tuple[int, int]]
    starts: list[int]
    acted: list[int]

    @property
    def read(self) -> int:
        """How many tokens it has without the last one, which predicts nothing."""
        return len(self.ids) - 1

    @property
    def spelled(self) -> bytes:
        """What orders sequences so that those that begin alike stand side by side."""
        return np.stack([self.ids, self.agents], axis=1).astype(">u4").tobytes()

    def prompt(self) -> TokenSequence:
        """Up to the first token of the last action."""
        end = self.starts[-1] + 1
        acted = [*self.acted[:-1], 1]
        return self._replace(ids=self.ids[:end], agents=self.agents[:end], acted=acted)

    def alike(self, other: TokenSequence) -> int:
        """How many of these tokens both begin with."""
        n = min(self.read, other.read) if self.owner == other.owner else 0
        same = (self.ids[:n] == other.ids[:n]) & (self.agents[:n] == other.agents[:n])
        return n if same.all() else int(same.argmin())


def nest(e: int, episode: Episode, owners: Sequence[int]) -> list[TokenSequence]:
    """The sequences of one episode, nested turns joined."""
    sequences: list[TokenSequence] = []
    for k, turn in enumerate(episode.turns):
        whole = np.concatenate([turn.prompt, turn.action])
        start, length, owner = len(turn.prompt), len(turn.action), owners[turn.agent]
        agents = np.full(len(whole), turn.agent)
        for i, known in enumerate(sequences):
            n = len(known.ids)
            if known.owner == owner and n <= start and np.array_equal(known.ids, whole[:n]):
                agents[: n - 1] = known.agents[:-1]
                sequences[i] = TokenSequence(
                    whole,
                    agents,
                    owner,
                    [*known.spans, (e, k)],
                    [*known.starts, start],
                    [*known.acted, length],
                )
                break
        else:
            sequences.append(TokenSequence(whole, agents, owner, [(e, k)], [start], [length]))
    return sequences


class Layout(NamedTuple):
    """Rows of one width, dealt out to the passes of each minibatch, ``height`` to a microbatch."""

    packed: list[list[TokenSequence]]
    width: int
    passes: int
    height: int

    def cost(self, d_model: int) -> float:
        """Tokens of a minibatch, with padding; attention makes those of a wide row dearer."""
        dearer = self.width / (_TWICE_AS_DEAR * d_model)
        return self.passes * self.height * self.width * (1 + dearer)


def layout(
    sequences: Sequence[TokenSequence],
    join: bool,
    config: config_lib.Algo,
    shards: int,
    d_model: int,
) -> Layout:
    """The cheapest rows that leave no minibatch without any: from as wide as the longest sequence
    to some times as wide, which short ones fill better, and where more of them may join.

    Widths are rungs of a ladder, so that few programs are compiled. No row has more action tokens
    than the rung that holds their mean, where that takes no more rows: each is computed as if it
    had as many as the fullest.
    """
    pairs = itertools.pairwise(sequences) if join else ()
    alike = np.array([b.alike(a) for a, b in pairs], int)
    acted = sum(sum(s.acted) for s in sequences)

    def at(width: int) -> Layout:
        packed = _pack(sequences, width, alike)
        even = _pack(sequences, width, alike, most=action_slots(acted // len(packed)))
        packed = even if len(even) <= len(packed) else packed
        most = max(1, config.microbatch_tokens // width // shards) * shards
        passes = -(-len(packed) // (most * config.minibatches))
        fullest = bucket(-(-len(packed) // (passes * config.minibatches)), least=1, rungs=2)
        return Layout(packed, width, passes, min(most, round_up(fullest, shards)))

    longest = bucket(max(s.read for s in sequences))
    widest = max(2 * longest, min(4 * longest, _SHORT)) if join else 2 * longest
    widest = min(widest, config.microbatch_tokens // shards)
    rungs = 1 if join else 4  # what is joined may be cut almost anywhere
    widths = {bucket(width, rungs=rungs) for width in range(longest + 1, widest + 1)}
    usual, wider = at(longest), [at(width) for width in sorted(widths) if width <= widest]
    enough = [layout for layout in wider if len(layout.packed) >= config.minibatches]
    best = min(enough, key=lambda layout: layout.cost(d_model), default=usual)
    return best if best.cost(d_model) < _WORTH_IT * usual.cost(d_model) else usual


def action_slots(n: int) -> int:
    """The rung of the ladder of action tokens per row that holds ``n``."""
    return bucket(n, least=16, rungs=1)


def _pack(
    sequences: Sequence[TokenSequence], width: int, alike: np.ndarray, most: int | None = None
) -> list[list[TokenSequence]]:
    """Longest first: into the row that begins most alike, else the first that has room.

    Args:
        alike: tokens that each sequence and the next share; the sequences are sorted. Or none.
        most: action tokens of a row, if it has more than one sequence.
    """
    read = np.array([s.read for s in sequences])
    acted = np.array([sum(s.acted) for s in sequences])
    rows: list[list[int]] = []
    row_of, room = np.full(len(read), -1), np.full(len(read), width)
    spare = np.full(len(read), acted.sum() if most is None else max(most, acted.max()))
    for i in np.argsort(-read, kind="stable"):
        near, shared = _near(i, alike)
        there = row_of[near]
        fits = (shared > 0) & (there >= 0)
        fits &= (room[there] >= read[i] - shared) & (spare[there] >= acted[i])
        if fits.any():
            best = np.where(fits, shared, 0).argmax()
            row, need = there[best], read[i] - shared[best]
        else:
            row, need = ((room >= read[i]) & (spare >= acted[i])).argmax(), read[i]
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        room[row] -= need
        spare[row] -= acted[i]
        row_of[i] = row
    return [[sequences[i] for i in sorted(row)] for row in rows]


def _near(i: int, alike: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sequences beside the i-th, and how many tokens it shares with each: as few as any neighbours
    between them."""
    before, after = alike[max(0, i - _NEAR) : i][::-1], alike[i : i + _NEAR]
    near = [i - 1 - np.arange(len(before)), i + 1 + np.arange(len(after))]
    shared = [np.minimum.accumulate(side) for side in (before, after)]
    return np.concatenate(near), np.concatenate(shared)
