"""Chains: decisions in acting order, one row for each episode, or for each player of a game."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from marft_jax.types import Episode, Level, Turn

TurnKey: TypeAlias = tuple[int, int]
"""(number of an episode, number of a turn in it)."""


class OfTurn(NamedTuple):
    """Facts about the turn of each link. A branch's turn has the place of its trunk's turn.

    Attributes:
        number_EJ: number of the turn in its episode.
        agent_EJ: who acted.
        agent_turn_EJ: number of the turn among the agent's in the episode, from 0.
        layer_EJ: number of the turn's layer in the episode.
        truncated_EJ: 1 where the action stopped at its token limit.
        solo_return_EJ: mean return of the agent alone on the task; NaN where it is unknown.
    """

    number_EJ: np.ndarray
    agent_EJ: np.ndarray
    agent_turn_EJ: np.ndarray
    layer_EJ: np.ndarray
    truncated_EJ: np.ndarray
    solo_return_EJ: np.ndarray


class Origin(NamedTuple):
    """Where each chain comes from.

    Attributes:
        episode_E: number of the episode.
        group_E: number of the group: the chains of one player with the same task.
        player_E: number of the player that is paid; 0 of a team.
        trunk_E: number of the chain that this one is a branch of; of a trunk its own.
        branch_E: turn of the trunk that is sampled anew; -1 of a trunk.
    """

    episode_E: np.ndarray
    group_E: np.ndarray
    player_E: np.ndarray
    trunk_E: np.ndarray
    branch_E: np.ndarray


class Chain(NamedTuple):
    """Decisions in acting order, and what is known of each.

    Attributes:
        mask_EJ: 1 for links, 0 for padding.
        weight_EJ: 1 / the links of its turn, so that each turn adds up to 1.
        rewards_EJ: reward of each link; a turn's reward is at its last link.
        kl_EJ: the KL penalty that was subtracted from the reward.
        kl_noise_E: what a chain's penalties are with log-probs that miss by a rounding.
        turn: facts about the turns.
        origin: facts about the chains.
        turns: the turns, laid end to end.
        lengths: number of the links of each.
    """

    mask_EJ: np.ndarray
    weight_EJ: np.ndarray
    rewards_EJ: np.ndarray
    kl_EJ: np.ndarray
    kl_noise_E: np.ndarray
    turn: OfTurn
    origin: Origin
    turns: Sequence[TurnKey]
    lengths: Sequence[int]

    def in_order(self, of_turns: Mapping[TurnKey, np.ndarray]) -> list[np.ndarray]:
        """Numbers of each turn, in acting order."""
        return [of_turns[turn] for turn in self.turns]

    def lay(self, in_order: Sequence[np.ndarray]) -> np.ndarray:
        """Lays the numbers of each turn's links end to end, ``float64 [E, J]``; 0 for padding."""
        x_EJ = np.zeros(self.mask_EJ.shape)
        x_EJ[self.mask_EJ > 0] = np.concatenate(in_order)
        return x_EJ

    def by_turn(self, x_EJ: np.ndarray) -> dict[TurnKey, np.ndarray]:
        """Numbers of each turn's links."""
        parts = np.split(x_EJ[self.mask_EJ > 0], np.cumsum(self.lengths)[:-1])
        return dict(zip(self.turns, parts, strict=True))

    def agent_means(self, in_order: Sequence[np.ndarray], agents: int) -> np.ndarray:
        """Means over the numbers of each agent's turns, ``[P]``; 0 without any."""
        first = np.cumsum(self.lengths) - np.asarray(self.lengths)
        acted = np.asarray(self.agent_EJ)[self.mask_EJ > 0][first]
        total_P = np.bincount(acted, [x.sum() for x in in_order], agents)
        return total_P / np.maximum(np.bincount(acted, list(map(len, in_order)), agents), 1)

    @property
    def agent_EJ(self) -> np.ndarray:
        """Who acted."""
        return self.turn.agent_EJ

    @property
    def group_EJ(self) -> np.ndarray:
        """Group of each link's chain."""
        return np.broadcast_to(self.origin.group_E[:, None], self.mask_EJ.shape)

    @property
    def player_EJ(self) -> np.ndarray:
        """Player of each link's chain."""
        return np.broadcast_to(self.origin.player_E[:, None], self.mask_EJ.shape)

    @property
    def place_EJ(self) -> np.ndarray:
        """Number of the place (agent, n) of each link's turn: the agent's n-th turn."""
        return self.turn.agent_turn_EJ * (np.max(self.agent_EJ) + 1) + self.agent_EJ


