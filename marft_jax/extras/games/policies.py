"""Policies of a run's checkpoints in a game, read from the model, and their exploitability."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from marft_jax.errors import BadInput
from marft_jax.extras.games import exploitability as exact
from marft_jax.extras.games import open_spiel
from marft_jax.extras.games.exploitability import Key
from marft_jax.extras.games.tree import Tree, load
from marft_jax.formats import jsonlines
from marft_jax.learning.algorithms import find_algorithm
from marft_jax.learning.checking import check_team
from marft_jax.learning.learner import Learner
from marft_jax.learning.settings import Imitation
from marft_jax.models.lora import Adapters
from marft_jax.run.checkpoints import Checkpoints
from marft_jax.run.models import TeamModels, open_models
from marft_jax.run.states import restore_state
from marft_jax.settings.config import Config
from marft_jax.team.prompts import State
from marft_jax.types import Episode, StepResult, Turn

LogProbs = Callable[[Sequence[tuple[int, Any, Sequence[str]]]], list[list[float]]]
"""Maps (player, state, texts that the player may write there) to the log-prob of each text."""


def measure_policies(
    run: str | None, config: Config, step: int | str, out: Path
) -> list[dict[str, Any]]:
    """Computes the exploitability of checkpoints, and of the average of their policies.

    Args:
        run: run directory; None for the base without adapters.
        step: a checkpoint of the run, or ``all`` for every checkpoint that it keeps.
        out: file to which the rows are written, one JSON object per line.

    Raises:
        BadInput: the game cannot be enumerated, or the checkpoint does not exist.
    """
    env = config.env
    if not isinstance(env, open_spiel.Settings) or env.bots:
        raise BadInput("--exploitability: expected --env.name open_spiel, without --env.bots")
    table = open_spiel.Table(load(env.game), env.numbered)
    with open_models(config, check_team(config)) as models:
        rows = _measure(models, table, run, step, masked=env.illegal == "masked")
    jsonlines.write(out, [jsonlines.dumps(row) for row in rows])
    return rows


def _measure(
    models: TeamModels, table: open_spiel.Table, run: str | None, step: int | str, masked: bool
) -> list[dict[str, Any]]:
    if len(models.team.names) != table.tree.players:
        raise BadInput(f"--exploitability: expected a team of {table.tree.players} agents")
    steps: Sequence[int | str] = [step]
    if run and step == "all":
        with Checkpoints(run, {}, keep=1) as checkpoints:
            steps = sorted(checkpoints.steps)
    reader, policies, rows = _Reader(models, table, masked), [], list[dict[str, Any]]()
    for which in steps:
        state = restore_state(models, run, which)
        logprobs = functools.partial(reader.logprobs, state.adapters)
        policy, others = read_policy(table.tree, table.moves, logprobs)
        policies.append(policy)
        exploited = exact.exploitability(table.tree, policy)
        rows.append({"step": int(state.step), **exploited._asdict(), "illegal": others})
    if len(policies) > 1:
        exploited = exact.exploitability(table.tree, exact.average(table.tree, policies))
        rows.append({"step": "average", **exploited._asdict(), "illegal": None})
    return rows


def read_policy(
    tree: Tree, moves: Callable[[Any, int], Mapping[str, int]], logprobs: LogProbs
) -> tuple[dict[Key, dict[int, float]], float]:
    """Reads a policy: the probabilities of the legal moves' texts, renormalised.

    Args:
        moves: maps (state, player) to the texts of the legal moves and their actions.

    Returns:
        The policy, and the mean probability of all other texts over its information states.
    """
    states = {exact.key_of(tree, state): state for state in exact.states(tree)}
    legal = {key: moves(state, key[0]) for key, state in states.items()}
    read = logprobs([(key[0], states[key], list(texts)) for key, texts in legal.items()])
    odds = dict(zip(legal, map(np.exp, read), strict=True))
    policy = {
        key: exact.normalised(dict(zip(legal[key].values(), row.tolist(), strict=True)))
        for key, row in odds.items()
    }
    return policy, float(np.mean([max(0, 1 - row.sum()) for row in odds.values()]))


class _Reader:
    """Log-probs of texts under any adapters, by the learner's forward pass; among the texts
    of a state where the sampler draws among these (``masked``)."""

    def __init__(self, models: TeamModels, table: open_spiel.Table, masked: bool) -> None:
        settings = models.learning._replace(algo=Imitation(epochs=1, minibatches=1), critic=None)
        imitation = find_algorithm(Imitation.name)
        self._learner = Learner(
            settings, models.bases, models.team, imitation, models.devices.learning
        )
        self._team, self._table, self._masked = models.team, table, masked

    def logprobs(
        self, adapters: Mapping[str, Adapters], asked: Sequence[tuple[int, Any, Sequence[str]]]
    ) -> list[list[float]]:
        """See ``LogProbs``."""
        ended = [StepResult("", 0.0, done=True)]
        episodes = [
            Episode(i, i, 0, "", [self._turn(seat, state, t, texts) for t in texts], ended)
            for i, (seat, state, texts) in enumerate(asked)
        ]
        zeros = [np.zeros(len(episode.turns), np.float32) for episode in episodes]
        batch = self._learner.pack(episodes, zeros, level="action")
        sums = iter([float(x.sum()) for x in self._learner.logprobs(adapters, batch)])
        return [[next(sums) for _ in episode.turns] for episode in episodes]

    def _turn(self, seat: int, state: Any, text: str, legal: Sequence[str]) -> Turn:
        """Builds the turn in which the agent of the seat writes the text in that state."""
        team = self._team._replace(view=lambda name, observation: self._table.see(state, seat))
        act = team.act(seat, State(""))
        ids = np.asarray(team.ids_of(seat, text), np.int32)
        return Turn(
            agent=seat,
            name=team.names[seat],
            step=0,
            prompt=act.prompt,
            action=ids,
            logprobs=np.zeros(len(ids), np.float32),
            text=text,
            answers=True,
            sees=(),
            truncated=False,
            temperature=act.sampling.temperature or 1.0,
            choices=tuple(team.ids_of(seat, t) for t in legal) if self._masked else (),
        )
