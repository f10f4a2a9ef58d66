"""Games of a team against named opponents, seat by seat."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marft_jax.config import Config
from marft_jax.envs.games import open_spiel
from marft_jax.envs.threads import DaemonThreads
from marft_jax.errors import BadInput
from marft_jax.evaluation.benchmarks import BenchmarkPlan
from marft_jax.evaluation.scores import Outcomes, outcomes_of
from marft_jax.models.lora import Adapters
from marft_jax.run.answers import Answers
from marft_jax.run.setup import Session, open_session, open_source, restore_state
from marft_jax.run.signals import Stop
from marft_jax.team.team_files import load_team


class Match(NamedTuple):
    """Agent of a seat, and all that it plays with and against."""

    agent: int
    opponent: str
    session: Session
    adapters: Adapters
    config: Config


def play_matches(
    run: str | None,
    config: Config,
    step: int | str,
    opponents: Sequence[str],
    games: int | None,
    folder: Path,
) -> dict[tuple[str, str], Outcomes]:
    """Plays games of each agent, the others' seats taken by an opponent.

    Args:
        opponents: ``base``: the model without adapters; ``step:N``: that checkpoint of the run; a
            run directory, of as many agents; else a bot of the game, as in ``env.bots``.
        games: of each pair; by default ``eval.episodes``.
        folder: for the responses; what is there is not played again.

    Returns:
        Outcomes by agent and opponent.

    Raises:
        BadInput: an opponent that there is not.
        Stopped: a signal came; what was played is saved.
    """
    tasks, found = games or config.eval.episodes, dict[tuple[str, str], Outcomes]()
    threads = DaemonThreads()
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(Stop("stopping: finished games stay, the same command goes on"))
        session = open_session(config, load_team(config.team.file), tasks, stop=stop)
        state = restore_state(session, run, step)
        own, at = state.adapters, int(state.step)
        for opponent in opponents:
            for match in _matches(run, session, own, opponent):
                name = session.team.names[match.agent]
                plan = BenchmarkPlan(f"{name} against {opponent}", 1, match.config, tasks)
                source = open_source(stack, match.config, "eval")
                session.engine.load(match.adapters)
                file = folder / f"match-{at}-{name}-{opponent.replace('/', '_')}.jsonl"
                records = Answers(match.session, plan, source, file).play(threads)
                found[name, opponent] = outcomes_of(records)[name]
    return found


def _matches(run: str | None, session: Session, own: Adapters, opponent: str) -> Iterator[Match]:
    """A match of each agent."""
    team, config = session.team, session.config
    agents = range(len(team.names))
    adapters = _adapters_of(run, session, own, opponent)
    for agent in agents:
        if adapters is not None:  # the opponent's come after our own
            owners = [o if a == agent else o + team.adapters for a, o in enumerate(team.owners)]
            both = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), own, adapters)
            names = (*team.adapter_names, *(f"{opponent} {n}" for n in team.adapter_names))
            playing = team._replace(owners=tuple(owners), adapter_names=names)
            mixed = session._replace(team=playing)
            yield Match(agent, opponent, mixed, both, config)
        else:
            env = config.env
            assert isinstance(env, open_spiel.Settings)
            seats = tuple(f"{seat}={opponent}" for seat in agents if seat != agent)
            env = dataclasses.replace(env, bots=seats)
            changed = dataclasses.replace(config, env=env)
            alone: dict[str, Any] = {
                field: (getattr(team, field)[agent],)
                for field in ("profiles", "sampling", "owners")
            }
            lonely = session._replace(team=team._replace(**alone), config=changed)
            yield Match(agent, opponent, lonely, own, changed)


def _adapters_of(
    run: str | None, session: Session, own: Adapters, opponent: str
) -> Adapters | None:
    """Adapters of an opponent; None of one without a model."""
    if opponent == "base":
        return jax.tree.map(jnp.zeros_like, own)
    if opponent.startswith("step:") and run is not None:
        return restore_state(session, run, opponent.removeprefix("step:")).adapters
    if (Path(opponent) / "checkpoints").is_dir():
        return restore_state(session, opponent).adapters
    if not isinstance(session.config.env, open_spiel.Settings):
        raise BadInput(f"--against {opponent}: expected base, step:N or a run directory")
    return None
