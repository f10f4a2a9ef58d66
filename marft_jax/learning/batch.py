"""Episodes to packed rows.

A turn is prompt ids and action ids with an owner. Turns of one owner whose token sequences are
nested (the later prompt begins with the earlier prompt and action) become one sequence. Sequences
are packed into rows of equal length, several to a row. Those of a row that begin alike (samples of
one task, turns with one system prompt) may share their beginning: it stands there once, what each
goes on with stands after it, and every token reads what it would read on its own. Only action
tokens carry a loss; everything else is context.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from marft_jax import config as config_lib
from marft_jax import random_keys
from marft_jax.learning.packing import TokenSequence, action_slots, layout, nest
from marft_jax.parallel.ladder import bucket
from marft_jax.random_keys import Stream
from marft_jax.types import Episode, Turn

Level = Literal["action", "token"]


class Rows(NamedTuple):
    """Packed sequences, in B rows of one microbatch; those of a batch have an axis U before it.

    Attributes:
        tokens_BT, positions_BT: token ids, and their positions within their sequence.
        until_BT: where in the row the last token stands that may read this one; tokens before it
            never do. Padding is read by itself only.
        owners_BT: the adapter of each token, -1 for padding.
        agents_BT: whose turn the token leads to or belongs to, -1 for padding.
        index_BA: where in the row the token stands that predicts action token a.
        targets_BA: the action tokens.
        mask_BA: 1 for action tokens, 0 for padding.
        behaviour_BA: behaviour log-probs.
        temperature_BA: the temperature they were sampled at.
        turn_BA: which turn of the row the action token belongs to.
        first_BK: where in the row the last prompt token of turn k stands.
        turn_mask_BK: 1 for turns, 0 for padding.
        agent_BK, owner_BK: who acted, and through which adapter.
        divisor_BK: what an action's log-prob is divided by (1, its tokens or its words).
        tokens_BK: action tokens of the turn (1 for padding).
    """

    tokens_BT: np.ndarray
    positions_BT: np.ndarray
    until_BT: np.ndarray
    owners_BT: np.ndarray
    agents_BT: np.ndarray
    index_BA: np.ndarray
    targets_BA: np.ndarray
    mask_BA: np.ndarray
    behaviour_BA: np.ndarray
    temperature_BA: np.ndarray
    turn_BA: np.ndarray
    first_BK: np.ndarray
    turn_mask_BK: np.ndarray
    agent_BK: np.ndarray
    owner_BK: np.ndarray
    divisor_BK: np.ndarray
    tokens_BK: np.ndarray


class Chain(NamedTuple):
    """The decisions (units) of each episode in acting order, as links to the rows.

    Attributes:
        unit_EJ: flat position in ``[U, B, K]`` (action level) or ``[U, B, A]`` (token level).
        mask_EJ: 1 for links, 0 for padding.
        rewards_EJ: reward of each link; a turn's reward sits on its last token.
        continues_EJ: 1 where another link of the episode follows.
        weight_EJ: 1 / the links of its turn, so that each turn adds up to one.
        agent_EJ: who acted.
        group_EJ: number of the episode's group: those with the same task.
        cell_EJ: number of the (group, agent, n) that the link's turn is in, the agent's n-th one.
        shape_UBX: of the rows that the units stand in.
    """

    unit_EJ: np.ndarray
    mask_EJ: np.ndarray
    rewards_EJ: np.ndarray
    continues_EJ: np.ndarray
    weight_EJ: np.ndarray
    agent_EJ: np.ndarray
    group_EJ: np.ndarray
    cell_EJ: np.ndarray
    shape_UBX: tuple[int, int, int]


class Prompts(NamedTuple):
    """The rows once more, without what follows the last prompt token of each sequence: all that is
    read for a value of a whole action.

    Attributes:
        rows: packed on their own, in microbatches of no minibatch.
        unit_UBK: flat position among their turns of each turn of the batch's rows.
    """

    rows: Rows
    unit_UBK: np.ndarray


class Batch(NamedTuple):
    """Everything that one training step learns from.

    Attributes:
        joined: tokens that sequences share with others of their row.
        prompts: for a critic that needs no more than these.
    """

    rows: Rows
    chain: Chain
    joined: int
    prompts: Prompts | None = None


def build(
    episodes: Sequence[Episode],
    rewards: Sequence[np.ndarray],
    owners: Sequence[int],
    config: config_lib.Algo,
    level: Level,
    *,
    shards: int = 1,
    seed: Sequence[int] = (0,),
    join: bool = False,
    d_model: int = 2048,
    prompts: bool = False,
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
        join: sequences of a row share what they begin with.
        d_model: of the model that reads them: a narrow one has rows made less wide.
        prompts: packs these on their own too; decisions are actions.
    """
    assert not prompts or level == "action"
    sequences = [
        sequence for e, episode in enumerate(episodes) for sequence in nest(e, episode, owners)
    ]
    pack = functools.partial(
        _rows, episodes=episodes, level=level, shards=shards, seed=seed, join=join, d_model=d_model
    )
    whole = pack(sequences, config=config)
    units_EK = [
        [whole.units[e, k] for k in range(len(episode.turns))] for e, episode in enumerate(episodes)
    ]
    chain = _chain(units_EK, rewards, _labels(episodes), whole.rows, level)
    batch = Batch(whole.rows, chain, whole.joined)
    if not prompts:
        return batch
    cut = pack(
        [sequence.prompt() for sequence in sequences],
        config=dataclasses.replace(config, minibatches=1),
    )
    unit_UBK = np.zeros_like(whole.rows.first_BK)
    for turn, [unit] in whole.units.items():
        unit_UBK.reshape(-1)[unit] = cut.units[turn][0]
    return batch._replace(prompts=Prompts(cut.rows, unit_UBK))


