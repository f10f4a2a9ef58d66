"""Upper bound of the work of a training step: its turns, tokens and rows.

Every turn has the longest action, and a prompt that fills the rest of the context. Turns of a real
run are shorter, so memory and FLOPs are upper bounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from marft_jax.learning.batch import OfBase, pack_turns
from marft_jax.learning.credit import CREDITS
from marft_jax.learning.settings import LearnerSettings
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.rollout.branches import turns_at
from marft_jax.settings.config import Algo, Branching, Config
from marft_jax.team.prompts import Team
from marft_jax.team.scripts import STATIC, script_of
from marft_jax.types import MAIN, Episode, Level, StepResult, Turn


class Work(NamedTuple):
    """Work of a training step.

    Attributes:
        episodes: episodes of all processes.
        owners: number of the acting agent, for each turn of an episode.
        context: longest prompt plus action, in tokens.
        action: longest action, in tokens.
        branched: turn of each branch of an episode that is learned from.
        turns: turns that are played, with those of branches.
    """

    episodes: int
    owners: tuple[int, ...]
    context: int
    action: int
    branched: tuple[int, ...]
    turns: int


def step_work(config: Config, team: Team, workflow: str) -> Work:
    """Returns the longest training step; a user's own workflow counts as sequential."""
    longest = max(sampling.max_new_tokens for sampling in team.sampling)
    actors = _actors(team, workflow) * config.env.horizon
    branched, played = _branches(config, [team.names[agent] for agent in actors])
    turns = round(config.algo.episodes * (len(actors) + played))
    return Work(config.algo.episodes, tuple(actors), max(team.contexts), longest, branched, turns)


def on_base(team: Team, work: Work, base: str, on: Sequence[str]) -> tuple[Team, Work]:
    """Returns the team and the work as the programs of one base see them.

    The members on the base are on ``main``; the others do not act.

    Args:
        on: the base of each member, or of its teacher.
    """
    members = [agent for agent, name in enumerate(on) if name == base]
    turns = [k for k, agent in enumerate(work.owners) if agent in members]
    work_of_base = Work(
        work.episodes,
        tuple(work.owners[k] for k in turns),
        max(team.contexts[agent] for agent in members),
        max(team.sampling[agent].max_new_tokens for agent in members),
        tuple(turns.index(k) for k in work.branched if k in turns),
        round(work.turns * len(turns) / len(work.owners)),
    )

    def of_base(each: Mapping[str, Any]) -> dict[str, Any]:
        return {MAIN: each[base]} if base in each else {}

    team = team._replace(
        bases=tuple(MAIN if agent in members else "" for agent in range(len(team.bases))),
        adapter_names=of_base(team.adapter_names),
        trainable=of_base(team.trainable),
    )
    return team, work_of_base


def _branches(config: Config, names: Sequence[str]) -> tuple[tuple[int, ...], float]:
    """Returns the turns at which an episode branches, and the turns played per episode for that."""
    algo, branching, turns = config.algo.part(Algo), config.algo.part(Branching), len(names)
    count = branching.branches
    if not count or branching.branch_budget != "none":  # a budget keeps the cost of no branches
        return (), 0
    if CREDITS[algo.credit].solo:  # each agent alone on each task
        return (), count * len(set(names)) * config.env.horizon / algo.group_size
    if branching.branch_at == "random":  # the last turn has the longest prompt, the mean turn half
        chosen, behind = [turns - 1], (turns + 1) / 2
    else:
        chosen = turns_at(branching.branch_at, names)
        behind = turns - sum(chosen) / max(1, len(chosen))
    if branching.branch_continue != "end":  # a branch is played to the end of its step
        behind = min(behind, turns / config.env.horizon)
    return tuple(chosen * count), count * len(chosen) * behind


def _actors(team: Team, workflow: str) -> list[int]:
    """Lists the agents that act in one step of the environment."""
    if workflow not in (*STATIC, "orchestrated"):
        return list(range(len(team.profiles)))
    called = itertools.cycle(name for i, name in enumerate(team.names) if i != team.orchestrator)

    def write(turn: int, agent: int) -> str:
        return f"<call>{next(called)}</call>" if agent == team.orchestrator else ""

    return [agent for agent, _ in script_of(team._replace(workflow=workflow), "", write)]


def longest_batch(
    settings: LearnerSettings,
    team: Team,
    level: Level,
    work: Work,
    shards: int,
    model: DecoderConfig,
) -> OfBase:
    """Packs the turns of such a step, by the function that packs real ones."""
    turns = []
    for number, agent in enumerate(work.owners, start=1):
        whole, action = work.context, work.action
        if team.shared:  # one conversation grows to the end of the context
            whole = work.context * number // len(work.owners)
            before = work.context * (number - 1) // len(work.owners)
            action = min(work.action, max(1, whole - before))
        zeros, scores = np.zeros(whole, np.int32), np.zeros(action, np.float32)
        ids = zeros[action:], zeros[:action]
        turns.append(Turn(agent, team.names[agent], 0, *ids, scores, "", True, (), False, 1.0))
    group = settings.algo.part(Algo).group_size
    result = [StepResult("", 0.0, True)]
    episodes = [
        Episode(e // group, e // group, e % group, "", turns, result) for e in range(work.episodes)
    ]
    episodes += [episode._replace(turns=(turns[k],)) for episode in episodes for k in work.branched]
    parts, _ = pack_turns(
        episodes, team.owners, settings.algo, level,
        shards=shards, configs={MAIN: model}, prompts=settings.reads_prompts(level),
    )  # fmt: skip
    return parts[MAIN]
