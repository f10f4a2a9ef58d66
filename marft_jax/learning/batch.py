"""Batches: the episodes of a training step as data in packed rows, and the chain of decisions.

The data of each base are packed into rows (``packing.py``, ``rows.py``), rows into microbatches,
microbatches into blocks with about as many decisions of each adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from marft_jax import random_keys
from marft_jax.config import Update
from marft_jax.learning.chain import Chain, make_chain
from marft_jax.policy.data import Datum, TeamData, data_of
from marft_jax.policy.packing import Packed, balance_blocks, pack
from marft_jax.policy.rows import Level, Rows
from marft_jax.random_keys import Stream
from marft_jax.sampling.constraints import Constraint
from marft_jax.types import MAIN, Episode, Turn


class Prompts(NamedTuple):
    """Rows up to the last prompt token of each datum: all that the value of an action reads.

    Attributes:
        rows: packed on their own; their microbatches belong to no minibatch.
        flat_UBK: for each turn of the batch's rows, its flat position among the turns of ``rows``.
    """

    rows: Rows[np.ndarray]
    flat_UBK: np.ndarray


class PackedTurns(NamedTuple):
    """Turns of episodes in rows.

    Attributes:
        level: what a decision is.
        rows: of each base whose agents acted.
        places: flat positions in ``rows`` of the decisions of each base's data, in their order.
        prefix_shared: tokens that data share with others of their row.
        blocks: sets of as many consecutive microbatches of each base, with about as many decisions
            of each adapter; a multiple of the minibatches.
        prompts: of each base, for a critic that reads no more than these.
    """

    level: Level
    rows: dict[str, Rows[np.ndarray]]
    places: dict[str, np.ndarray]
    prefix_shared: int
    blocks: int
    prompts: dict[str, Prompts] | None


class Batch(NamedTuple):
    """Everything that one training step learns from.

    Attributes:
        level, rows, places, prefix_shared, blocks, prompts: as of ``PackedTurns``.
        chain: the decisions in acting order.
        taught: the same actions behind the prompts that their teachers read; the links of agents
            without a teacher are padding. See ``teaching.py``.
    """

    level: Level
    rows: dict[str, Rows[np.ndarray]]
    places: dict[str, np.ndarray]
    prefix_shared: int
    blocks: int
    prompts: dict[str, Prompts] | None
    chain: Chain
    taught: Batch | None = None

    def gather(self, by_base: Mapping[str, np.ndarray]) -> np.ndarray:
        """Numbers of decisions in acting order, ``float64 [E, J]``; 0 for padding.

        Args:
            by_base: numbers of the decisions in the rows of each base, ``[U, B, X]``.
        """
        of_data = [by_base[base].reshape(-1)[own] for base, own in self.places.items()]
        flat = np.concatenate([*of_data, [0.0]]).astype(np.float64)  # also where nothing is packed
        return np.where(self.chain.mask_EJ > 0, flat[self.chain.number_EJ], 0)

    def scatter(self, x_EJ: np.ndarray) -> dict[str, np.ndarray]:
        """Numbers of links where their decisions stand in the rows of each base,
        ``float32 [U, B, X]``; 0 for padding."""
        is_link_EJ, found = self.chain.mask_EJ > 0, dict[str, np.ndarray]()
        flat = np.zeros(sum(map(len, self.places.values())), np.float32)
        flat[self.chain.number_EJ[is_link_EJ]] = x_EJ[is_link_EJ]
        for base, own in self.places.items():
            found[base] = np.zeros(self.rows[base].decision_mask(self.level).shape, np.float32)
            found[base].flat[own], flat = flat[: len(own)], flat[len(own) :]
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
    packed, numbers = pack_turns(episodes, owners, config, level, **how)
    return Batch(*packed, make_chain(episodes, rewards, numbers))


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
) -> tuple[PackedTurns, dict[tuple[int, int], range]]:
    """Packs the turns of episodes into rows.

    Args:
        owners: the adapter of each agent, among those of its base; None: its turns are left out.
        shards: the rows of a microbatch are a multiple of this.
        seed: decides which episodes are in one minibatch.
        share: data of a row share their prefixes.
        branches: of each base, by default 1: these are a multiple of so many tokens.
        bases: the base of each agent; by default all are on ``main``.
        d_models: width of each base, by default 2048; the rows of a narrow base are less wide.
        prompts: packs the prompts on their own too; decisions are actions.

    Returns:
        The rows, and the numbers of the decisions of each (episode, turn) among those of all data.
    """
    on = [MAIN] * len(owners) if bases is None else bases
    of_base = dict[str, TeamData]()
    for base in dict.fromkeys(on):
        of_agents = zip(on, owners, strict=True)
        own = {i: n for i, (name, n) in enumerate(of_agents) if name == base and n is not None}
        if (found := data_of(episodes, own, config.ratio, constraint)).data:
            of_base[base] = found
    run_seed, *draw = seed
    rng = random_keys.generator(run_seed, Stream.ROWS, *draw)
    groups = [episode.group for episode in episodes]
    loads = [_loads(own, level, len(episodes)) for own in of_base.values()]
    loads = loads or [np.ones((len(episodes), 1), int)]  # nobody acted whose turns are packed
    blocks = balance_blocks(np.concatenate(loads, axis=1), groups, _blocks(config, groups), rng)

    def rows_of(base: str, data: Sequence[Datum], blocks: Sequence[Sequence[int]]) -> Packed:
        return pack(
            data, blocks, config.microbatch_tokens, shards=shards, rng=rng,
            branches=(branches or {}).get(base, 1) if share else 0,
            d_model=(d_models or {}).get(base, 2048),
        )  # fmt: skip

    packed = {
        base: rows_of(base, own.data, [own.of_episodes(block) for block in blocks])
        for base, own in of_base.items()
    }
    cut = dict[str, Prompts]()
    for base, own in of_base.items() if prompts else ():
        asked = rows_of(base, [datum.prompt() for datum in own.data], [range(len(own.data))])
        flat_UBK = np.zeros_like(packed[base].rows.turns.prompt_end_BK)
        flat_UBK.flat[packed[base].units] = asked.units
        cut[base] = Prompts(asked.rows, flat_UBK)
    turns = PackedTurns(
        level,
        rows={base: own.rows for base, own in packed.items()},
        places={base: own.places(level) for base, own in packed.items()},
        prefix_shared=sum(own.prefix_shared for own in packed.values()),
        blocks=len(blocks),
        prompts=cut if prompts else None,
    )
    return turns, _numbers(of_base.values(), level)


def _numbers(data: Iterable[TeamData], level: Level) -> dict[tuple[int, int], range]:
    """Numbers of the decisions of each (episode, turn) among those of all data."""
    found, end = dict[tuple[int, int], range](), 0
    for own in data:
        for datum, turns in zip(own.data, own.turns, strict=True):
            counts = [1] * len(turns) if level == "action" else np.bincount(datum.units).tolist()
            for turn, count in zip(turns, counts, strict=True):
                found[turn] = range(end, end + count)
                end += count
    return found


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
