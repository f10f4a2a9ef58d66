"""Opens a training run: checks the settings before it loads a model, restores, and reports."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

import jax
from rich.console import Console

from marft_jax.config import Config
from marft_jax.envs.threads import DaemonThreads
from marft_jax.errors import BadInput, Stopped
from marft_jax.learning.normalizers import find_normalizer
from marft_jax.learning.settings import reuses_samples
from marft_jax.learning.state import TrainState
from marft_jax.learning.step_rewards import find_step_reward
from marft_jax.models import lora
from marft_jax.parallel import processes
from marft_jax.plugins import PYTHON
from marft_jax.rollout.curriculum import Curriculum
from marft_jax.rollout.pipeline import Pipeline
from marft_jax.run import inputs
from marft_jax.run.answers import PeriodicEvaluation
from marft_jax.run.checkpoints import Schedule
from marft_jax.run.directory import disk_errors, own_directory, set_aside, write_settings
from marft_jax.run.guard import Guard
from marft_jax.run.loggers import MakeWriter, find_loggers
from marft_jax.run.metrics import Compilations
from marft_jax.run.reporters import FROM_BASE, open_reporter
from marft_jax.run.saving import open_checkpoints, resume, save_and_close, stopped
from marft_jax.run.setup import Session, make_learner, open_session, open_source
from marft_jax.run.signals import Stop
from marft_jax.run.teachers import open_teaching
from marft_jax.run.training import Training
from marft_jax.setting import Derived, get, settings, with_absolute_paths, words_of
from marft_jax.team.assemble import workflow_of
from marft_jax.team.team_files import Blueprint, load_team
from marft_jax.team.workflows import find_workflow


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
    find_normalizer(config.algo.normalize)  # before a model is loaded
    blueprint = load_team(config.team.file)
    find_workflow(workflow_of(config.team, blueprint))
    run_dir = Path(config.run.dir).absolute()  # an environment may change directories
    check_learns(config, blueprint)
    loggers = find_loggers(config.run.loggers)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(Stop("stopped before a step was finished; start again"))
        processes.start(config.mesh)
        stack.enter_context(disk_errors(run_dir))
        folder = stack.enter_context(own_directory(run_dir))
        where = "a rehearsal" if rehearses else config.run.dir
        run = _open(stack, config, blueprint, loggers, stop, folder, where)
        try:
            yield run
        except Stopped:
            run.checkpoints.flush()
            run.reporter.event(stopped(run))


def _open(
    stack: contextlib.ExitStack,
    config: Config,
    blueprint: Blueprint,
    loggers: list[MakeWriter],
    stop: Stop,
    folder: Path,
    where: str,
) -> Training:
    source = open_source(stack, config, "train")
    curriculum = Curriculum(source, config.env)
    evaluation = PeriodicEvaluation(stack, config)
    workflow = workflow_of(config.team, blueprint)
    learns_from = inputs.inputs_of(config, workflow, blueprint.agents)
    inputs.check_unchanged(Path(config.run.dir), learns_from)
    pipeline = Pipeline(ahead=config.rollout.lag > 0)
    session = open_session(config, blueprint, stop=stop, collective=pipeline.collective)
    derived = _derived(config, session.config)
    config, team = session.config, session.team
    learner = make_learner(session, open_teaching(session, blueprint))
    guard = Guard(config.guard, team.names, folder / "transcripts" / "guard.jsonl")
    checkpoints = stack.enter_context(open_checkpoints(session))
    state, news = resume(session, learner, checkpoints, guard)
    session.date(checkpoints.identity["started"])
    done, is_lead = int(state.step), processes.is_lead()
    goes_on = done < config.run.steps
    if goes_on:
        news += [] if done else set_aside(folder)
        write_settings(folder, config, blueprint)
        inputs.write(folder, learns_from)
    used = loggers if goes_on and is_lead else []
    console = Console(highlight=False, quiet=not is_lead)
    reporter = open_reporter(folder, config.run.steps, used, done, console)
    reporter = stack.enter_context(reporter)
    news += [warning] if (warning := reuses_samples(config.algo)) else []
    news += [*derived, *_objects(config)]
    if not session.sampler.capabilities.repeats:
        news.append("the sampler does not repeat: what is sampled again is sampled anew")
    for base in session.bases.values():
        adapted = lora.counts(base.config, config.lora.targets)
        news.append(f"matrices with adapters in {base.source}: {adapted}")
        if base.config.recurrent:
            news.append(
                f"{base.source} has layers with a recurrent state: in the update packed sequences "
                "share no prefixes, and a prompt is reused up to a multiple of 64 tokens"
            )
    for line in [_greeting(session, state, where), *news]:
        reporter.event(line)
    threads = stack.enter_context(DaemonThreads())
    compilations = stack.enter_context(Compilations())
    stack.enter_context(pipeline)
    run = Training(
        session=session,
        learner=learner,
        source=source,
        curriculum=curriculum,
        state=state,
        guard=guard,
        checkpoints=checkpoints,
        schedule=Schedule(config.run),
        evaluation=evaluation,
        compilations=compilations,
        reporter=reporter,
        pipeline=pipeline,
        threads=threads,
        stop=stop,
        folder=folder,
    )
    # other processes come to a stop when their episodes are played
    grace_s = config.mesh.wait_seconds if jax.process_count() > 1 else None
    stop.protect(functools.partial(save_and_close, run), grace_s)
    run.announce(done, "compiling")
    return run


def check_learns(config: Config, blueprint: Blueprint) -> None:
    """Raises ``BadInput`` for a step reward that is not found, an agent whose samples teach
    nothing, and a length penalty of every action."""
    at, names = config.algo.branch_at, [profile.name for profile in blueprint.agents]
    if at not in ("random", "every") and not set(at.split(",")) <= set(names):
        raise BadInput(
            f"--algo.branch_at: expected random, every, or agents among {', '.join(names)}, got "
            f"{at!r:.60}"
        )
    has_teachers, learns_from_them = any(blueprint.teachers), config.algo.teacher_coef > 0
    if has_teachers != learns_from_them and not config.algo.recorded:
        got = "no agent that learns with one" if learns_from_them else config.algo.name
        raise BadInput(
            f"teacher: expected `teacher:` in the team file together with --algo.name distill, got "
            f"{got}; add or remove one of them"
        )
    if config.algo.step_reward is not None:
        find_step_reward(config.algo.step_reward)
    for profile in blueprint.agents:
        if profile.reward is not None:
            find_step_reward(profile.reward)
        learns = profile.learns and not config.algo.recorded
        sampling = profile.sampling(config.team)
        if learns and config.algo.overlong_buffer > sampling.max_new_tokens:
            most, got = sampling.max_new_tokens, config.algo.overlong_buffer
            raise BadInput(
                f"--algo.overlong_buffer: expected at most {most}, the token limit of agent "
                f"{profile.name!r}, got {got}, with which every action is penalised; lower it"
            )
        if learns and sampling.temperature == 0:
            raise BadInput(
                f"agent {profile.name!r}: expected a temperature above 0 in training, got 0: "
                "greedy samples teach nothing; raise --team.temperature, or its own"
            )


def _derived(given: Config, config: Config) -> Iterator[str]:
    """Yields a line on settings that nobody gave and that follow from the base."""
    found = [
        f"--{key} {' '.join(words_of(key, value))}"
        for key, _ in settings(config)
        if isinstance(value := get(config, key), Derived) or value != get(given, key)
    ]
    if found:
        yield f"{FROM_BASE}{', '.join(found)}"


def _objects(config: Config) -> Iterator[str]:
    """Yields a line on settings that are objects of this process; the team is saved as a file."""
    given = [key for key, _ in settings(config) if PYTHON in str(get(config, key))]
    if keys := [f"--{key}" for key in given if key != "team.file"]:
        yield (
            f"{', '.join(keys)}: an object of Python, which no command can load; continue, "
            "evaluate and export this run with the same calls in Python"
        )


def _greeting(session: Session, state: TrainState, where: str) -> str:
    """Returns the first line of a run: who plays what, on which devices, and ``where`` the run is
    saved."""
    start = int(state.step)
    config, shape = session.config, "x".join(map(str, session.mesh.shape.values()))
    device = session.mesh.devices.flat[0].device_kind
    if apart := config.mesh.rollout:
        size = sum(x.nbytes for x in jax.tree.leaves(state.adapters)) / 1e6
        device += f", plays on {'x'.join(map(str, apart))} others ({size:.2g} MB of adapters each)"
        device += ", learns on"
    device += f" mesh {shape}"
    who = f"{', '.join(session.team.names)} ({session.team.workflow})"
    on = ", ".join(dict.fromkeys(base.source for base in session.bases.values()))
    what = f"{who} on {on}, {config.env.name}"
    begin = f"continuing after step {start}" if start else "from the beginning"
    return f"{config.algo.name}: {what}; {device}; {where}, {begin}"