class _Packed(NamedTuple):
    """Rows, the flat positions of each turn's units by (episode, turn), and as of ``Batch``."""

    rows: Rows
    units: dict[tuple[int, int], list[int]]
    joined: int


def _rows(
    sequences: list[TokenSequence],
    *,
    episodes: Sequence[Episode],
    config: config_lib.Algo,
    level: Level,
    shards: int,
    seed: Sequence[int],
    join: bool,
    d_model: int,
) -> _Packed:
    """Packs sequences; arguments as of ``build``."""
    if join:
        sequences = sorted(sequences, key=lambda s: (s.owner, s.spelled))
    packed, width, passes, height = layout(sequences, join, config, shards, d_model)
    micros = passes * config.minibatches
    run_seed, *draw = seed
    order = random_keys.generator(run_seed, Stream.ROWS, *draw).permutation(len(packed))
    placed = {(i % micros, i // micros): packed[row] for i, row in enumerate(order)}
    turns = [[n for s in row for n in s.acted] for row in packed]
    rows = _empty_rows(
        (micros, height),
        width,
        actions=action_slots(max(map(sum, turns))),
        turns=bucket(max(map(len, turns)), least=32, rungs=1),  # they cost next to nothing
    )
    units = _fill(rows, placed, join, episodes, config.ratio, level)
    joined = sum(s.read for s in sequences) - int((rows.owners_BT >= 0).sum())
    return _Packed(rows, units, joined)


def microbatches(rows: Rows) -> list[Rows]:
    """The rows of each, without the axis U."""
    return [Rows(*(x[u] for x in rows)) for u in range(len(rows.tokens_BT))]


def padding(batch: Batch) -> float:
    """The fraction of the rows' tokens that is padding."""
    return float(np.mean(batch.rows.owners_BT < 0))


def _fill(
    rows: Rows,
    placed: dict[tuple[int, int], list[TokenSequence]],
    join: bool,
    episodes: Sequence[Episode],
    ratio: str,
    level: Level,
) -> dict[tuple[int, int], list[int]]:
    """Writes the arrays; returns each turn's units as flat positions, by (episode, turn)."""
    b = rows.tokens_BT.shape[1]
    a_size, k_size = rows.mask_BA.shape[2], rows.turn_mask_BK.shape[2]
    units: dict[tuple[int, int], list[int]] = {}
    for (u, r), sequences in placed.items():
        end, a, k, place = 0, 0, 0, np.zeros(0, int)
        for i, sequence in enumerate(sequences):
            known = sequence.alike(sequences[i - 1]) if join and i else 0
            start, end = end, end + sequence.read - known
            place = np.concatenate([place[:known], np.arange(start, end)])
            new = np.s_[u, r, start:end]
            rows.tokens_BT[new] = sequence.ids[known:-1]
            rows.positions_BT[new] = np.arange(known, sequence.read)
            rows.owners_BT[new] = sequence.owner
            rows.agents_BT[new] = sequence.agents[known:-1]
            rows.until_BT[u, r, place] = end - 1
            for (e, turn), first, length in zip(
                sequence.spans, sequence.starts, sequence.acted, strict=True
            ):
                acted = episodes[e].turns[turn]
                predictors = place[first - 1 : first - 1 + length]
                _write_turn(rows, acted, sequence.owner, (u, r, k), a, predictors, ratio)
                flat = (u * b + r) * (k_size if level == "action" else a_size)
                units[e, turn] = (
                    [flat + k] if level == "action" else [*range(flat + a, flat + a + length)]
                )
                a, k = a + length, k + 1
    return units


def _empty_rows(shape: tuple[int, int], width: int, actions: int, turns: int) -> Rows:
    t, a, k = width, actions, turns

    def zeros(last: int, dtype: type = np.int32) -> np.ndarray:
        return np.zeros((*shape, last), dtype)

    return Rows(
        tokens_BT=zeros(t),
        positions_BT=zeros(t),
        until_BT=zeros(t) + np.arange(t, dtype=np.int32),
        owners_BT=zeros(t) - 1,
        agents_BT=zeros(t) - 1,
        index_BA=zeros(a),
        targets_BA=zeros(a),
        mask_BA=zeros(a, np.float32),
        behaviour_BA=zeros(a, np.float32),
        temperature_BA=zeros(a, np.float32) + 1,
        turn_BA=zeros(a),
        first_BK=zeros(k),
        turn_mask_BK=zeros(k, np.float32),
        agent_BK=zeros(k),
        owner_BK=zeros(k),
        divisor_BK=zeros(k, np.float32) + 1,
        tokens_BK=zeros(k, np.float32) + 1,
    )


def _write_turn(
    rows: Rows,
    turn: Turn,
    owner: int,
    at: tuple[int, int, int],
    a: int,
    predictors: np.ndarray,
    ratio: str,
) -> None:
    u, r, k = at
    n = len(predictors)
    span = np.s_[u, r, a : a + n]
    rows.index_BA[span] = predictors
    rows.targets_BA[span] = turn.action[:n]
    rows.mask_BA[span] = 1
    rows.behaviour_BA[span] = turn.logprobs[:n]
    rows.temperature_BA[span] = turn.temperature
    rows.turn_BA[span] = k
    rows.first_BK[at] = predictors[0]
    rows.turn_mask_BK[at] = 1
    rows.agent_BK[at] = turn.agent
    rows.owner_BK[at] = owner
    words = max(1, len(turn.text.split()))
    rows.divisor_BK[at] = {"sum": 1, "token": n, "word": words}[ratio]
    rows.tokens_BK[at] = n


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
        group = groups.setdefault(episode.group, len(groups))
        labels.append([])
        for agent, nth in episode.places:
            cell = cells.setdefault((group, agent, nth), len(cells))
            labels[-1].append(_Labels(agent, group, cell))
    return labels


def _chain(
    units: Sequence[Sequence[list[int]]],
    rewards: Sequence[np.ndarray],
    labels: Sequence[Sequence[_Labels]],
    rows: Rows,
    level: Level,
) -> Chain:
    """Lays the turns' units end to end."""
    shape = len(units), max(sum(map(len, turns)) for turns in units)

    def zeros(dtype: type) -> np.ndarray:
        return np.zeros(shape, dtype)

    kind = rows.turn_mask_BK if level == "action" else rows.mask_BA
    chain = Chain(
        unit_EJ=zeros(np.int32),
        mask_EJ=zeros(np.float32),
        rewards_EJ=zeros(np.float32),
        continues_EJ=zeros(np.float32),
        weight_EJ=zeros(np.float32),
        agent_EJ=zeros(np.int32),
        group_EJ=zeros(np.int32),
        cell_EJ=zeros(np.int32),
        shape_UBX=kind.shape,
    )
    for e, turns in enumerate(units):
        end = 0
        for k, turn_units in enumerate(turns):
            start, end = end, end + len(turn_units)
            span = np.s_[e, start:end]
            chain.unit_EJ[span] = turn_units
            chain.weight_EJ[span] = 1 / len(turn_units)
            chain.rewards_EJ[e, end - 1] = rewards[e][k]
            chain.agent_EJ[span], chain.group_EJ[span], chain.cell_EJ[span] = labels[e][k]
        chain.mask_EJ[e, :end] = 1
        chain.continues_EJ[e, : end - 1] = 1
    return chain
