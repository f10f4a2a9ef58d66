"""Chooses which steps and episodes a page shows, so that it stays small for any run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from marft_jax.extras.report.episodes import ShownEpisode, episode
from marft_jax.extras.report.reading import RunRecord, rows, spread

BYTES = 8_000_000
"""Of a page, for the dialogues of all its runs, and for the responses of their evaluations."""
_STEPS = 12  # of all runs together
_DEMONSTRATIONS = "demonstrations.jsonl"


class Group(NamedTuple):
    """Episodes of one task, shown side by side."""

    task: str
    episodes: list[ShownEpisode]

    @property
    def trees(self) -> list[tuple[int, list[tuple[int, list[int]]]]]:
        """Lists episodes with branches: (episode, [(turn, its branches), ...]), by position."""
        branches: dict[int, dict[int, list[int]]] = {}
        trunks = {e.member: i for i, e in enumerate(self.episodes) if e.branch is None and e.turns}
        for i, e in enumerate(self.episodes):
            trunk = trunks.get(e.member)
            if e.branch and e.turns and trunk is not None:
                if 0 <= e.branch[0] < len(self.episodes[trunk].turns):
                    branches.setdefault(trunk, {}).setdefault(e.branch[0], []).append(i)
        return [(trunk, sorted(turns.items())) for trunk, turns in branches.items()]


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
    files = {step: _episodes(run, run.transcripts[step].name, "transcripts") for step in steps}
    kept = _episodes(run, _DEMONSTRATIONS) if (run.folder / _DEMONSTRATIONS).is_file() else []
    share, shown = BYTES / runs / (len(files) + bool(kept) or 1), list[Chapter]()
    for step, episodes in files.items():
        groups, choice = chosen_groups(episodes, share)
        earned = [e.reward for e in episodes]
        if games := _earnings(episodes):
            earned, choice = [], f"{games} · {choice}"
        name = f"s{step}", f"Step {step}", step
        shown.append(Chapter(*name, steps[step], earned, choice, groups))
    if kept:
        groups, choice = chosen_groups(kept, share)
        shown.append(Chapter("demos", "Demonstrations", None, "learned from", [], choice, groups))
    return shown


def chosen_steps(there: Sequence[int], rewards: Mapping[int, float], most: int) -> dict[int, str]:
    """Chooses steps that have a transcript, each with the reason: the last one, the one with the
    best reward, and evenly spaced ones.

    >>> chosen_steps([1, 5, 10, 15], {1: 0.1, 5: 0.9, 10: 0.0, 15: 0.5}, 3)
    {1: 'evenly spaced', 5: 'best reward', 15: 'last'}
    """
    chosen = {step: "evenly spaced" for step in spread(there, most)}
    if len(there) <= most:
        chosen = dict.fromkeys(there, "all are shown")
    if known := [step for step in there if step in rewards]:
        chosen[max(known, key=lambda step: rewards[step])] = "best reward"
    chosen |= {step: "last" for step in there[-1:]}
    dropped = [step for step, why in chosen.items() if why == "evenly spaced"]
    for step in dropped[::-1][: max(0, len(chosen) - most)]:
        del chosen[step]
    return dict(sorted(chosen.items()))


def chosen_groups(episodes: Sequence[ShownEpisode], share: float) -> tuple[list[Group], str]:
    """Chooses whole groups of episodes, evenly spaced, within ``share`` bytes; says the choice in
    words."""
    tasks: dict[tuple[int, int], list[ShownEpisode]] = {}
    for one in episodes:
        tasks.setdefault((one.index, one.group), []).append(one)
    groups = [Group(peers[0].task or f"task {peers[0].index}", peers) for peers in tasks.values()]
    size = sum(map(_size, groups))
    if size <= share:
        return groups, f"all {len(episodes)} episodes" if len(episodes) > 1 else "one episode"
    shown = list[Group]()
    for group in spread(groups, max(2, int(len(groups) * share / size))):
        if (share := share - _size(group)) >= 0:
            shown.append(group)
    count = sum(len(group.episodes) for group in shown)
    return shown, f"{count} of {len(episodes)} episodes (evenly spaced, to limit the size)"


def _earnings(episodes: Sequence[ShownEpisode]) -> str:
    """Says the mean return of each player of games; "" for other tasks."""
    earned: dict[str, list[float]] = {}
    for name, (_, paid) in (item for e in episodes for item in e.outcomes.items()):
        earned.setdefault(name, []).append(paid)
    means = ", ".join(f"{name} {statistics.fmean(paid):+.4g}" for name, paid in earned.items())
    return f"mean earnings: {means}" if means else ""


def _size(group: Group) -> int:
    return sum(one.size for one in group.episodes)


def _episodes(run: RunRecord, name: str, folder: str = "") -> list[ShownEpisode]:
    return [episode(row, run.agents) for row in rows(run.folder / folder / name, run.notes)]
