"""A trained team that answers questions."""

from __future__ import annotations

import itertools
from pathlib import Path

from marft_jax import cli
from marft_jax.config import Config
from marft_jax.envs.base import Grade, Task, question_source
from marft_jax.envs.threads import DaemonThreads
from marft_jax.errors import BadInput
from marft_jax.run.setup import open_session, play_held_out, restore_state
from marft_jax.sampling.protocol import version_of
from marft_jax.team.assemble import workflow_of
from marft_jax.team.team_files import load_team
from marft_jax.team.workflows import NEED_ENV
from marft_jax.types import Episode

_UNGRADED = Grade(0.0, "not graded")


class LoadedTeam:
    """A team that answers questions: ``LoadedTeam("runs/quickstart").ask("4+7+8=?")``.

    Args:
        run: a run directory; None for the bare base.
        config: the model, the team, and in ``eval.temperature`` how it samples; by default as the
            run has it, see ``configure_run``.
        step: the checkpoint of the run that is used: a number, ``best`` or ``latest``.

    Raises:
        BadInput: settings, model or checkpoint that do not fit.
    """

    def __init__(
        self, run: str | Path | None, config: Config | None = None, step: int | str = "latest"
    ) -> None:
        config = config or cli.configure_run(run)
        blueprint = load_team(config.team.file)
        if (workflow := workflow_of(config.team, blueprint)) in NEED_ENV:
            raise BadInput(
                f"--team.workflow {workflow}: expected a team that answers questions, and this one "
                "needs its environment; use marft_jax.evaluate, or marft_jax.serve for one agent"
            )
        self._session = open_session(config, blueprint, at_once=len(blueprint.agents))
        state = restore_state(self._session, run, step)
        self._session.sampler.load(state.adapters, version_of(state.adapters))
        self._threads, self._asked = DaemonThreads(), itertools.count()

    def ask(self, question: str) -> Episode:
        """Plays the question; ``turns`` of the episode are what each agent was shown and wrote.

        Raises:
            BadInput, RunFailed: the question is too long.
        """
        task = Task(question, "")
        source = question_source(lambda _: task, lambda *_: _UNGRADED, horizon=1)
        played = play_held_out(self._session, source, self._threads, next(self._asked), 1)
        return played.episodes[0]._replace(results=())
