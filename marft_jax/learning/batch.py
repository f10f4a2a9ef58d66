"""Batches: the episodes of a training step as data in packed rows, and the chain of decisions.

The data of each base are packed into rows (``policy/packing.py``), rows into microbatches,
microbatches into blocks with about as many decisions of each adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from marft_jax import random_keys
from marft_jax.learning.chain import Chain, make_chain
from marft_jax.learning.minibatches import balance_blocks, blocks_of
from marft_jax.learning.team_data import TeamData, TurnKey, data_of
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.policy.data import Datum
from marft_jax.policy.packing import PackedRows, pack_rows
from marft_jax.random_keys import Stream
from marft_jax.sampling.constraints import Constraint
from marft_jax.settings.config import Update
from marft_jax.types import MAIN, Episode, Level, Turn


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
        of_turns = dict[TurnKey, np.ndarray]()
        for part in self.parts.values():
            of_turns |= part.data.by_turn([x.logprobs for x in part.data.data], "token")
        return self.chain.in_order(of_turns)


def build(
    episodes: Sequence[Episode],
    rewards: Sequence[np.ndarray],
    owners: Sequence[int],
    config: Update,
    level: Level,
    **options: Any,
) -> Batch:
    """Packs episodes for the learner.

    Args:
        episodes: finished episodes; may be fewer than ``config.episodes``, if some failed.
        rewards: ``float32 [turns]`` for each.
        owners: the adapter of each agent, among those of its base.
        config: the algorithm's settings.
        level: ``action`` or ``token``: what a decision is.
        options: further arguments of ``pack_turns``.
    """
    parts, blocks = pack_turns(episodes, owners, config, level, **options)
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
    configs: Mapping[str, DecoderConfig] = MappingProxyType({}),
    bases: Sequence[str] | None = None,
    prompts: bool = False,
    constraint: Callable[[Turn], Constraint | None] = lambda turn: None,
) -> tuple[dict[str, OfBase], int]:
    """Packs the turns of episodes into rows, by base; also returns the number of blocks.

    Args:
        owners: the adapter of each agent, among those of its base; None: its turns are left out.
        shards: the rows of a microbatch are a multiple of this.
        seed: decides which episodes are in one minibatch.
        share: data of a row share their prefixes.
        configs: of each base; by default shared prefixes have any length, and the width is 2048.
        bases: the base of each agent; by default all are on ``main``.
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
    loads = [_loads(of_base, level, len(episodes)) for of_base in data.values()]
    loads = loads or [np.ones((len(episodes), 1), int)]  # nobody acted whose turns are packed
    blocks = balance_blocks(np.concatenate(loads, axis=1), groups, blocks_of(config, groups), rng)

    def rows_of(base: str, of_base: Sequence[Datum]) -> PackedRows:
        model = configs.get(base)
        branches, d_model = (model.branches, model.d_model) if model else (1, 2048)
        return pack_rows(
            of_base, [data[base].of_episodes(block) for block in blocks], config.microbatch_tokens,
            shards=shards, rng=rng, branches=branches if share else 0, d_model=d_model,
        )  # fmt: skip

    parts = {b: OfBase(of_base, rows_of(b, of_base.data), None) for b, of_base in data.items()}
    for base, part in parts.items() if prompts else ():
        cut = rows_of(base, [datum.prompt() for datum in part.data.data])
        parts[base] = part._replace(prompts=cut)
    return parts, len(blocks)


def _loads(of_base: TeamData, level: Level, episodes: int) -> np.ndarray:
    """Decisions of each adapter, and tokens, of each episode, ``[E, adapters + 1]``.

    Minibatches should have about as many decisions of each adapter, as an optimiser step from a few
    decisions moves an adapter as far as a step from many.
    """
    adapters = 1 + max(datum.owner for datum in of_base.data)
    loads = np.zeros((episodes, adapters + 1), int)
    for datum, turns in zip(of_base.data, of_base.turns, strict=True):
        e, _ = turns[0]
        loads[e, datum.owner] += len(turns) if level == "action" else len(datum.targets)
        loads[e, -1] += len(datum.ids)
    return loads
