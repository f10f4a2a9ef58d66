"""Further samples that the credit of a step compares with: of single turns, or of agents alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from marft_jax import random_keys
from marft_jax.config import Config
from marft_jax.errors import EpisodesFailed
from marft_jax.types import Branch, Credit, Episode, FailedEpisode, Played, Player, Sample

_FEW = 0.25  # of the samples of a step: of a play of so few all may fail

_Play = Callable[[Sequence[Sample]], Played]


def play_samples(
    rollout: Player, credit: Credit, samples: Sequence[Sample], config: Config, step: int
) -> Iterator[Played]:
    """Plays the samples of a step, those of a group in a row, and what its credit compares with.

    With ``algo.branch_budget`` only the first groups: one, and then as many more as there is room
    for, going by what those before have cost.
    """
    algo = config.algo
    kind = _plain if algo.branch_continue != "best" else _best
    kind = _solo if credit.solo else kind

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
        if algo.branch_budget != "none":
            room = algo.group_size
            if episodes:
                room = _room(episodes, len(samples), algo.branch_budget)
            end = min(start + room - room % algo.group_size, end)
        if start == end:
            break
        for part in kind(play, credit, samples[start:end], config, step):
            episodes += part.episodes
            yield part
    if not episodes:
        raise EpisodesFailed("all episodes of the step failed, see the log")


def _room(episodes: Sequence[Episode], samples: int, budget: str) -> int:
    """How many more samples can be played for what so many cost without branches."""
    tokens = [[len(t.action) * (not t.replayed) for t in e.turns] for e in episodes]
    costs = np.asarray([1 if budget == "leaves" else sum(own) for own in tokens])
    is_trunk = np.asarray([e.branch is None for e in episodes])
    left = samples * costs[is_trunk].mean() - costs.sum()
    return max(0, int(left / (costs.sum() / is_trunk.sum()) + 1e-6))


def _plain(
    play: _Play, credit: Credit, samples: Sequence[Sample], config: Config, step: int
) -> Iterator[Played]:
    """Plays samples, and then ``algo.branches`` further samples of some of their turns. All are
    drawn in the same way, so that the first of them is a random one to go on with."""
    trunks = play(samples)
    yield trunks
    stops, of = config.algo.branch_continue == "random", trunks.episodes
    chosen = [(e, turn) for e in of for turn in branched_turns(e, config, step)]
    yield play([b for e, turn in chosen for b in _branches(e, turn, config, stops)])


def _best(
    play: _Play, credit: Credit, samples: Sequence[Sample], config: Config, step: int
) -> Iterator[Played]:
    """Plays turn by turn: of the samples of a turn, each played on to the end of its step, the one
    that earns most by its own step reward goes on, the first of equals.

    Source: tree-structured sampling, AT-GRPO (arXiv 2510.11062, section 4.1).
    """
    trunks = [Episode(*sample[:3], "", (), ()) for sample in samples]
    parts, over, lost = list[Played](), list[Episode](), list[Episode]()
    for turn in itertools.count():
        stopped = [e for e in trunks if len(e.turns) == turn and not (turn and e.results[-1].done)]
        parts.append(play([Sample(*e[:3], Branch(e, turn, 0, True)) for e in stopped]))
        paid = {e[:3]: e.paid for e in trunks}
        grown = {e[:3]: _as_trunk(e)._replace(paid=paid[e[:3]]) for e in parts[-1].episodes}
        gone = {e[:3] for e in stopped} - grown.keys()  # failed
        trunks = [grown.get(e[:3], e) for e in trunks if e[:3] not in gone]
        over += [e for e in trunks if len(e.turns) == turn]
        trunks = [e for e in trunks if len(e.turns) > turn]
        if not trunks:
            break
        chosen = [e for e in trunks if turn in branched_turns(e, config, step)]
        parts.append(play([b for e in chosen for b in _branches(e, turn, config, True)]))
        for i, trunk in enumerate(trunks):
            drawn = [trunk, *(e for e in parts[-1].episodes if e[:3] == trunk[:3])]
            scores = [float(credit(e)[turn]) for e in drawn]
            best = int(np.argmax(scores))
            if best:
                trunks[i], drawn[0] = _as_trunk(drawn[best]), _beaten(trunk, drawn[best])
            trunks[i] = trunks[i]._replace(paid=(*trunk.paid, scores[best]))
            lost += [e for n, e in enumerate(drawn) if n != best]
    ended = {e[:3] for e in over}
    failed = [failed for part in parts for failed in part.failed]
    waited_s = sum(part.waited_s for part in parts)
    yield Played([*over, *(e for e in lost if e[:3] in ended)], failed, waited_s)


def _as_trunk(episode: Episode) -> Episode:
    turns = tuple(turn._replace(replayed=False) for turn in episode.turns)
    return episode._replace(turns=turns, branch=None)


def _beaten(trunk: Episode, winner: Episode) -> Episode:
    """The trunk as a branch of its branch that goes on, which repeats some of its turns."""
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
    """Plays samples, and on each task ``algo.branches`` samples of each agent alone; a sample is
    given what its agents earn alone, on average."""
    team, size = play(samples), config.algo.group_size
    acted: dict[tuple[int, int], set[int]] = {}
    for e in team.episodes:
        acted.setdefault(e[:2], set()).update(turn.agent for turn in e.turns)
    most = max((agent + 1 for agents in acted.values() for agent in agents), default=0)
    alone = play([
        Sample(*task, size + number * most + agent, alone=agent)
        for task, agents in acted.items()
        for agent in sorted(agents)
        for number in range(config.algo.branches)
    ])  # fmt: skip
    earned: dict[tuple[int, int], dict[int, list[float]]] = {}
    for e in alone.episodes:
        _, agent = e.branch or (-1, 0)
        earned.setdefault(e[:2], {}).setdefault(agent, []).append(float(credit(e).sum()))
    means = {task: {a: sum(x) / len(x) for a, x in own.items()} for task, own in earned.items()}
    yield team._replace(episodes=[e._replace(alone=means.get(e[:2], {})) for e in team.episodes])
    yield alone


def _branches(trunk: Episode, turn: int, config: Config, stops: bool) -> list[Sample]:
    numbers = range(1, config.algo.branches + 1)
    return [Sample(*trunk[:3], Branch(trunk, turn, number, stops)) for number in numbers]


def branched_turns(episode: Episode, config: Config, step: int) -> list[int]:
    """Chooses the turns of an episode that have branches; a function of seed, step and episode."""
    at = config.algo.branch_at
    if not config.algo.branches:
        return []
    if at == "random":
        draw = (step, episode.index, episode.member)
        rng = random_keys.generator(config.run.seed, random_keys.Stream.BRANCHES, *draw)
        return [int(rng.integers(len(episode.turns)))]
    return turns_at(at, [turn.name for turn in episode.turns])


def turns_at(at: str, names: Sequence[str]) -> list[int]:
    """Turns that ``algo.branch_at`` names, every one or those of some agents; ``names``: of who
    takes each turn."""
    agents = names if at == "every" else at.split(",")
    return [turn for turn, name in enumerate(names) if name in agents]


def learnable(
    played: Sequence[tuple[Episode, np.ndarray]], by_step: bool = False
) -> tuple[list[Episode], list[np.ndarray]]:
    """Trunks as they are; of a branch the turn that is another sample of its trunk's, with all that
    the branch earned, or with its own reward: the turns before it are the trunk's, and those after
    it have no siblings. Agents alone are compared with, and not learned from."""
    episodes, rewards = list[Episode](), list[np.ndarray]()
    for episode, earned in played:
        if episode.branch is not None:
            turn = episode.branch[0]
            if turn < 0:
                continue
            own = episode.turns[turn]._replace(sees=(), index=0)
            is_paid = [other.player == own.player for other in episode.turns]
            episode = episode._replace(turns=(own,))
            earned = earned[[turn]] if by_step else earned[is_paid].sum(keepdims=True)
        episodes.append(episode)
        rewards.append(earned)
    return episodes, rewards
