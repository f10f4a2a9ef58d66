"""Episodes to packed rows.

A turn is prompt ids and action ids with an owner. Turns of one owner whose token sequences are
nested (the later prompt begins with the earlier prompt and action) become one sequence. Sequences
are packed into rows of equal length, several to a row. Those of a row may share a prefix (samples
of one task, turns with one system prompt): it stands there once, what each goes on with stands
after it, and every token reads what it would read on its own. Only action tokens carry a loss.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

import jax
import numpy as np

from marft_jax import random_keys
from marft_jax.config import Algo
from marft_jax.learning.credit import size_of
from marft_jax.learning.packing import TokenSequence, action_slots, deal, layout, nest
from marft_jax.parallel.ladder import bucket
from marft_jax.random_keys import Stream
from marft_jax.types import Episode, Turn

Level = Literal["action", "token"]
Array = TypeVar("Array", bound=np.ndarray | jax.Array)


class Rows(NamedTuple, Generic[Array]):
    """Packed sequences, in B rows of a microbatch; a batch's arrays have an axis U before B.

    ``Rows[np.ndarray]`` lie on the host, ``Rows[jax.Array]`` on the device.
    """

    tokens_BT: Array  # token ids
    positions_BT: Array  # their positions within their sequence
    until_BT: Array  # where the last token stands that may read this one; those before never do
    owners_BT: Array  # the adapter of each token, -1 for padding
    agents_BT: Array  # whose turn the token leads to or belongs to, -1 for padding
    index_BA: Array  # where in the row the token stands that predicts action token a
    targets_BA: Array  # the action tokens
    mask_BA: Array  # 1 for action tokens, 0 for padding
    behaviour_BA: Array  # behaviour log-probs
    temperature_BA: Array  # the temperature they were sampled at
    turn_BA: Array  # which turn of the row the action token belongs to
    first_BK: Array  # where in the row the last prompt token of turn k stands
    turn_mask_BK: Array  # 1 for turns, 0 for padding
    agent_BK: Array  # who acted
    owner_BK: Array  # through which adapter
    divisor_BK: Array  # what an action's log-prob is divided by (1, its tokens or its words)
    tokens_BK: Array  # action tokens of the turn (1 for padding)


class Chain(NamedTuple):
    """Decisions in acting order, as links to the rows.

    A chain is of an episode, where all agents are paid alike; in a game, of each of its players.
    """

    flat_EJ: np.ndarray  # flat position in [U, B, K] (action level) or [U, B, A] (token level)
    mask_EJ: np.ndarray  # 1 for links, 0 for padding
    rewards_EJ: np.ndarray  # reward of each link; a turn's reward sits on its last token
    kl_EJ: np.ndarray  # the KL penalty that the reward contains: it was subtracted
    continues_EJ: np.ndarray  # 1 where another link of the episode follows
    weight_EJ: np.ndarray  # 1 / the links of its turn, so that each turn adds up to one
    alone_EJ: np.ndarray  # what its agent earns alone on the task; NaN where nobody knows
    agent_EJ: np.ndarray  # who acted
    player_EJ: np.ndarray  # number of the player that it pays; 0 of a team
    group_EJ: np.ndarray  # number of the group: chains of one player, with the same task
    nth_EJ: np.ndarray  # number of its turn among the agent's in the episode, from 0
    turn_EJ: np.ndarray  # number of its turn in the episode
    layer_EJ: np.ndarray  # number of its turn's layer in the episode
    cut_EJ: np.ndarray  # 1 where its turn stopped at its token limit
    trunk_E: np.ndarray  # number of the chain that it is a branch of; its own of a trunk
    branch_E: np.ndarray  # the turn of the trunk that it is another sample of; -1 of a trunk
    episode_E: np.ndarray  # number of the episode
    size_E: np.ndarray  # what the chain's rewards were added up from, in absolute values
    shape_UBX: tuple[int, ...]  # of the rows that the decisions stand in

    @property
    def place_EJ(self) -> np.ndarray:
        """Number of the place (agent, n) of each link's turn, the agent's n-th one."""
        return self.nth_EJ * (np.max(self.agent_EJ) + 1) + self.agent_EJ


class Prompts(NamedTuple):
    """Rows up to the last prompt token of each sequence: all that an action's value reads."""

    rows: Rows[np.ndarray]  # packed on their own, in microbatches of no minibatch
    flat_UBK: np.ndarray  # flat position among their turns of each turn of the batch's rows


