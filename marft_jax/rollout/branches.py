"""Further samples that the credit of a step compares with: of single turns, or of agents alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from marft_jax import random_keys
from marft_jax.errors import EpisodesFailed
from marft_jax.settings.config import Algo, Branching, Config
from marft_jax.types import Branch, Credit, Episode, FailedEpisode, Played, Player, Sample

_FEW = 0.25  # share of a step's samples; a play of no more samples than that may fail as a whole

_Play = Callable[[Sequence[Sample]], Played]


def play_samples(
    rollout: Player, credit: Credit, samples: Sequence[Sample], config: Config, step: int
) -> Iterator[Played]:
    """Plays the samples of a step, and the branches or samples of agents alone that its credit
    compares them with.

    With ``algo.branch_budget`` only the first groups are played: first one group, and then as many
    more as the budget allows, estimated from what the groups before have cost.

    Args:
        samples: samples of the step, those of a group in a row.
        step: number of the attempt at the step.
    """
    size, branching = config.algo.part(Algo).group_size, config.algo.part(Branching)
    kind = _solo if credit.solo else _best if branching.branch_continue == "best" else _plain

    def play(some: Sequence[Sample]) -> Played:
        try:
            return rollout.play(some, step) if some else Played([], [])
        except EpisodesFailed as error:
            if len(some) > _FEW * len(samples):
                raise
            return Played([], [FailedEpisode(*sample[:3], str(error)) for sample in some])

    end, episodes = 0, list[Episode]()
    while end < len(samples):
        start, end = end, len(samples)
        if branching.branches and branching.branch_budget != "none":
            room = _room(episodes, len(samples), branching.branch_budget) if episodes else size
            end = min(start + room - room % size, end)
        if start == end:
            break
        for part in kind(play, credit, samples[start:end], config, step):
            episodes += part.episodes
            yield part
    if not episodes:
        raise EpisodesFailed("all episodes of the step failed, see the log")


def _room(episodes: Sequence[Episode], samples: int, budget: str) -> int:
    """Estimates how many more samples fit into a budget: the cost of ``samples`` trunks without
    branches, in episodes or in sampled tokens."""
    tokens = [sum(len(t.action) for t in e.turns if not t.replayed) for e in episodes]
    costs = np.asarray([1] * len(episodes) if budget == "leaves" else tokens)
    is_trunk = np.asarray([e.branch is None for e in episodes])
    left = samples * costs[is_trunk].mean() - costs.sum()
    return max(0, int(left / (costs.sum() / is_trunk.sum()) + 1e-6))


def _plain(
    play: _Play, credit: Credit, samples: Sequence[Sample], config: Config, step: int
) -> Iterator[Played]:
    """Plays samples, and then ``algo.branches`` further samples of some of their turns.

    With ``algo.branch_continue random`` a branch ends with its step. All samples of a turn are
    drawn alike, so the trunk is a random one of them, and the trunk is played on.
    """
    trunks = play(samples)
    yield trunks
    branching = config.algo.part(Branching)
    count, stops = branching.branches, branching.branch_continue == "random"
    chosen = [(e, turn) for e in trunks.episodes for turn in branched_turns(e, config, step)]
    yield play([b for e, turn in chosen for b in _branches(e, turn, count, stops)])


def _best(
    play: _Play, credit: Credit, samples: Sequence[Sample], config: Config, step: int
) -> Iterator[Played]:
    """Plays turn by turn, and goes on with the best sample of each turn.

    Each sample of a turn is played to the end of its step. The sample with the highest reward of
    its own step becomes the trunk; among equals, the first.

    Source: tree-structured sampling, AT-GRPO (arXiv 2510.11062, section 4.1).
    """
    trunks = {sample[:3]: Episode(*sample[:3], "", (), ()) for sample in samples}
    parts, over, lost = list[Played](), list[Episode](), list[Episode]()
    count = config.algo.part(Branching).branches
    for turn in itertools.count():
        stopped = [
            e for e in trunks.values() if len(e.turns) == turn and not (turn and e.results[-1].done)
        ]
        parts.append(play([Sample(*e[:3], Branch(e, turn, 0, True)) for e in stopped]))
        for e in parts[-1].episodes:
            trunks[e[:3]] = _as_trunk(e)._replace(paid=trunks[e[:3]].paid)
        for failed in parts[-1].failed:
            del trunks[failed[:3]]
        over += [e for e in trunks.values() if len(e.turns) == turn]
        trunks = {place: e for place, e in trunks.items() if len(e.turns) > turn}
        if not trunks:
            break
        chosen = [e for e in trunks.values() if turn in branched_turns(e, config, step)]
        parts.append(play([b for e in chosen for b in _branches(e, turn, count, True)]))
        for place, trunk in trunks.items():
            drawn = [trunk, *(e for e in parts[-1].episodes if e[:3] == place)]
            scores = [float(credit.pay(e)[turn]) for e in drawn]
            best = int(np.argmax(scores))
            winner = drawn.pop(best)
            if best:
                drawn[0] = _beaten(trunk, winner)
            lost += drawn
            trunks[place] = _as_trunk(winner)._replace(paid=(*trunk.paid, scores[best]))
    ended = {e[:3] for e in over}
    failed = [failed for part in parts for failed in part.failed]
    waited_s = sum(part.waited_s for part in parts)
    yield Played([*over, *(e for e in lost if e[:3] in ended)], failed, waited_s)


def _as_trunk(episode: Episode) -> Episode:
    turns = tuple(turn._replace(replayed=False) for turn in episode.turns)
    return episode._replace(turns=turns, branch=None)


def _beaten(trunk: Episode, winner: Episode) -> Episode:
    """The trunk as a branch of the branch that replaces it, some of whose turns it repeats."""
    pairs = zip(winner.places, winner.turns, strict=True)
    repeated = {place for place, turn in pairs if turn.replayed}
    turns = [
        turn._replace(replayed=place in repeated)
        for place, turn in zip(trunk.places, trunk.turns, strict=True)
    ]
    assert winner.branch is not None
    return trunk._replace(turns=tuple(turns), branch=(winner.branch[0], 0), paid=())


def _solo(
    play: _Play, credit: Credit, samples: Sequence[Sample], config: Config, step: int
) -> Iterator[Played]:
    """Plays samples, and ``algo.branches`` samples of each agent alone on each task. Each episode
    gets the mean reward that its agents earn alone (``Episode.alone``)."""
    team, size = play(samples), config.algo.part(Algo).group_size
    acted: dict[tuple[int, int], set[int]] = {}
    for e in team.episodes:
        acted.setdefault(e[:2], set()).update(turn.agent for turn in e.turns)
    most = max((agent + 1 for agents in acted.values() for agent in agents), default=0)
    alone = play([
        Sample(*task, size + number * most + agent, alone=agent)
        for task, agents in acted.items()
        for agent in sorted(agents)
        for number in range(config.algo.part(Branching).branches)
    ])  # fmt: skip
    earned: dict[tuple[int, int], dict[int, list[float]]] = {}
    for e in alone.episodes:
        _, agent = e.branch or (-1, 0)
        earned.setdefault(e[:2], {}).setdefault(agent, []).append(float(credit.pay(e).sum()))
    means = {
        task: {agent: sum(rewards) / len(rewards) for agent, rewards in of_agents.items()}
        for task, of_agents in earned.items()
    }
    yield team._replace(episodes=[e._replace(alone=means.get(e[:2], {})) for e in team.episodes])
    yield alone


def _branches(trunk: Episode, turn: int, count: int, stops: bool) -> list[Sample]:
    return [Sample(*trunk[:3], Branch(trunk, turn, n, stops)) for n in range(1, count + 1)]


def branched_turns(episode: Episode, config: Config, step: int) -> list[int]:
    """Chooses the turns of an episode that get branches; a function of seed, step and episode."""
    branching = config.algo.part(Branching)
    if not branching.branches:
        return []
    if branching.branch_at == "random":
        draw = (step, episode.index, episode.member)
        rng = random_keys.generator(config.run.seed, random_keys.Stream.BRANCHES, *draw)
        return [int(rng.integers(len(episode.turns)))]
    return turns_at(branching.branch_at, [turn.name for turn in episode.turns])


def turns_at(at: str, names: Sequence[str]) -> list[int]:
    """Lists the turns that ``algo.branch_at`` names: every turn, or the turns of some agents.

    Args:
        names: name of the agent of each turn.
    """
    agents = names if at == "every" else at.split(",")
    return [turn for turn, name in enumerate(names) if name in agents]


def learnable(
    played: Sequence[tuple[Episode, np.ndarray]], by_step: bool = False
) -> tuple[list[Episode], list[np.ndarray]]:
    """Selects the turns to learn from, with their rewards.

    A trunk keeps all turns. A branch keeps the turn that was sampled anew: earlier turns are the
    trunk's, and later turns have no siblings. Episodes of an agent alone are left out.

    Args:
        played: episodes, with the reward of each turn.
        by_step: a branch's turn has its own reward; otherwise all that its player earned in the
            branch.
    """
    episodes, rewards = list[Episode](), list[np.ndarray]()
    for episode, earned in played:
        if episode.branch is not None:
            turn = episode.branch[0]
            if turn < 0:
                continue
            anew = episode.turns[turn]._replace(sees=(), index=0)
            is_paid = [other.player == anew.player for other in episode.turns]
            episode = episode._replace(turns=(anew,))
            earned = earned[[turn]] if by_step else earned[is_paid].sum(keepdims=True)
        episodes.append(episode)
        rewards.append(earned)
    return episodes, rewards
