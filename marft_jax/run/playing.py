"""Plays episodes with the team and the sampler of a run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import NamedTuple

from marft_jax.envs.base import EnvSource
from marft_jax.parallel import processes
from marft_jax.random_keys import Stream
from marft_jax.rollout.rollout import Rollout
from marft_jax.sampling.protocol import Sampler
from marft_jax.settings.config import Branching, Config
from marft_jax.team.prompts import Team
from marft_jax.team.workflows import find_workflow
from marft_jax.types import Played, Player, Sample


class PlaySetup(NamedTuple):
    """What episodes are played with.

    Attributes:
        config: bounds an episode, and has the temperature of an evaluation.
        threads: run the user's code.
        stop: true when playing must end.
        collective: runs what all processes must run in one order.
    """

    config: Config
    team: Team
    sampler: Sampler
    threads: Executor
    stop: Callable[[], bool] = lambda: False
    collective: processes.Collective = lambda work: work()


def make_rollout(
    setup: PlaySetup,
    source: EnvSource,
    stream: Stream = Stream.TRAINING,
    report: Callable[[int], None] | None = None,
) -> Rollout:
    """Makes what plays a team in an environment, in this process.

    Args:
        report: is called with the number of episodes that are over.
    """
    settings = setup.config.rollout
    return Rollout(
        setup.sampler,
        setup.team,
        find_workflow(setup.team.workflow),
        source.create,
        setup.threads,
        max_failed=settings.max_failed_fraction,
        step_seconds=settings.step_seconds,
        max_tool_calls=setup.config.team.max_tool_calls,
        max_turns=settings.max_turns,
        snapshots=setup.config.algo.part(Branching).branches > 0 and stream == Stream.TRAINING,
        stop=setup.stop,
        stream=stream,
        report=report,
    )


def make_player(
    setup: PlaySetup,
    source: EnvSource,
    stream: Stream = Stream.TRAINING,
    report: Callable[[int], None] | None = None,
) -> Player:
    """Makes the player of a team in an environment, with all processes; see ``make_rollout``."""
    return processes.play_on_all(make_rollout(setup, source, stream, report), setup.collective)


def play_held_out(
    setup: PlaySetup,
    source: EnvSource,
    sample: int,
    episodes: int,
    start: int = 0,
    report: Callable[[int], None] | None = None,
    step: int = 0,
) -> Played:
    """Plays the held-out tasks from ``start`` to ``episodes`` at the evaluation's temperature.

    The samples of a task depend on its number, ``sample`` and ``step`` alone.
    """
    temperature = setup.config.eval.temperature
    sampling = tuple(s._replace(temperature=temperature) for s in setup.team.sampling)
    quiet = setup._replace(team=setup.team._replace(sampling=sampling))
    count = episodes if source.size is None else min(episodes, source.size)
    player = make_player(quiet, source, Stream.EVALUATION, report)
    return player.play([Sample(task, task, sample) for task in range(start, count)], step)