class Batch(NamedTuple):
    """Everything that one training step learns from."""

    rows: Rows[np.ndarray]
    chain: Chain
    prefix_shared: int  # tokens that sequences share with others of their row
    # sets of as many microbatches, in their order, with about as many decisions of each adapter;
    # a multiple of the minibatches
    blocks: int
    prompts: Prompts | None = None  # for a critic that needs no more than these


def build(
    episodes: Sequence[Episode],
    rewards: Sequence[np.ndarray],
    owners: Sequence[int],
    config: Algo,
    level: Level,
    *,
    shards: int = 1,
    seed: Sequence[int] = (0,),
    share: bool = False,
    d_model: int = 2048,
    prompts: bool = False,
) -> Batch:
    """Packs episodes for the learner.

    Args:
        episodes: finished episodes; may be fewer than ``config.episodes``, if some failed.
        rewards: float32 ``[turns]`` for each.
        owners: the adapter of each agent.
        shards: the rows of a microbatch are a multiple of this.
        seed: decides which episodes share a minibatch.
        share: sequences of a row share their prefixes.
        d_model: of the model that reads them: a narrow one has rows made less wide.
        prompts: packs these on their own too; decisions are actions.
    """
    sequences_E = [nest(e, episode, owners) for e, episode in enumerate(episodes)]
    run_seed, *draw = seed
    rng = random_keys.generator(run_seed, Stream.ROWS, *draw)
    groups = [episode.group for episode in episodes]
    dealt = deal(_loads(sequences_E, level), groups, _blocks(config, groups), rng)
    pack = functools.partial(
        _pack, episodes, config, level=level, shards=shards, rng=rng, share=share, d_model=d_model
    )
    whole = pack([[s for e in block for s in sequences_E[e]] for block in dealt])
    kind = whole.rows.turn_mask_BK if level == "action" else whole.rows.mask_BA
    chain = _chain(episodes, rewards, whole.flat, kind.shape, config)
    batch = Batch(whole.rows, chain, whole.prefix_shared, len(dealt))
    if not prompts:
        return batch
    cut = pack([[s.prompt() for sequences in sequences_E for s in sequences]])
    flat_UBK = np.zeros_like(whole.rows.first_BK)
    for turn, [place] in whole.flat.items():
        flat_UBK.flat[place] = cut.flat[turn][0]
    return batch._replace(prompts=Prompts(cut.rows, flat_UBK))


def microbatches(rows: Rows[np.ndarray]) -> list[Rows[np.ndarray]]:
    """Splits the rows of a batch along the axis U."""
    return [Rows(*(x[u] for x in rows)) for u in range(len(rows.tokens_BT))]


def _blocks(config: Algo, groups: Sequence[int]) -> int:
    """Blocks of a batch: one for each minibatch; or two, so that epochs put other ones together,
    where groups need not be divided for it and blocks are of about as many episodes."""
    n = config.minibatches
    even = len(groups) % (2 * n) == 0 or len(groups) >= 16 * n
    return 2 * n if n > 1 and config.epochs > 1 and len(set(groups)) >= 2 * n and even else n


def _loads(sequences_E: Sequence[Sequence[TokenSequence]], level: Level) -> np.ndarray:
    """Loads of each episode that minibatches should have about as much of: decisions of each
    adapter, as an optimiser step from a few of them would move it as far as one from many, and
    tokens; ``[E, adapters + 1]``."""
    adapters = 1 + max(s.owner for sequences in sequences_E for s in sequences)
    loads = np.zeros((len(sequences_E), adapters + 1), int)
    for e, sequences in enumerate(sequences_E):
        for s in sequences:
            loads[e, s.owner] += len(s.acted) if level == "action" else sum(s.acted)
            loads[e, -1] += s.read
    return loads


class _Packed(NamedTuple):
    """Rows, the flat positions of each turn's decisions by (episode, turn), and as of ``Batch``."""

    rows: Rows[np.ndarray]
    flat: dict[tuple[int, int], range]
    prefix_shared: int


