"""Episodes to packed rows.

A turn is prompt ids and action ids with an owner. Turns of one owner whose token sequences are
nested (the later prompt begins with the earlier prompt and action) become one sequence. Sequences
are packed into rows of equal length, several to a row, kept apart by segment numbers. Only action
tokens carry a loss; everything else is context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from marft_jax import config as config_lib
from marft_jax.buckets import bucket
from marft_jax.types import Episode, Turn

Level = Literal["action", "token"]

# tokens of a row: about where attention costs a small model as much as all else
_TWICE_AS_DEAR = 8192
# of the usual width's cost: another one must be cheaper than that
_WORTH_IT = 0.95


class Rows(NamedTuple):
    """Packed sequences, in U microbatches of B rows.

    Attributes:
        tokens_UBT, positions_UBT: token ids, and their positions within their sequence.
        segments_UBT: number of the sequence within its row, 0 for padding.
        owners_UBT: the adapter of each token, -1 for padding.
        agents_UBT: whose turn the token leads to or belongs to, -1 for padding.
        index_UBA: where in the row the token stands that predicts action token a.
        targets_UBA: the action tokens.
        mask_UBA: 1 for action tokens, 0 for padding.
        behaviour_UBA: behaviour log-probs.
        temperature_UBA: the temperature they were sampled at.
        turn_UBA: which turn of the row the action token belongs to.
        first_UBK: where in the row the last prompt token of turn k stands.
        turn_mask_UBK: 1 for turns, 0 for padding.
        agent_UBK, owner_UBK: who acted, and through which adapter.
        divisor_UBK: what an action's log-prob is divided by (1, its tokens or its words).
        tokens_UBK: action tokens of the turn (1 for padding).
    """

    tokens_UBT: np.ndarray
    positions_UBT: np.ndarray
    segments_UBT: np.ndarray
    owners_UBT: np.ndarray
    agents_UBT: np.ndarray
    index_UBA: np.ndarray
    targets_UBA: np.ndarray
    mask_UBA: np.ndarray
    behaviour_UBA: np.ndarray
    temperature_UBA: np.ndarray
    turn_UBA: np.ndarray
    first_UBK: np.ndarray
    turn_mask_UBK: np.ndarray
    agent_UBK: np.ndarray
    owner_UBK: np.ndarray
    divisor_UBK: np.ndarray
    tokens_UBK: np.ndarray


class Chain(NamedTuple):
    """The decisions (units) of each episode in acting order, as links to the rows and back.

    Attributes:
        unit_EJ: flat position in ``[U, B, K]`` (action level) or ``[U, B, A]`` (token level).
        mask_EJ: 1 for links, 0 for padding.
        rewards_EJ: reward of each link; a turn's reward sits on its last token.
        continues_EJ: 1 where another link of the episode follows.
        weight_EJ: 1 / the links of its turn, so that each turn adds up to one.
        agent_EJ: who acted.
        group_EJ: number of the episode's group: those with the same task.
        cell_EJ: number of the (group, agent, n) that the link's turn is in, the agent's n-th one.
        link_UBX: flat position in ``[E, J]`` of each unit (0 for padding).
    """

    unit_EJ: np.ndarray
    mask_EJ: np.ndarray
    rewards_EJ: np.ndarray
    continues_EJ: np.ndarray
    weight_EJ: np.ndarray
    agent_EJ: np.ndarray
    group_EJ: np.ndarray
    cell_EJ: np.ndarray
    link_UBX: np.ndarray


class Sizes(NamedTuple):
    """What a batch is padded to, so that few programs are compiled.

    Attributes:
        passes: microbatches of a minibatch; empty ones cost nothing.
        width: tokens of a row. Short sequences are packed, so a wide row is not an emptier one.
        actions, turns: of a row.
        links: of an episode's chain.
    """

    passes: int = 0
    width: int = 0
    actions: int = 0
    turns: int = 0
    links: int = 0

    def holding(self, other: Sizes) -> Sizes:
        """The larger of both, each."""
        return Sizes(*map(max, self, other))


NO_SIZES = Sizes()


class Batch(NamedTuple):
    """What one training step learns from.

    Attributes:
        micros: microbatches with rows in them; those after it are empty and cost nothing.
        sizes: what it is padded to.
    """

    rows: Rows
    chain: Chain
    micros: int
    sizes: Sizes


class _Sequence(NamedTuple):
    ids: np.ndarray
    owner: int
    spans: list[tuple[int, int]]
    """(episode, turn) of each action, in order."""
    starts: list[int]
    """Position of the first token of each action."""


def build(
    episodes: Sequence[Episode],
    rewards: Sequence[np.ndarray],
    owners: Sequence[int],
    config: config_lib.Algo,
    level: Level,
    *,
    shards: int = 1,
    seed: Sequence[int] = (0,),
    least: Sizes = NO_SIZES,
) -> Batch:
    """Packs episodes for the learner.

    Args:
        episodes: finished episodes; may be fewer than ``config.episodes``, if some failed.
        rewards: float32 ``[turns]`` for each.
        owners: the adapter of each agent.
        config: how many minibatches, tokens per microbatch, and the ratio's length normalisation.
        level: where decisions live.
        shards: the rows of a microbatch are a multiple of this.
        seed: decides which rows share a minibatch.
        least: what it is padded to at least: the sizes of the batches before, so that programs
            are compiled again only where a batch is larger than all of them.
    """
    sequences = [
        sequence for e, episode in enumerate(episodes) for sequence in _nest(e, episode, owners)
    ]
    packed, width, passes, height = _layout(sequences, config, shards, least.width)
    micros = passes * config.minibatches
    order = np.random.default_rng(list(seed)).permutation(len(packed))
    sizes = least.holding(_sizes(packed, episodes, passes, width))
    placed = {(i % micros, i // micros): packed[row] for i, row in enumerate(order)}
    rows = _empty_rows(sizes, sizes.passes * config.minibatches, height)
    units = _fill(rows, placed, episodes, config.ratio, level)
    labels = _labels(episodes)
    units_EK = [
        [units[e, k] for k in range(len(episode.turns))] for e, episode in enumerate(episodes)
    ]
    longest = max(sum(map(len, turns)) for turns in units_EK)
    sizes = sizes.holding(Sizes(links=bucket(longest, least=1, rungs=1)))
    room = (max(len(episodes), config.episodes), sizes.links)
    return Batch(rows, _chain(units_EK, rewards, labels, rows, level, room), micros, sizes)


def padding(batch: Batch) -> float:
    """The fraction of the rows' tokens that is padding, where microbatches have rows."""
    return float(np.mean(batch.rows.segments_UBT[: batch.micros] == 0))


