"""Matches of a team's agents against named opponents."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marft_jax.background import DaemonThreads
from marft_jax.envs.base import open_source
from marft_jax.errors import BadInput
from marft_jax.evaluation.benchmarks import BenchmarkPlan
from marft_jax.evaluation.scores import Estimate
from marft_jax.extras.games import open_spiel
from marft_jax.extras.games.ratings import Outcomes, elo, outcomes_of
from marft_jax.extras.games.tree import load
from marft_jax.formats import jsonlines
from marft_jax.learning.checking import check_team
from marft_jax.models.lora import Adapters
from marft_jax.run.checkpoints import Checkpoints
from marft_jax.run.models import TeamModels, open_models
from marft_jax.run.playing import PlaySetup
from marft_jax.run.samplers import open_sampler
from marft_jax.run.saved_answers import Answers, key_of
from marft_jax.run.signals import Stop
from marft_jax.run.states import restore_state
from marft_jax.sampling.protocol import version_of
from marft_jax.settings.config import Config
from marft_jax.team.prompts import Team

Match = tuple[str, Team, Mapping[str, Adapters], Config]
"""Games of one agent against one opponent: the agent, the team with the opponent at the other
seats, the adapters of both sides, and the settings with the opponent's bots."""


def play_matches(
    run: str | None,
    config: Config,
    rounds: Sequence[tuple[int | str, Sequence[str]]],
    games: int | None,
    folder: Path,
) -> dict[tuple[str, int, str], Outcomes]:
    """Plays games of each agent; an opponent takes all other seats.

    Args:
        run: run directory; None for the base without adapters.
        rounds: checkpoints with their opponents. An opponent is ``base`` (the model without
            adapters), ``step:N`` (that checkpoint of the run), a run directory with as many
            agents, or a bot as in ``env.bots``.
        games: games of each pair; default: ``eval.episodes``.
        folder: where responses are kept; games that are there are not played again.

    Returns:
        Outcomes by agent, step and opponent.

    Raises:
        BadInput: there is no such opponent.
        Stopped: a signal came; finished games are saved.
    """
    tasks, played = games or config.eval.episodes, dict[tuple[str, int, str], Outcomes]()
    threads, table = DaemonThreads(), folder / "matches.jsonl"
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(Stop("stopping: finished games are kept; repeat to go on"))
        models = stack.enter_context(open_models(config, check_team(config)))
        sampler = stack.enter_context(open_sampler(models, tasks))
        for step, opponents in rounds:
            state = restore_state(models, run, step)
            pairs = ((o, m) for o in opponents for m in _matches(run, models, state.adapters, o))
            for opponent, (name, team, adapters, settings) in pairs:
                plan = BenchmarkPlan(f"{name} against {opponent}", 1, settings, tasks)
                source = stack.enter_context(open_source(settings.env, "eval"))
                sampler.load(adapters, version_of(adapters))
                at = int(state.step)
                file = folder / f"match-{at}-{name}-{opponent.replace('/', '_')}.jsonl"
                playing = PlaySetup(settings, team, sampler, threads, stop)
                key = key_of(settings, models.bases, team, adapters, source.size)
                answers = Answers(playing, plan, source, file, key).play()
                outcomes = played[name, at, opponent] = outcomes_of(answers)[name]
                match = dict(step=at, agent=name, opponent=opponent).items()
                jsonlines.keep(table, lambda row, match=match: not match <= row.items())
                jsonlines.append(table, [jsonlines.dumps(dict(match, won=outcomes.win.mean))])
    return played


