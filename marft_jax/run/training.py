"""An open training run: the values that its steps are made with.

The training state goes from step to step as a value (``loop.learn_from``). ``measuring.py``
measures and reports a step, ``saving.py`` saves it or takes it back.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from marft_jax.envs.base import EnvSource
from marft_jax.errors import Stopped
from marft_jax.learning import state_parts
from marft_jax.learning.credit import groups_with_signal, make_credit
from marft_jax.learning.learner import Learner
from marft_jax.learning.state import TrainState
from marft_jax.parallel import compilation, processes
from marft_jax.random_keys import attempt
from marft_jax.rollout.collect import Collected, collect
from marft_jax.rollout.curriculum import Curriculum
from marft_jax.rollout.pipeline import Cancelled, Pipeline
from marft_jax.rollout.source import Job, RolloutSource
from marft_jax.rollout.tool_health import ToolWatch
from marft_jax.run.checkpoints import Checkpoints, SaveSchedule
from marft_jax.run.guard import Guard
from marft_jax.run.metrics import Compilations
from marft_jax.run.models import TeamModels
from marft_jax.run.playing import PlaySetup, make_player
from marft_jax.run.reporters import Reporter
from marft_jax.run.saved_answers import PeriodicEvaluation
from marft_jax.run.signals import Stop
from marft_jax.settings.config import Algo, Config


class Training(NamedTuple):
    """An open run. Its parts are host objects; what training changes is in ``TrainState``.

    Attributes:
        models, playing, learner: the team on its bases, what it plays with, and what learns.
        source, curriculum: the tasks, and which of them a step plays.
        state: that the run begins or continues with.
        guard, checkpoints, schedule: when a step is taken back, where steps are saved, and when.
        evaluation, compilations: what is measured besides the numbers of a step.
        pipeline: the thread that plays, where there is one.
        folder: the run directory; a temporary one in processes beside the first.
    """

    models: TeamModels
    playing: PlaySetup
    learner: Learner
    source: EnvSource
    curriculum: Curriculum
    state: TrainState
    guard: Guard
    checkpoints: Checkpoints
    schedule: SaveSchedule
    evaluation: PeriodicEvaluation
    compilations: Compilations
    reporter: Reporter
    pipeline: Pipeline
    stop: Stop
    folder: Path

    @property
    def config(self) -> Config:
        """Every setting, with what the base decided."""
        return self.models.config

    @property
    def rollbacks(self) -> int:
        """Times that the run was rolled back."""
        return self.guard.rollbacks

    def seed(self, step: int) -> tuple[int, int]:
        """Seeds all that is drawn in a step; after a rollback, as in a step never reached."""
        return self.config.run.seed, attempt(step, self.rollbacks)

    def announce(self, step: int, what: str) -> None:
        """Shows what goes on in the step after ``step``, and prepares the line of a signal."""
        self.reporter.doing(what)
        self.guard.events.step = step + 1
        if what == "learning":
            saved, grace_s = f"step {step}" if step else "nothing", self.stop.grace_s
            effect = f"saving step {step + 1} if it is done in {grace_s:.0f} s, else {saved}"
        else:
            saved = f"saving step {step}" if step else "nothing is finished yet"
            effect = f"{saved}; the unfinished step {step + 1} is dropped"
        self.stop.expect(f"stopping: {effect}")

    def advance(self, state: TrainState, collected: Collected, reward: float) -> TrainState:
        """Moves what a step changes besides the update: the curriculum and the state's parts."""
        progress = self.curriculum.after(state.progress, collected.level, reward)
        state = state._replace(progress=progress)
        seed = self.seed(int(state.step))
        state = state_parts.after_step(self.models.parts, state, collected.played, seed)
        if compilation.is_crowded():
            self.pipeline.run_exclusive(compilation.drop_programs)
        return state

    def stop_if(self, enough: bool) -> None:
        """Raises ``Stopped`` where a signal came, or that was enough, in any process."""
        if processes.any_process(self.stop() or enough):
            raise Stopped


def rollout_source(run: Training) -> RolloutSource:
    """Makes the source of steps that the team plays itself."""
    config, playing = run.config, run.playing
    credit, watch = make_credit(config.algo.part(Algo), playing.team), ToolWatch()

    def play(job: Job, cancelled: Cancelled) -> Collected:
        stoppable = playing._replace(stop=lambda: playing.stop() or cancelled())
        player = make_player(stoppable, run.curriculum.source(job.level))
        collected = collect(player, credit, groups_with_signal, config, job.attempt)
        watch.look(job.attempt, collected.calls)
        return collected

    copy = run.models.devices.copy_adapters
    return RolloutSource(
        run.pipeline, playing.sampler, run.curriculum, play, config.run.steps, copy
    )
