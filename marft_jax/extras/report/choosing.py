"""Chooses which steps and episodes a page shows, so that it stays small for any run."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from marft_jax.extras.report.episodes import ShownEpisode, episode
from marft_jax.extras.report.reading import RunRecord, rows

DIALOGUES = 9_000_000
"""Bytes of a page for the dialogues of all its runs."""
RESPONSES = 4_000_000
"""Bytes of a page for the responses of evaluations."""
_STEPS = 12  # of all runs together
_DEMONSTRATIONS = "demonstrations.jsonl"


class Group(NamedTuple):
    """Episodes of one task, shown side by side."""

    task: str
    episodes: list[ShownEpisode]

    @property
    def trees(self) -> list[tuple[int, list[tuple[int, list[int]]]]]:
        """Lists episodes with branches: (episode, [(turn, its branches), ...]), by position."""
        found: dict[int, dict[int, list[int]]] = {}
        trunks = {e.member: i for i, e in enumerate(self.episodes) if e.branch is None and e.turns}
        for i, e in enumerate(self.episodes):
            trunk = trunks.get(e.member)
            if e.branch and e.turns and trunk is not None:
                if 0 <= e.branch[0] < len(self.episodes[trunk].turns):
                    found.setdefault(trunk, {}).setdefault(e.branch[0], []).append(i)
        return [(trunk, sorted(turns.items())) for trunk, turns in found.items()]


class Chapter(NamedTuple):
    """The shown episodes of a step or a file.

    Attributes:
        key: part of the address of each episode on the page.
        why: reason for which the step was chosen.
        rewards: of all episodes of the step; empty for games, where each player has its own.
        choice: which episodes are shown, in words.
    """

    key: str
    title: str
    step: int | None
    why: str
    rewards: list[float]
    choice: str
    groups: list[Group]


def chapters(run: RunRecord, runs: int, span: range | None = None) -> list[Chapter]:
    """Chooses what is shown of a run's transcripts and of its demonstrations.

    Args:
        runs: number of runs that share the page.
        span: steps that the user asks for; None: all.
    """
    there = [step for step in run.transcripts if span is None or step in span]
    steps = chosen_steps(there, run.rewards, max(3, _STEPS // runs))
    read = {step: _episodes(run, run.transcripts[step].name, "transcripts") for step in steps}
    tasks = Counter(task for some in read.values() for task in {e.task for e in some})
    kept = _episodes(run, _DEMONSTRATIONS) if (run.folder / _DEMONSTRATIONS).is_file() else []
    left, found = DIALOGUES / runs, []
    for i, (step, episodes) in enumerate(read.items()):
        groups, choice = chosen_groups(episodes, left / (len(read) - i + bool(kept)), tasks)
        left -= sum(map(_size, groups))
        earned, why = [e.reward for e in episodes], ", ".join(steps[step])
        if games := _earnings(episodes):
            earned, choice = [], f"{games} · {choice}"
        found.append(Chapter(f"s{step}", f"Step {step}", step, why, earned, choice, groups))
    if kept:
        groups, choice = chosen_groups(kept, left, tasks)
        found.append(Chapter("demos", "Demonstrations", None, "learned from", [], choice, groups))
    return found


def chosen_steps(
    there: Sequence[int], rewards: Mapping[int, float], most: int
) -> dict[int, list[str]]:
    """Chooses steps that have a transcript, with the reasons for each.

    First come the first and the last step, the best and the lowest reward, and the largest change
    of the reward between neighbours; then evenly spaced steps.

    >>> chosen_steps([1, 5, 10, 15], {1: 0.1, 5: 0.9, 10: 0.0, 15: 0.5}, 3)
    {1: ['first'], 5: ['best reward'], 15: ['last']}
    """
    reasons: dict[int, list[str]] = {}

    def choose(step: int, why: str) -> None:
        if step in reasons or len(reasons) < most:
            reasons.setdefault(step, []).append(why)

    if there:
        choose(there[0], "first")
        choose(there[-1], "last")
    known = [step for step in there if step in rewards]
    if len({rewards[step] for step in known}) > 1:
        choose(max(known, key=lambda s: rewards[s]), "best reward")
        choose(min(known, key=lambda s: rewards[s]), "lowest reward")
        pairs = zip(known, known[1:], strict=False)
        change = max(pairs, key=lambda pair: abs(rewards[pair[1]] - rewards[pair[0]]))
        choose(change[1], "largest change")
    for step in _spread(there, most):
        if step not in reasons:
            choose(step, "evenly spaced" if len(there) > most else "all are shown")
    return dict(sorted(reasons.items()))


def chosen_groups(
    episodes: Sequence[ShownEpisode], share: float, tasks: Mapping[str, int]
) -> tuple[list[Group], str]:
    """Chooses whole groups of episodes within ``share`` bytes; says the choice in words.

    Args:
        tasks: number of steps that have each task; tasks of several steps are preferred.
    """
    found: dict[tuple[int, int], list[ShownEpisode]] = {}
    for one in episodes:
        found.setdefault((one.index, one.group), []).append(one)
    groups = [Group(own[0].task or f"task {own[0].index}", own) for own in found.values()]
    if sum(map(_size, groups)) <= share:
        return groups, f"all {len(episodes)} episodes" if len(episodes) > 1 else "one episode"
    taken: set[int] = set()
    for place in _by_interest(groups, tasks):
        if place not in taken and (size := _size(groups[place])) <= share:
            taken.add(place)
            share -= size
    shown = [groups[place] for place in sorted(taken)]
    count = sum(len(group.episodes) for group in shown)
    choice = "repeated tasks, best, lowest, failed, truncated, mixed, then evenly spaced"
    return shown, f"{count} of {len(episodes)} episodes ({choice}, to limit the size)"


def _by_interest(groups: Sequence[Group], tasks: Mapping[str, int]) -> Iterable[int]:
    def those(fits: Callable[[Group], bool], most: int) -> list[int]:
        return [i for i, group in enumerate(groups) if fits(group)][:most]

    places = range(len(groups))
    means = [statistics.fmean(e.reward for e in group.episodes) for group in groups]
    yield from [max(places, key=means.__getitem__), min(places, key=means.__getitem__)]
    yield from those(lambda group: tasks.get(group.task, 0) > 1, 4)
    yield from those(lambda group: any(e.failed is not None for e in group.episodes), 2)
    yield from those(lambda group: any(e.truncated for e in group.episodes), 2)
    yield from those(lambda group: len({e.reward for e in group.episodes}) > 1, 2)
    yield from _spread(places, 8)
    yield from places


def _spread(items: Sequence[int], most: int) -> list[int]:
    """Picks evenly spaced items, the first and the last included."""
    if len(items) <= most:
        return list(items)
    return [items[math.floor(i * (len(items) - 1) / (most - 1) + 0.5)] for i in range(most)]


def _earnings(episodes: Sequence[ShownEpisode]) -> str:
    """Says the mean return of each player of games; "" for other tasks."""
    found: dict[str, list[float]] = {}
    for name, (_, paid) in (item for e in episodes for item in e.outcomes.items()):
        found.setdefault(name, []).append(paid)
    means = ", ".join(f"{name} {statistics.fmean(paid):+.4g}" for name, paid in found.items())
    return f"mean earnings: {means}" if means else ""


def _size(group: Group) -> int:
    return sum(one.size for one in group.episodes)


def _episodes(run: RunRecord, name: str, folder: str = "") -> list[ShownEpisode]:
    return [episode(row, run.agents) for row in rows(run.folder / folder / name, run.notes)]