def rate_checkpoints(
    run: str, config: Config, count: int, games: int | None, folder: Path
) -> dict[int, Estimate]:
    """Rates evenly spaced checkpoints of a run, first and last included, by games of all pairs.

    Args:
        count: number of checkpoints.

    Raises:
        BadInput: the run has fewer than two checkpoints.
    """
    with Checkpoints(run, {}, keep=1) as checkpoints:
        steps = checkpoints.steps
    if min(len(steps), count) < 2:
        raise BadInput(f"--elo: expected at least 2 checkpoints, got {len(steps)}")
    places = np.linspace(0, len(steps) - 1, min(count, len(steps))).round().astype(int)
    chosen = [steps[place] for place in places]
    rounds = [(s, [f"step:{t}" for t in chosen[:n]]) for n, s in enumerate(chosen) if n]
    points = np.zeros((len(chosen),) * 2)
    for (_, step, opponent), o in play_matches(run, config, rounds, games, folder).items():
        a, b = chosen.index(step), chosen.index(int(opponent.removeprefix("step:")))
        won = o.games * (o.win.mean + o.draw.mean / 2)
        points[a, b] += won
        points[b, a] += o.games - won
    ratings = dict(zip(chosen, elo(points), strict=True))
    rows = [dict(step=s, elo=r.mean, low=r.low, high=r.high) for s, r in ratings.items()]
    jsonlines.write(folder / "elo.jsonl", [jsonlines.dumps(row) for row in rows])
    return ratings


def _matches(
    run: str | None, models: TeamModels, adapters: Mapping[str, Adapters], opponent: str
) -> Iterator[Match]:
    """Yields a match for each agent."""
    theirs = _adapters_of(run, models, adapters, opponent)
    team, config = _without_bots(models.team, models.config)
    for name in models.team.names:
        agent = team.names.index(name)
        if theirs is not None:  # the opponent's adapters follow ours
            first = [0 if a == agent else team.adapters[base] for a, base in enumerate(team.bases)]
            owners = [owner + after for owner, after in zip(team.owners, first, strict=True)]
            both = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), adapters, theirs)
            names = {
                base: (*ours, *(f"{opponent} {one}" for one in ours))
                for base, ours in team.adapter_names.items()
            }
            playing = team._replace(owners=tuple(owners), adapter_names=names)
            yield name, playing, both, config
        else:
            seats = (seat for seat in range(len(team.names)) if seat != agent)
            bots: Any = {"bots": tuple(f"{seat}={opponent}" for seat in seats)}
            changed = dataclasses.replace(config, env=dataclasses.replace(config.env, **bots))
            yield name, _members(team, [agent]), adapters, changed


def _without_bots(team: Team, config: Config) -> tuple[Team, Config]:
    """Fills the seats of bots with copies of the first agent, so that a team has every seat."""
    env = config.env
    if not (isinstance(env, open_spiel.Settings) and env.bots):
        return team, config
    taken = open_spiel.bots_of(env, load(env.game))
    agents = iter(range(len(team.names)))
    seats = range(len(team.names) + len(taken))
    full = _members(team, [0 if seat in taken else next(agents) for seat in seats])
    profiles = tuple(
        dataclasses.replace(profile, name=f"seat {seat}") if seat in taken else profile
        for seat, profile in enumerate(full.profiles)
    )
    config = dataclasses.replace(config, env=dataclasses.replace(env, bots=()))
    return full._replace(profiles=profiles), config


def _members(team: Team, agents: Sequence[int]) -> Team:
    """Makes a team of some of its agents, by number."""
    # the tuples of a team have one part for each member, or none
    parts = {name: x for name, x in team._asdict().items() if type(x) is tuple and x}
    chosen: dict[str, Any] = {name: tuple(x[i] for i in agents) for name, x in parts.items()}
    return team._replace(**chosen)


def _adapters_of(
    run: str | None, models: TeamModels, adapters: Mapping[str, Adapters], opponent: str
) -> Mapping[str, Adapters] | None:
    """Loads the adapters of an opponent; None for a bot."""
    if opponent == "base":
        return jax.tree.map(jnp.zeros_like, adapters)
    if opponent.startswith("step:") and run is not None:
        return restore_state(models, run, opponent.removeprefix("step:")).adapters
    config = models.config
    if (Path(opponent) / "checkpoints").is_dir():  # its settings do not matter
        lora = dataclasses.replace(config.lora, init=opponent)
        begun = models._replace(config=dataclasses.replace(config, lora=lora))
        return restore_state(begun, run=None).adapters
    if not isinstance(config.env, open_spiel.Settings):
        raise BadInput(f"--against {opponent}: expected base, step:N or a run directory")
    return None
