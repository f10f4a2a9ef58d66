"""The loop of a training: play, credit, learn, report, save."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from typing import Any

from rich.console import Console

from marft_jax.cli import unused_settings
from marft_jax.errors import BadInput
from marft_jax.learning.state import TrainState
from marft_jax.parallel import processes
from marft_jax.rollout.collect import Collected
from marft_jax.run import transcripts
from marft_jax.run.loggers import find_loggers
from marft_jax.run.measuring import measure, report, transcribe, warn_without_gradient
from marft_jax.run.metrics import Clock
from marft_jax.run.notices import first_step_notice, next_steps
from marft_jax.run.opening import open_training
from marft_jax.run.playing import make_player
from marft_jax.run.saving import roll_back, save
from marft_jax.run.signals import EXIT_STOPPED
from marft_jax.run.training import Training, rollout_source
from marft_jax.sampling.protocol import version_of
from marft_jax.settings.config import Config
from marft_jax.types import OnStep, Sample, TrainedStep, Version

_FIRST = Sample(index=0, group=0)

Take = Callable[[TrainState, int, int], tuple[Collected, tuple[Version, ...]]]
"""A state, how many updates it has had, and how many rollbacks there were, to the episodes of the
next step and what the state keeps as its ``past``."""


def train_team(config: Config, on_step: OnStep | None = None) -> int:
    """Trains to the last step, from the newest checkpoint of the run directory if there is one.

    Args:
        on_step: is shown every step when it is finished, and may end the run there; what it raises
            does so as well.

    Returns:
        0, or 75 when a signal or ``on_step`` stopped the run, which is saved.

    Raises:
        BadInput: settings, data, model, team or a saved run that do not fit.
        RunFailed: the run directory cannot be written, too many episodes failed, or training
            collapsed again and again. Whatever is raised, the last finished step is saved.
    """
    _check_samples(config)
    warning = unused_settings.warning(config)
    with open_training(config) as run:
        unused_settings.log(warning)
        learn_from(rollout_source(run).take, run, on_step)
        return 0
    return EXIT_STOPPED


def learn_from(
    take: Take,
    run: Training,
    on_step: OnStep | None = None,
    also: Callable[[TrainState], dict[str, Any]] = lambda state: {},
) -> None:
    """Learns from episodes, step by step, until the last step of the run.

    Args:
        take: the episodes of a step, with which of their turns earned what: sampled or recorded.
        also: further numbers to report of a state.

    Raises:
        Stopped: a signal came, or ``on_step`` wants no more.
    """
    state, clock, steps = run.state, Clock(checkpoint_s=0.0), run.config.run.steps
    warned = False
    if (first := int(state.step) + 1) <= steps:
        programs = run.playing.sampler.capabilities.programs
        run.reporter.event(first_step_notice(run.config, programs, first))
    while (step := int(state.step)) < steps:
        run.announce(step, "playing")
        collected, past = take(state, step, run.rollbacks)
        run.announce(step, "learning")
        with clock("update_s"):
            batch = run.learner.pack(collected.episodes, collected.rewards, seed=run.seed(step))
            state, estimates, learned = run.learner.learn(
                state._replace(past=past), batch, step, run.pipeline.check
            )
            transcribe(run, step + 1, collected, estimates)  # while the devices update
            team = run.models.team
            warned = warned or warn_without_gradient(step + 1, collected, estimates, team)
            run.pipeline.wait_for((state, learned))
        learned |= also(state)
        metrics = measure(run, step + 1, collected, batch, learned, clock)
        state = run.advance(state, collected, metrics["reward/mean"])
        metrics, verdict = report(run, state, collected, metrics, learned)
        run.announce(step + 1, "saving")
        clock = Clock()
        with clock("checkpoint_s"):  # how long this save keeps the next step waiting
            if verdict is None:
                save(run, state, metrics)
            else:
                state = roll_back(run, step + 1, verdict)
        # shown only now, when it can spoil nothing any more
        finished = TrainedStep(step + 1, metrics, collected.episodes)
        enough = on_step is not None and bool(on_step(finished))
        run.stop_if(enough and int(state.step) < steps)
    for line in next_steps(run.config, run.models.team.workflow):
        run.reporter.event(line)


def rehearse(config: Config) -> int:
    """Opens the run as ``train_team`` does, but anew in a temporary directory, and plays one task.

    Prints each prompt as the model is shown it, and what is written and earned.

    Raises:
        BadInput, RunFailed: what ``train_team`` would raise until then.
    """
    _check_samples(config)
    with tempfile.TemporaryDirectory() as folder:
        find_loggers(config.run.loggers)
        settings = dataclasses.replace(config.run, dir=folder, loggers=())
        warning = unused_settings.warning(config)
        with open_training(dataclasses.replace(config, run=settings), rehearses=True) as run:
            unused_settings.log(warning)
            run.playing.sampler.load(run.state.adapters, version_of(run.state.adapters))
            source = run.curriculum.source(run.curriculum.level(run.state.progress))
            console = Console(quiet=not processes.is_lead())
            [episode] = make_player(run.playing, source).play([_FIRST], 0).episodes
            console.print(transcripts.render(episode, run.models.team.decoders))
            last = f"nothing is learned or kept; without --dry_run this goes to {config.run.dir}"
            console.print(last, soft_wrap=True, markup=False, highlight=False)
    return 0


def _check_samples(config: Config) -> None:
    if config.algo.recorded:
        raise BadInput(
            "--algo.name imitation: it learns from demonstrations, see marft_jax.imitate; to go on "
            "from what it learned, choose another --run.dir and --lora.init"
        )