def _pack(
    episodes: Sequence[Episode],
    config: Algo,
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
    turns = [[n for s in row for n in s.acted] for rows in packed for row in rows]
    sizes = {
        "T": width,
        "A": action_slots(max(map(sum, turns))),
        "K": bucket(max(map(len, turns)), least=16, rungs=1),
    }
    rows, flat = _empty_rows((len(blocks) * passes, height), sizes), {}
    for first, of_block in zip(itertools.count(step=passes), packed):
        for i, row in enumerate(rng.permutation(len(of_block))):
            at = first + i % passes, i // passes
            flat |= _fill(rows, at, of_block[row], episodes, share, config.ratio, level)
    filled = int((rows.owners_BT >= 0).sum())
    return _Packed(rows, flat, sum(s.read for block in blocks for s in block) - filled)


_PADDING: dict[str, float] = dict(  # where it is not 0; a float makes an array of float32
    owners_BT=-1,
    agents_BT=-1,
    mask_BA=0.0,
    behaviour_BA=0.0,
    temperature_BA=1.0,
    turn_mask_BK=0.0,
    divisor_BK=1.0,
    tokens_BK=1.0,
)


def _empty_rows(shape: tuple[int, int], sizes: dict[str, int]) -> Rows[np.ndarray]:
    """Makes rows of padding; ``sizes`` of the last dimension, by the letter of the name."""

    def padding(name: str) -> np.ndarray:
        fill = _PADDING.get(name, 0)
        dtype = np.float32 if isinstance(fill, float) else np.int32
        return np.full((*shape, sizes[name[-1]]), fill, dtype)

    rows = Rows(*map(padding, Rows._fields))
    rows.until_BT[:] = np.arange(sizes["T"])
    return rows


def _fill(
    rows: Rows[np.ndarray],
    at: tuple[int, int],
    sequences: list[TokenSequence],
    episodes: Sequence[Episode],
    share: bool,
    ratio: str,
    level: Level,
) -> dict[tuple[int, int], range]:
    """Writes one row, and returns the flat positions of its turns' decisions."""
    shape_UBX = (rows.turn_mask_BK if level == "action" else rows.mask_BA).shape
    row, flat = int(np.ravel_multi_index((*at, 0), shape_UBX)), {}
    end, a, k, place = 0, 0, 0, np.zeros(0, int)
    for i, s in enumerate(sequences):
        known = s.shared_with(sequences[i - 1]) if share and i else 0
        start, end = end, end + s.read - known
        place = np.concatenate([place[:known], np.arange(start, end)])
        new = np.s_[*at, start:end]
        rows.tokens_BT[new] = s.ids[known:-1]
        rows.positions_BT[new] = np.arange(known, s.read)
        rows.owners_BT[new] = s.owner
        rows.agents_BT[new] = s.agents[known:-1]
        rows.until_BT[*at, place] = end - 1
        for (e, nth), first, n in zip(s.spans, s.starts, s.acted, strict=True):
            turn, span, one = episodes[e].turns[nth], np.s_[*at, a : a + n], (*at, k)
            rows.index_BA[span] = place[first - 1 : first - 1 + n]
            rows.targets_BA[span] = turn.action[:n]
            rows.mask_BA[span] = 1
            rows.behaviour_BA[span] = turn.logprobs[:n]
            rows.temperature_BA[span] = turn.temperature
            rows.turn_BA[span] = k
            rows.first_BK[one] = place[first - 1]
            rows.turn_mask_BK[one] = 1
            rows.agent_BK[one] = turn.agent
            rows.owner_BK[one] = s.owner
            words = max(1, len(turn.text.split()))
            rows.divisor_BK[one] = {"sum": 1, "token": n, "word": words}[ratio]
            rows.tokens_BK[one] = n
            begin, length = (k, 1) if level == "action" else (a, n)
            flat[e, nth] = range(row + begin, row + begin + length)
            a, k = a + n, k + 1
    return flat


def chains_of(episodes: Sequence[Episode]) -> list[tuple[int, list[int]]]:
    """(episode, its turns) of each chain: the turns of one player, in acting order."""
    return [
        (e, [k for k, turn in enumerate(x.turns) if turn.player == player])
        for e, x in enumerate(episodes)
        for player in dict.fromkeys(turn.player for turn in x.turns)
    ]


def layers_of(turns: Sequence[Turn], numbers: Sequence[int] | None = None) -> list[int]:
    """Numbers the layers of a chain: turns in a row, of one step, none of which saw another.

    Args:
        numbers: of the turns in their episode; by default these are all.
    """
    layers, first = list[int](), 0
    numbers = range(len(turns)) if numbers is None else numbers
    for n, (k, turn) in enumerate(zip(numbers, turns, strict=True)):
        begins = n > 0 and (turn.step != turns[n - 1].step or any(i >= first for i in turn.sees))
        first = k if begins or not n else first
        layers.append(layers[-1] + begins if layers else 0)
    return layers


def trees_of(
    episodes: Sequence[Episode], chains: Sequence[tuple[int, Sequence[int]]]
) -> tuple[np.ndarray, np.ndarray]:
    """(trunk_E, branch_E) as of ``Chain``."""
    keys = [(*episodes[e][:3], episodes[e].turns[turns[0]].player) for e, turns in chains]
    trunks = {
        key: i for i, (key, (e, _)) in enumerate(zip(keys, chains, strict=True))
        if episodes[e].branch is None
    }  # fmt: skip
    branches = [episodes[e].branch for e, _ in chains]
    trunk_E = [i if branches[i] is None else trunks[key] for i, key in enumerate(keys)]
    return np.asarray(trunk_E), np.asarray([-1 if b is None else b[0] for b in branches])


def chain_of_turns(
    episodes: Sequence[Episode], rewards: Sequence[np.ndarray], algo: Algo | None = None
) -> Chain:
    """Links the turns of episodes that are not packed, each as one decision.

    Args:
        algo: the settings that credited the rewards; by default nothing was added to a reward.
    """
    one = {(e, k): range(1) for e, x in enumerate(episodes) for k in range(len(x.turns))}
    return _chain(episodes, rewards, one, (1, 1, 1), algo)


def _chain(
    episodes: Sequence[Episode],
    rewards: Sequence[np.ndarray],
    flat: Mapping[tuple[int, int], range],
    shape_UBX: tuple[int, ...],
    algo: Algo | None,
) -> Chain:
    """Lays the turns' decisions end to end, given their flat positions by (episode, turn)."""
    chains = chains_of(episodes)
    shape = len(chains), max(sum(len(flat[e, k]) for k in turns) for e, turns in chains)
    trunk_E, branch_E = trees_of(episodes, chains)
    chain = Chain(
        np.zeros(shape, np.int32),
        *(np.zeros(shape, np.float32) for _ in range(6)),  # pyright: ignore[reportCallIssue]
        *(np.zeros(shape, np.int32) for _ in range(7)),
        episode_E=np.asarray([e for e, _ in chains]),
        trunk_E=trunk_E,
        branch_E=branch_E,
        size_E=np.asarray([size_of(episodes[e], algo) if algo else 0.0 for e, _ in chains]),
        shape_UBX=shape_UBX,
    )
    groups: dict[tuple[int, str], int] = {}
    players = {"": 0}
    for i, (e, numbers) in enumerate(chains):
        episode, end = episodes[e], 0
        home, own = chains[chain.trunk_E[i]]  # where the turn of a branch has its place
        trunk, first = episodes[home], max(0, int(chain.branch_E[i]))
        places = trunk.places
        layers = dict(zip(own, layers_of([trunk.turns[k] for k in own], own), strict=True))
        player = episode.turns[numbers[0]].player
        group = groups.setdefault((episode.group, player), len(groups))
        for k in numbers:
            turn, at = episode.turns[k], first + k
            start, end = end, end + len(flat[e, k])
            span = np.s_[i, start:end]
            chain.flat_EJ[span] = flat[e, k]
            chain.weight_EJ[span] = 1 / (end - start)
            chain.rewards_EJ[i, end - 1] = rewards[e][k]
            chain.alone_EJ[span] = episode.alone.get(turn.agent, np.nan)
            chain.agent_EJ[span], chain.nth_EJ[span] = places[at]
            chain.player_EJ[span] = players.setdefault(player, len(players))
            chain.group_EJ[span], chain.turn_EJ[span] = group, at
            chain.layer_EJ[span], chain.cut_EJ[span] = layers[at], turn.truncated
        chain.mask_EJ[i, :end] = 1
        chain.continues_EJ[i, : end - 1] = 1
    return chain