def _nest(e: int, episode: Episode, owners: Sequence[int]) -> list[_Sequence]:
    """The sequences of one episode, nested turns joined."""
    sequences: list[_Sequence] = []
    for k, turn in enumerate(episode.turns):
        whole = np.concatenate([turn.prompt, turn.action])
        start, owner = len(turn.prompt), owners[turn.agent]
        for i, known in enumerate(sequences):
            n = len(known.ids)
            if known.owner == owner and n <= start and np.array_equal(known.ids, whole[:n]):
                sequences[i] = _Sequence(
                    whole, owner, [*known.spans, (e, k)], [*known.starts, start]
                )
                break
        else:
            sequences.append(_Sequence(whole, owner, [(e, k)], [start]))
    return sequences


class _Layout(NamedTuple):
    """Rows of one width, dealt out to the passes of each minibatch, ``height`` to a microbatch."""

    packed: list[list[_Sequence]]
    width: int
    passes: int
    height: int

    @property
    def cost(self) -> float:
        """Tokens of a minibatch, with padding; attention makes those of a wide row dearer."""
        return self.passes * self.height * self.width * (1 + self.width / _TWICE_AS_DEAR)


def _layout(
    sequences: Sequence[_Sequence], config: config_lib.Algo, shards: int, least: int
) -> _Layout:
    """The cheapest rows, from as wide as the longest sequence to twice as wide, which short ones
    fill better; but the width of the batches before, ``least``, where others gain little."""

    def at(width: int) -> _Layout:
        packed = _pack(sequences, width)
        most = max(1, config.microbatch_tokens // width // shards) * shards
        passes = -(-len(packed) // (most * config.minibatches))
        fullest = bucket(-(-len(packed) // (passes * config.minibatches)), least=1, rungs=2)
        return _Layout(packed, width, passes, min(most, -(-fullest // shards) * shards))

    longest = bucket(max(len(s.ids) - 1 for s in sequences))
    usual = at(max(least, longest))
    widest = min(2 * longest, config.microbatch_tokens // shards)
    wider = sorted({bucket(width) for width in range(usual.width + 1, widest + 1)})
    best = min((at(width) for width in wider), key=lambda layout: layout.cost, default=usual)
    return best if best.cost < _WORTH_IT * usual.cost else usual


def _pack(sequences: Sequence[_Sequence], width: int) -> list[list[_Sequence]]:
    """First fit, longest first. The last token of a sequence predicts nothing and is left out."""
    rows: list[list[_Sequence]] = []
    room: list[int] = []
    for sequence in sorted(sequences, key=lambda s: -len(s.ids)):
        need = len(sequence.ids) - 1
        fit = next((i for i, left in enumerate(room) if left >= need), None)
        if fit is None:
            rows.append([])
            room.append(width)
            fit = len(rows) - 1
        rows[fit].append(sequence)
        room[fit] -= need
    return rows


def _sizes(
    packed: Sequence[Sequence[_Sequence]], episodes: Sequence[Episode], passes: int, width: int
) -> Sizes:
    """What these rows need; the links are not known yet."""
    spans = [[span for sequence in row for span in sequence.spans] for row in packed]
    actions = max(sum(len(episodes[e].turns[k].action) for e, k in row) for row in spans)
    return Sizes(
        passes=bucket(passes, least=1, rungs=1),
        width=width,
        actions=bucket(actions, least=16, rungs=2),
        turns=bucket(max(map(len, spans)), least=1, rungs=1),
    )


def _fill(
    rows: Rows,
    placed: dict[tuple[int, int], list[_Sequence]],
    episodes: Sequence[Episode],
    ratio: str,
    level: Level,
) -> dict[tuple[int, int], list[int]]:
    """Writes the arrays; returns each turn's units as flat positions, by (episode, turn)."""
    b = rows.tokens_UBT.shape[1]
    a_size, k_size = rows.mask_UBA.shape[2], rows.turn_mask_UBK.shape[2]
    units: dict[tuple[int, int], list[int]] = {}
    for (u, r), sequences in placed.items():
        offset, a, k = 0, 0, 0
        for number, sequence in enumerate(sequences, start=1):
            n = len(sequence.ids) - 1
            span = np.s_[u, r, offset : offset + n]
            rows.tokens_UBT[span] = sequence.ids[:-1]
            rows.positions_UBT[span] = np.arange(n)
            rows.segments_UBT[span] = number
            rows.owners_UBT[span] = sequence.owner
            for (e, turn), start in zip(sequence.spans, sequence.starts, strict=True):
                acted = episodes[e].turns[turn]
                length = len(acted.action)
                agents = rows.agents_UBT[u, r, offset : offset + start + length - 1]
                agents[agents < 0] = acted.agent
                _write_turn(rows, acted, sequence.owner, (u, r, k), a, offset + start - 1, ratio)
                flat = (u * b + r) * (k_size if level == "action" else a_size)
                units[e, turn] = (
                    [flat + k] if level == "action" else [*range(flat + a, flat + a + length)]
                )
                a, k = a + length, k + 1
            offset += n
    return units


def _empty_rows(sizes: Sizes, u: int, b: int) -> Rows:
    t, a, k = sizes.width, sizes.actions, sizes.turns

    def zeros(last: int, dtype: type = np.int32) -> np.ndarray:
        return np.zeros((u, b, last), dtype)

    return Rows(
        tokens_UBT=zeros(t),
        positions_UBT=zeros(t),
        segments_UBT=zeros(t),
        owners_UBT=zeros(t) - 1,
        agents_UBT=zeros(t) - 1,
        index_UBA=zeros(a),
        targets_UBA=zeros(a),
        mask_UBA=zeros(a, np.float32),
        behaviour_UBA=zeros(a, np.float32),
        temperature_UBA=zeros(a, np.float32) + 1,
        turn_UBA=zeros(a),
        first_UBK=zeros(k),
        turn_mask_UBK=zeros(k, np.float32),
        agent_UBK=zeros(k),
        owner_UBK=zeros(k),
        divisor_UBK=zeros(k, np.float32) + 1,
        tokens_UBK=zeros(k, np.float32) + 1,
    )


def _write_turn(
    rows: Rows, turn: Turn, owner: int, at: tuple[int, int, int], a: int, predictor: int, ratio: str
) -> None:
    u, r, k = at
    n = len(turn.action)
    span = np.s_[u, r, a : a + n]
    rows.index_UBA[span] = predictor + np.arange(n)
    rows.targets_UBA[span] = turn.action
    rows.mask_UBA[span] = 1
    rows.behaviour_UBA[span] = turn.logprobs
    rows.temperature_UBA[span] = turn.temperature
    rows.turn_UBA[span] = k
    rows.first_UBK[at] = predictor
    rows.turn_mask_UBK[at] = 1
    rows.agent_UBK[at] = turn.agent
    rows.owner_UBK[at] = owner
    words = max(1, len(turn.text.split()))
    rows.divisor_UBK[at] = {"sum": 1, "token": n, "word": words}[ratio]
    rows.tokens_UBK[at] = n


class _Labels(NamedTuple):
    """Of one turn: who acted, and the numbers of its group and of its cell."""

    agent: int
    group: int
    cell: int


def _labels(episodes: Sequence[Episode]) -> list[list[_Labels]]:
    groups: dict[int, int] = {}
    cells: dict[tuple[int, int, int], int] = {}
    labels = []
    for episode in episodes:
        group = groups.setdefault(episode.index, len(groups))
        acted: dict[int, int] = {}
        labels.append([])
        for turn in episode.turns:
            nth = acted[turn.agent] = acted.get(turn.agent, -1) + 1
            cell = cells.setdefault((group, turn.agent, nth), len(cells))
            labels[-1].append(_Labels(turn.agent, group, cell))
    return labels


def _chain(
    units: Sequence[Sequence[list[int]]],
    rewards: Sequence[np.ndarray],
    labels: Sequence[Sequence[_Labels]],
    rows: Rows,
    level: Level,
    shape: tuple[int, int],
) -> Chain:
    """Lays the turns' units end to end, in ``shape``: room for all episodes of a step, so that one
    with fewer runs the same program."""

    def zeros(dtype: type) -> np.ndarray:
        return np.zeros(shape, dtype)

    kind = rows.turn_mask_UBK if level == "action" else rows.mask_UBA
    chain = Chain(
        unit_EJ=zeros(np.int32),
        mask_EJ=zeros(np.float32),
        rewards_EJ=zeros(np.float32),
        continues_EJ=zeros(np.float32),
        weight_EJ=zeros(np.float32),
        agent_EJ=zeros(np.int32),
        group_EJ=zeros(np.int32),
        cell_EJ=zeros(np.int32),
        link_UBX=np.zeros(kind.shape, np.int32),
    )
    flat_links = chain.link_UBX.reshape(-1)
    for e, turns in enumerate(units):
        end = 0
        for k, turn_units in enumerate(turns):
            start, end = end, end + len(turn_units)
            span = np.s_[e, start:end]
            chain.unit_EJ[span] = turn_units
            chain.weight_EJ[span] = 1 / len(turn_units)
            chain.rewards_EJ[e, end - 1] = rewards[e][k]
            chain.agent_EJ[span], chain.group_EJ[span], chain.cell_EJ[span] = labels[e][k]
            flat_links[turn_units] = e * shape[1] + np.arange(start, end)
        chain.mask_EJ[e, :end] = 1
        chain.continues_EJ[e, : end - 1] = 1
    return chain
