"""Tools that are down: most of their calls in a step, but for wrong ones, failed.

The agents are not to blame then. The episodes in which such a tool failed are lost, like episodes
whose environment fails. A run in which a tool is down for some steps in a row ends.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from marft_jax.errors import EpisodesFailed, RunFailed
from marft_jax.random_keys import Stream, occasion
from marft_jax.types import AnsweredCall, Episode

LOGGER = logging.getLogger("marft_jax")

Called = tuple[int, AnsweredCall]
"""An agent, and its call of a tool."""

_SHARE = 0.5  # of a tool's calls that fit; the tool is down where more fail
_STEPS = 3  # in a row, after which the run ends


def calls_of(episodes: Iterable[Episode]) -> list[Called]:
    """Lists the calls of tools that were made in episodes."""
    turns = [turn for episode in episodes for turn in episode.turns if not turn.replayed]
    return [(turn.agent, call) for turn in turns for call in turn.calls]


def find_down(calls: Sequence[Called]) -> dict[str, str]:
    """Returns the names of the tools that are down in a step, each with the reason."""
    down = dict[str, str]()
    for name in dict.fromkeys(call.name for _, call in calls):
        fitting = [call for _, call in calls if call.name == name and call.verdict != "wrong"]
        failed = [call for call in fitting if call.verdict == "failed"]
        if len(failed) > _SHARE * len(fitting):
            ratio = f"{len(failed)} of {len(fitting)}"
            down[name] = f"{ratio} calls failed, the last: {failed[-1].answer}"
    return down


def find_lost(episodes: Sequence[Episode]) -> set[tuple[int, int, int]]:
    """Finds the episodes of a step in which a tool failed that is down.

    Returns:
        Index, group and member of these episodes, which are those of their branches, too.

    Raises:
        EpisodesFailed: all episodes are lost.
    """
    down = find_down(calls_of(episodes))
    lost = {
        e[:3]
        for e in episodes
        if any(c.name in down and c.verdict == "failed" for turn in e.turns for c in turn.calls)
    }
    if lost and all(e[:3] in lost for e in episodes):
        why = "; ".join(f"tool {name} is down: {why}" for name, why in down.items())
        raise EpisodesFailed(f"all episodes of the step are lost: {why}")
    return lost


class ToolWatch:
    """Counts for how many steps in a row a tool has been down."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}

    def look(self, step: int, calls: Sequence[Called]) -> None:
        """Logs the tools that are down. A step without calls of a tool says nothing about it.

        Raises:
            RunFailed: a tool has been down for too many steps in a row.
        """
        down = find_down(calls)
        for name in {call.name for _, call in calls}:
            self._steps[name] = self._steps.get(name, 0) + 1 if name in down else 0
        for name, why in down.items():
            count = f"step {self._steps[name]} of {_STEPS} in a row"
            where = occasion(Stream.TRAINING, step)
            LOGGER.warning("%s: tool %s is down: %s (%s)", where, name, why, count)
            if self._steps[name] >= _STEPS:
                line = f"tool {name} was down for {_STEPS} steps in a row: {why}"
                raise RunFailed(f"{line}; start again when it works")
