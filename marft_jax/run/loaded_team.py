"""A trained team that answers questions."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

from marft_jax import cli
from marft_jax.envs.base import EnvSource, Grade, QuestionEnv, Task
from marft_jax.errors import BadInput
from marft_jax.learning.checking import check_team
from marft_jax.run.opening import open_team
from marft_jax.run.playing import play_held_out
from marft_jax.sampling.protocol import version_of
from marft_jax.settings.config import Config
from marft_jax.team.workflows import NEED_ENV
from marft_jax.types import Episode

_UNGRADED = Grade(0.0, "not graded")


class LoadedTeam:
    """A team that answers questions: ``LoadedTeam("runs/quickstart").ask("4+7+8=?")``.

    Args:
        run: a run directory; None for the bare base.
        config: the model, the team, and in ``eval.temperature`` how it samples; by default as the
            run has it, see ``configure_run``, and without its environment.
        step: the checkpoint of the run that is used: a number, ``best`` or ``latest``.

    Raises:
        BadInput: settings, model or checkpoint that do not fit.
    """

    def __init__(
        self, run: str | Path | None, config: Config | None = None, step: int | str = "latest"
    ) -> None:
        config = config or cli.parse_run(run, None, [], plays_tasks=False)
        blueprint = check_team(config)
        if (workflow := config.team.workflow or blueprint.workflow) in NEED_ENV:
            raise BadInput(
                f"--team.workflow {workflow}: expected a team that answers questions, and this one "
                "needs its environment; use marft_jax.evaluate, or marft_jax.serve for one agent"
            )
        self._opened, at_once = contextlib.ExitStack(), len(blueprint.agents)
        opened = self._opened.enter_context(open_team(config, run, step, at_once))
        _, self._playing, state = opened
        self._playing.sampler.load(state.adapters, version_of(state.adapters))
        self._asked = itertools.count()

    def ask(self, question: str) -> Episode:
        """Plays the question; ``turns`` of the episode are what each agent was shown and wrote.

        Raises:
            BadInput, RunFailed: the question is too long.
        """
        task = Task(question, "")
        source = EnvSource(lambda: QuestionEnv(lambda _: task, lambda *_: _UNGRADED))
        played = play_held_out(self._playing, source, next(self._asked), 1)
        return played.episodes[0]._replace(results=())
