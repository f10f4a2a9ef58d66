"""Data of a team: all that knows episodes ends here.

The turns of an adapter become token sequences (``policy/data.py``); what a pass finds of these
comes back by turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from marft_jax.learning.chain import TurnKey
from marft_jax.policy.data import Datum
from marft_jax.policy.forbidden import forbidden_by
from marft_jax.sampling.constraints import Constraint, masks_of
from marft_jax.types import Episode, Level, Turn


class TeamData(NamedTuple):
    """Data of a team on one base.

    Attributes:
        data: the nested turns of an episode are one datum, its units.
        turns: (episode, turn) of each unit of each datum.
    """

    data: list[Datum]
    turns: list[list[TurnKey]]

    def by_turn(self, of_data: Sequence[np.ndarray], level: Level) -> dict[TurnKey, np.ndarray]:
        """Numbers of each turn, from those of each datum: of its units (``action``), or of its
        learned tokens (``token``)."""
        numbers = dict[TurnKey, np.ndarray]()
        for datum, turns, x in zip(self.data, self.turns, of_data, strict=True):
            counts = np.bincount(datum.units) if level == "token" else np.ones(len(turns), int)
            numbers |= dict(zip(turns, np.split(x, np.cumsum(counts)[:-1]), strict=True))
        return numbers

    def by_datum(self, of_turns: Mapping[TurnKey, np.ndarray]) -> list[np.ndarray]:
        """Numbers of each datum, from those of each turn."""
        return [np.concatenate([of_turns[turn] for turn in turns]) for turns in self.turns]

    def of_episodes(self, block: Collection[int]) -> list[int]:
        """Numbers of the data of these episodes."""
        chosen = {*block}
        return [i for i, [(e, _), *_] in enumerate(self.turns) if e in chosen]


def data_of(
    episodes: Sequence[Episode],
    owners: Mapping[int, int],
    ratio: str,
    constraint: Callable[[Turn], Constraint | None] = lambda turn: None,
) -> TeamData:
    """Makes the data of the agents on one base; a turn that continues an earlier turn of its
    adapter is in the same datum.

    Args:
        owners: the adapter of each agent; turns of other agents are left out.
        ratio: ``algo.ratio``, which says what a unit's log-prob is divided by.
        constraint: what a turn was sampled under.
    """
    of_team = TeamData([], [])
    for e, episode in enumerate(episodes):
        for numbers in _nested(episode, owners):
            turns = [episode.turns[k] for k in numbers]
            allowed = [masks_of(constraint(turn), turn.action.tolist()) for turn in turns]
            datum = _datum(turns, owners, ratio)
            of_team.data.append(datum._replace(forbidden=forbidden_by(itertools.chain(*allowed))))
            of_team.turns.append([(e, k) for k in numbers])
    return of_team


def _nested(episode: Episode, owners: Mapping[int, int]) -> list[list[int]]:
    """Numbers of turns of one adapter, each of which begins with all tokens of the one before."""
    nested, ends = list[list[int]](), list[tuple[int, np.ndarray]]()
    for k, turn in enumerate(episode.turns):
        if turn.agent not in owners:
            continue
        owner, prompt = owners[turn.agent], turn.prompt
        end = owner, np.concatenate([prompt, turn.action])
        for i, (known, ids) in enumerate(ends):
            if known == owner and np.array_equal(ids, prompt[: len(ids)]):
                nested[i].append(k)
                ends[i] = end
                break
        else:
            nested.append([k])
            ends.append(end)
    return nested


def _datum(turns: Sequence[Turn], owners: Mapping[int, int], ratio: str) -> Datum:
    last, lengths = turns[-1], [len(turn.action) for turn in turns]
    ids = np.concatenate([last.prompt, last.action])[:-1]
    labels, begin = np.full(len(ids), last.agent), 0
    for turn in turns[:-1]:  # a token leads to the turn that follows it
        end = len(turn.prompt) + len(turn.action) - 1
        labels[begin:end], begin = turn.agent, end
    words = [max(1, len(turn.text.split())) for turn in turns]
    return Datum(
        owner=owners[last.agent],
        ids=ids,
        positions=np.concatenate([len(t.prompt) - 1 + np.arange(len(t.action)) for t in turns]),
        targets=np.concatenate([turn.action for turn in turns]),
        logprobs=np.concatenate([turn.logprobs for turn in turns]),
        temperature=np.repeat([turn.temperature for turn in turns], lengths),
        units=np.repeat(np.arange(len(turns)), lengths),
        divisors=np.asarray({"sum": [1] * len(turns), "token": lengths, "word": words}[ratio]),
        labels=labels,
    )
