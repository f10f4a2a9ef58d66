"""Batches: the episodes of a training step as data in packed rows, and the chain of decisions.

The data of each base are packed into rows (``policy/packing.py``), rows into microbatches,
microbatches into blocks with about as many decisions of each adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from marft_jax import random_keys
from marft_jax.learning.chain import Chain, make_chain
from marft_jax.learning.minibatches import balance_blocks, blocks_of
from marft_jax.learning.team_data import TeamData, TurnKey, data_of
from marft_jax.policy.data import Datum
from marft_jax.policy.packing import PackedRows, pack_rows
from marft_jax.random_keys import Stream
from marft_jax.sampling.constraints import Constraint
from marft_jax.settings.config import Update
from marft_jax.types import MAIN, Episode, Level, Turn

ByBase: TypeAlias = Mapping[str, Sequence[np.ndarray]]
"""Numbers of each datum, by base."""


class OfBase(NamedTuple):
    """Turns of the agents on one base, as data in rows.

    Attributes:
        rows: their blocks are sets of episodes with about as many decisions of each adapter.
        prompts: rows up to the last prompt token of each turn, in the same blocks, for a critic
            that reads no more; None for one that reads ``rows``.
    """

    data: TeamData
    rows: PackedRows
    prompts: PackedRows | None


class Batch(NamedTuple):
    """Everything that one training step learns from.

    Attributes:
        level: what a decision is.
        parts: the turns in rows, by base.
        blocks: in which minibatches are dealt out; a multiple of these.
        chain: the decisions in acting order.
        taught: the same actions behind the prompts that their teachers read, without those of
            agents without a teacher, by the teachers' base. See ``teaching.py``.
    """

    level: Level
    parts: dict[str, OfBase]
    blocks: int
    chain: Chain
    taught: dict[str, OfBase] | None = None

    @property
    def prefix_shared(self) -> int:
        """Tokens that data share with others of their row."""
        return sum(part.rows.prefix_shared for part in self.parts.values())

    @property
    def behaviour(self) -> list[np.ndarray]:
        """Behaviour log-probs of the action tokens of each turn, in acting order."""
        each = {b: [x.logprobs for x in part.data.data] for b, part in self.parts.items()}
        return self.tokens(each)

    def tokens(self, of_data: ByBase) -> list[np.ndarray]:
        """Numbers of the action tokens of each turn, in acting order."""
        return self.chain.in_order(by_turn(self.parts, of_data, "token"))

    def links(self, of_data: ByBase) -> np.ndarray:
        """Numbers of decisions in acting order, ``float64 [E, J]``; 0 for padding."""
        return self.chain.lay(self.chain.in_order(by_turn(self.parts, of_data, self.level)))


def by_turn(
    parts: Mapping[str, OfBase], of_data: ByBase, level: Level
) -> dict[TurnKey, np.ndarray]:
    """Numbers of each turn, from those of each base's data: of turns (``action``), or of action
    tokens (``token``)."""
    found = dict[TurnKey, np.ndarray]()
    for base, numbers in of_data.items():
        found |= parts[base].data.by_turn(numbers, level)
    return found


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
    parts, blocks = pack_turns(episodes, owners, config, level, **how)
    return Batch(level, parts, blocks, make_chain(episodes, rewards, level))


def pack_turns(
    episodes: Sequence[Episode],
    owners: Sequence[int | None],
    config: Update,
    level: Level,
    *,
    shards: int = 1,
    seed: Sequence[int] = (0,),
    share: bool = False,
    branches: Mapping[str, int] | None = None,
    bases: Sequence[str] | None = None,
    d_models: Mapping[str, int] | None = None,
    prompts: bool = False,
    constraint: Callable[[Turn], Constraint | None] = lambda turn: None,
) -> tuple[dict[str, OfBase], int]:
    """Packs the turns of episodes into rows, by base; also returns the number of blocks.

    Args:
        owners: the adapter of each agent, among those of its base; None: its turns are left out.
        shards: the rows of a microbatch are a multiple of this.
        seed: decides which episodes are in one minibatch.
        share: data of a row share their prefixes.
        branches: of each base, by default 1: these are a multiple of so many tokens.
        bases: the base of each agent; by default all are on ``main``.
        d_models: width of each base, by default 2048; the rows of a narrow base are less wide.
        prompts: packs the prompts on their own too; decisions are actions.
    """
    on = [MAIN] * len(owners) if bases is None else bases
    data = dict[str, TeamData]()
    for base in dict.fromkeys(on):
        of_agents = enumerate(zip(on, owners, strict=True))
        agents = {i: n for i, (name, n) in of_agents if name == base and n is not None}
        if (made := data_of(episodes, agents, config.ratio, constraint)).data:
            data[base] = made
    run_seed, *draw = seed
    rng = random_keys.generator(run_seed, Stream.ROWS, *draw)
    groups = [episode.group for episode in episodes]
    loads = [_loads(own, level, len(episodes)) for own in data.values()]
    loads = loads or [np.ones((len(episodes), 1), int)]  # nobody acted whose turns are packed
    blocks = balance_blocks(np.concatenate(loads, axis=1), groups, blocks_of(config, groups), rng)

    def rows_of(base: str, of_base: Sequence[Datum]) -> PackedRows:
        return pack_rows(
            of_base, [data[base].of_episodes(block) for block in blocks], config.microbatch_tokens,
            shards=shards, rng=rng, branches=(branches or {}).get(base, 1) if share else 0,
            d_model=(d_models or {}).get(base, 2048),
        )  # fmt: skip

    rows = {base: rows_of(base, own.data) for base, own in data.items()}
    cut = dict[str, PackedRows]()
    for base, own in data.items() if prompts else ():
        cut[base] = rows_of(base, [datum.prompt() for datum in own.data])
    parts = {base: OfBase(own, rows[base], cut.get(base)) for base, own in data.items()}
    return parts, len(blocks)


def _loads(own: TeamData, level: Level, episodes: int) -> np.ndarray:
    """Decisions of each adapter, and tokens, of each episode, ``[E, adapters + 1]``.

    Minibatches should have about as many decisions of each adapter, as an optimiser step from a few
    decisions moves an adapter as far as a step from many.
    """
    adapters = 1 + max(datum.owner for datum in own.data)
    loads = np.zeros((episodes, adapters + 1), int)
    for datum, turns in zip(own.data, own.turns, strict=True):
        e, _ = turns[0]
        loads[e, datum.owner] += len(turns) if level == "action" else len(datum.targets)
        loads[e, -1] += len(datum.ids)
    return loads
