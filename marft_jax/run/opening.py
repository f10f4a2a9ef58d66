"""Opens a training run, from its settings to the values that its steps are made with; and a team
that only plays."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from marft_jax.background import DaemonThreads
from marft_jax.envs.base import open_source
from marft_jax.formats import jsonlines
from marft_jax.learning.checking import check_team, check_training
from marft_jax.learning.state import TrainState
from marft_jax.parallel import processes
from marft_jax.rollout.curriculum import Curriculum
from marft_jax.rollout.pipeline import Pipeline
from marft_jax.run.checkpoints import SaveSchedule
from marft_jax.run.compatibility import Changed, check_unchanged, inputs_of
from marft_jax.run.directory import disk_errors, locked_directory, set_aside, write_settings
from marft_jax.run.guard import Guard
from marft_jax.run.loggers import find_loggers
from marft_jax.run.metrics import Compilations
from marft_jax.run.models import TeamModels, open_devices, open_models
from marft_jax.run.notices import greeting, notices
from marft_jax.run.playing import PlaySetup
from marft_jax.run.reporters import Events, open_reporter
from marft_jax.run.samplers import open_sampler
from marft_jax.run.saved_answers import open_evaluation
from marft_jax.run.saving import open_checkpoints, resume, saved_when_stopped
from marft_jax.run.signals import Stop
from marft_jax.run.states import make_learner, open_teaching, restore_state
from marft_jax.run.storage import is_run, storage_of
from marft_jax.run.training import Training
from marft_jax.settings.config import Config
from marft_jax.settings.setting import with_absolute_paths
from marft_jax.team.assemble import workflow_of


@contextlib.contextmanager
def open_training(config: Config, *, rehearses: bool = False) -> Iterator[Training]:
    """Opens a run. However the block ends, the last finished step is saved.

    ``Stopped`` ends the block without an error; the code after the ``with`` runs.

    Args:
        rehearses: the run directory is temporary, and messages do not name it.

    Raises:
        BadInput: settings, data, model, team or a saved run that do not fit.
        RunFailed: the run directory cannot be written.
    """
    config = with_absolute_paths(config)
    blueprint, loggers = check_training(config), find_loggers(config.run.loggers)
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        stop = enter(Stop("stopped before a step was finished; start again"))
        devices = open_devices(config.mesh)
        storage = storage_of(config.run.dir, trains=processes.is_lead())
        run_dir = storage.path = storage.path.absolute()  # an environment may change directories
        enter(disk_errors(run_dir))
        folder = enter(locked_directory(storage))
        is_run(folder)  # and nothing else; a bucket is mirrored now
        source = enter(open_source(config.env, "train"))
        curriculum = Curriculum(source, config.env)
        pipeline = Pipeline(ahead=config.rollout.lag > 0)
        workflow = workflow_of(config.team, blueprint)
        evaluation = enter(open_evaluation(config, workflow))
        inputs = inputs_of(config, workflow, blueprint.agents)
        other_inputs = check_unchanged(run_dir, inputs)
        models = enter(open_models(config, blueprint, devices))
        sampler = enter(open_sampler(models, folder=folder))
        learner = make_learner(models, open_teaching(models))
        events = enter(Events(folder))
        guard = Guard(models.config.guard, models.team.names, events)
        checkpoints = enter(open_checkpoints(models, storage))
        state, news = resume(models, learner, checkpoints, guard)
        done, steps, is_lead = int(state.step), models.config.run.steps, processes.is_lead()
        if goes_on := done < steps:
            news += [] if done else set_aside(folder, storage.remove)
            events.forget_after(done)
            changed = write_settings(folder, models.config, models.blueprint)
            jsonlines.write(folder / "inputs.json", [json.dumps(inputs)])
            storage.push()  # from now on it is a run
            news += [] if done else [*changed, *other_inputs]
        used = loggers if goes_on and is_lead else []
        console = Console(highlight=False, quiet=not is_lead)
        reporter = enter(open_reporter(folder, steps, used, done, console))
        where = "a rehearsal" if rehearses else models.config.run.dir
        begins = greeting(models, state, where)
        for line in [begins, *news, *notices(models, sampler.capabilities)]:
            reporter.event(str(line))
        what, machine, _ = begins.split("; ", 2)
        events.note("start", what=what, where=machine, derived=models.derived)
        for name, old, new in filter(lambda line: isinstance(line, Changed), news):
            events.note("changed", setting=name.removeprefix("--"), was=old, now=new)
        threads, compilations = enter(DaemonThreads()), enter(Compilations())
        enter(pipeline)
        playing = PlaySetup(models.config, models.team, sampler, threads, stop, pipeline.collective)
        schedule = SaveSchedule(models.config.run)
        run = Training(
            models, playing, learner, source, curriculum, state, guard, checkpoints, schedule,
            evaluation, compilations, reporter, pipeline, stop, folder,
        )  # fmt: skip
        with saved_when_stopped(run):
            yield run


@contextlib.contextmanager
def open_team(
    config: Config,
    run: str | Path | None,
    step: int | str = "latest",
    at_once: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[TeamModels, PlaySetup, TrainState]]:
    """Opens a team that plays and learns nothing: its models, what it plays with, and its state
    after a step of ``run``, or of the bare base.

    Raises:
        BadInput: settings, models, team or checkpoint that do not fit.
    """
    with (
        open_models(config, check_team(config)) as models,
        open_sampler(models, at_once) as sampler,
    ):
        playing = PlaySetup(models.config, models.team, sampler, DaemonThreads(), stop)
        yield models, playing, restore_state(models, run, step)