def make_chain(episodes: Sequence[Episode], rewards: Sequence[np.ndarray], level: Level) -> Chain:
    """Lays the turns' decisions end to end.

    Args:
        episodes: finished episodes.
        rewards: of the turns of each episode.
        level: what a decision is: a turn, or a token of its action.
    """
    chains = chains_of(episodes)
    lengths = [
        [len(episodes[e].turns[k].action) if level == "token" else 1 for k in turns]
        for e, turns in chains
    ]
    mask_EJ = _rows([[1.0] * sum(row) for row in lengths])

    def links(of_turns: Sequence[Sequence[float]]) -> np.ndarray:
        """A number of each turn, at each of its links."""
        return _rows(list(map(np.repeat, of_turns, lengths)))

    rewards_EJ = np.zeros_like(mask_EJ)
    for i, (e, turns) in enumerate(chains):
        rewards_EJ[i, np.cumsum(lengths[i]) - 1] = np.asarray(rewards[e])[turns]
    origin = _origin(episodes, chains)
    facts = _facts(episodes, chains, origin)
    return Chain(
        mask_EJ=mask_EJ,
        weight_EJ=links([[1 / n for n in row] for row in lengths]),
        rewards_EJ=rewards_EJ,
        kl_EJ=np.zeros_like(mask_EJ),
        kl_noise_E=np.zeros(len(mask_EJ)),
        turn=OfTurn(*(links([[fact[n] for fact in row] for row in facts]) for n in range(6))),
        origin=origin,
        turns=[(e, k) for e, turns in chains for k in turns],
        lengths=[n for row in lengths for n in row],
    )


def chains_of(episodes: Sequence[Episode]) -> list[tuple[int, list[int]]]:
    """(episode, its turns) of each chain: the turns of one player, in acting order."""
    return [
        (e, [k for k, turn in enumerate(x.turns) if turn.player == player])
        for e, x in enumerate(episodes)
        for player in dict.fromkeys(turn.player for turn in x.turns)
    ]


def layers_of(turns: Sequence[Turn], numbers: Sequence[int]) -> list[int]:
    """Numbers the layers of a chain: turns in a row, of one step, none of which saw another.

    Args:
        numbers: of the turns in their episode.
    """
    layers, first = list[int](), 0
    for n, (k, turn) in enumerate(zip(numbers, turns, strict=True)):
        begins = n > 0 and (turn.step != turns[n - 1].step or any(i >= first for i in turn.sees))
        first = k if begins or not n else first
        layers.append(layers[-1] + begins if layers else 0)
    return layers


def _origin(episodes: Sequence[Episode], chains: Sequence[tuple[int, Sequence[int]]]) -> Origin:
    """Finds the group, the player and the trunk of each chain."""
    of = [(episodes[e], episodes[e].turns[turns[0]].player) for e, turns in chains]
    branches = [episode.branch for episode, _ in of]
    keys = [(*episode[:3], player) for episode, player in of]
    trunks = {key: i for i, key in enumerate(keys) if branches[i] is None}
    trunk = [i if branches[i] is None else trunks[key] for i, key in enumerate(keys)]
    return Origin(
        episode_E=np.asarray([e for e, _ in chains]),
        group_E=_numbered([(episode.group, player) for episode, player in of]),
        player_E=_numbered([player for _, player in of]),
        trunk_E=np.asarray(trunk),
        branch_E=np.asarray([-1 if branch is None else branch[0] for branch in branches]),
    )


def _facts(
    episodes: Sequence[Episode], chains: Sequence[tuple[int, Sequence[int]]], origin: Origin
) -> list[list[tuple[float, ...]]]:
    """Facts about each turn of each chain, in the order of ``OfTurn``."""
    facts = []
    for i, (e, turns) in enumerate(chains):
        home, whole = chains[origin.trunk_E[i]]
        trunk, first = episodes[home], max(0, int(origin.branch_E[i]))
        layers = dict(zip(whole, layers_of([trunk.turns[k] for k in whole], whole), strict=True))
        places, row = trunk.places, list[tuple[float, ...]]()
        for k in turns:
            turn, number = episodes[e].turns[k], first + k
            solo_return = episodes[e].alone.get(turn.agent, math.nan)
            row.append((number, *places[number], layers[number], turn.truncated, solo_return))
        facts.append(row)
    return facts


def _numbered(labels: Sequence[Any]) -> np.ndarray:
    """Numbers of labels, from 0 in the order in which they first appear."""
    numbers = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    return np.asarray([numbers[label] for label in labels])


def _rows(rows: Sequence[Any]) -> np.ndarray:
    """Rows of numbers, of unlike lengths, as one array of 32 bits, padded with 0."""
    dtype = np.float32 if np.asarray(rows[0]).dtype.kind == "f" else np.int32
    x = np.zeros((len(rows), max(map(len, rows))), dtype)
    for i, row in enumerate(rows):
        x[i, : len(row)] = row
    return x
