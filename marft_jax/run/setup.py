"""The base, the team and the sampler of a run, its state, and playing episodes with them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from rich.console import Console

from marft_jax.config import Config, Model, Rollout, Update, with_context
from marft_jax.engine.compiled import Shape
from marft_jax.engine.engine import Engine
from marft_jax.envs.base import EnvSource, Split, make
from marft_jax.errors import BadInput
from marft_jax.interop import initial
from marft_jax.learning import state_parts
from marft_jax.learning.algorithms import find_algorithm
from marft_jax.learning.learner import Learner, TrainState
from marft_jax.learning.settings import LearnerSettings, resolve, resolved
from marft_jax.learning.state_parts import StatePart, find_state_parts
from marft_jax.learning.teaching import Teaching
from marft_jax.models.decoder import DecoderConfig
from marft_jax.models.lora import Adapters, check_targets, named
from marft_jax.models.weights.load import BaseModel, copy_base, load_base
from marft_jax.parallel import compilation, processes
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.plugins import load_extra
from marft_jax.random_keys import Stream
from marft_jax.rollout import rollout as rollout_lib
from marft_jax.run.checkpoints import Checkpoints
from marft_jax.run.compatibility import identity_of
from marft_jax.run.progress import Progress
from marft_jax.sampling.bases import SamplerOfBases
from marft_jax.sampling.protocol import Sampler
from marft_jax.sampling.settings import SampledBase, SamplerSetup, make_sampler
from marft_jax.setting import replaced
from marft_jax.team.assemble import make_team, workflow_of
from marft_jax.team.bases import context_of, models_of
from marft_jax.team.prompts import Team
from marft_jax.team.team_files import Blueprint
from marft_jax.team.workflows import find_workflow
from marft_jax.types import MAIN, Played, Player, Sample


class Session(NamedTuple):
    """The loaded bases, the team on them, and the sampler.

    Attributes:
        config: the settings, with those that follow from the base.
        learning: settings of the learner.
        mesh: the devices that learn, which hold the bases.
        copy_adapters: copies adapters to the devices that only play; None without ``mesh.rollout``.
        stop: true when playing must end.
        collective: runs what all processes must run in one order.
        parts: of the training state, beside those that every run has.
    """

    config: Config
    learning: LearnerSettings
    mesh: Mesh
    bases: dict[str, BaseModel]
    team: Team
    sampler: Sampler
    copy_adapters: Callable[[dict[str, Adapters]], dict[str, Adapters]] | None
    stop: Callable[[], bool]
    collective: processes.Collective
    parts: dict[str, StatePart]

    def date(self, started: int) -> None:
        """Tells chat templates that ask for the date when the run started."""
        for base in self.bases.values():
            base.tokenizer.date(started)


def open_session(
    config: Config,
    blueprint: Blueprint,
    at_once: int | None = None,
    *,
    stop: Callable[[], bool] = lambda: False,
    collective: processes.Collective = lambda work: work(),
) -> Session:
    """Loads the base onto the mesh, and makes the team and the engine.

    Args:
        at_once: the most turns that are sampled together; more slots would stay idle. By default
            the episodes of a training step.
        stop, collective: see ``Session``.

    Raises:
        BadInput: a mesh, a model or a team that does not fit.
    """
    find_workflow(workflow_of(config.team, blueprint))  # before a model is loaded
    use_compilation_cache()
    processes.start(config.mesh)
    meshes = mesh, _ = mesh_lib.make_meshes(config.mesh)
    models = models_of(config.model, blueprint.bases, blueprint.on)
    shapes, contexts = list[DecoderConfig](), dict[str, int]()

    def check(name: str, shape: DecoderConfig) -> None:
        shapes.append(shape)
        contexts[name] = context_of(name, models[name], shape.max_position)
        if len(shapes) == len(models):
            check_targets(shapes, config.lora.targets)

    bases = {
        name: load_onto(meshes, model, functools.partial(check, name))
        for name, model in models.items()
    }
    config = with_context(config, contexts.get(MAIN, config.model.context))
    talk = {name: (base.tokenizer, contexts[name]) for name, base in bases.items()}
    team = make_team(config.team, config.lora.mode, blueprint, talk)
    _check_lengths(team)
    at_once = at_once or _at_once(config.algo)
    playing = mesh_lib.local_mesh(meshes[1])
    places = mesh_lib.parts(playing, config.mesh.bases, len(bases))
    if isinstance(config.rollout, Rollout):
        sampler: Sampler = SamplerOfBases(
            {
                name: _open_engine(config, config.rollout, (mesh, own), name, base, team, at_once)
                for (name, base), own in zip(bases.items(), places, strict=True)
            }
        )
    else:
        sampler = make_sampler(_sampler_setup(config, bases, team))
    known = {name: (base.source, base.config) for name, base in bases.items()}
    targets = itertools.chain(*(named(shape, config.lora.targets) for shape in shapes))
    config = replaced(config, "lora.targets", tuple(dict.fromkeys(targets)))
    learning = resolve(config, known, {name: base.lr for name, base in blueprint.bases.items()})
    config = resolved(config, learning)
    parts = find_state_parts(config, team)
    copied = functools.partial(mesh_lib.placed, mesh=playing)
    copied = copied if config.mesh.rollout else None
    how = copied, stop, collective, parts
    return Session(config, learning, mesh, bases, team, sampler, *how)


def make_learner(session: Session, teaching: Teaching | None = None) -> Learner:
    """Makes the learner of a session's team."""
    algorithm = find_algorithm(session.config.algo.name)
    how = session.team, algorithm, session.mesh, teaching
    return Learner(session.learning, session.bases, *how)


def fresh_state(session: Session, learner: Learner) -> TrainState:
    """Makes the state before the first step, without adapters that the settings name."""
    return state_parts.begin(session.parts, learner.init())


def load_onto(
    meshes: tuple[Mesh, ...], model: Model, check: Callable[[DecoderConfig], object] | None = None
) -> BaseModel:
    """Loads a base onto the devices of the first mesh, with a bar of progress.

    Args:
        check: is given the shape before weights are read, and may raise.
    """
    console = Console(stderr=True, highlight=False, quiet=not processes.is_lead())
    with Progress(f"loading {model.base}", console, " MiB") as progress:

        def report(done: int, total: int) -> None:
            progress(done >> 20, total >> 20)

        def check_shape(shape: DecoderConfig) -> None:
            if check is not None:
                check(shape)
            for each in meshes:
                mesh_lib.check_heads(each, shape.heads)

        place, platform = mesh_lib.placer(meshes[0]), meshes[0].devices.flat[0].platform
        base = load_base(model, place, platform, report, check_shape)
    base.tokenizer.date(processes.of_first(base.tokenizer.started))
    return base


def _sampler_setup(config: Config, bases: Mapping[str, BaseModel], team: Team) -> SamplerSetup:
    """What a sampler that is not ours is made from."""

    def setup_of(name: str, base: BaseModel) -> SampledBase:
        members = [i for i, own in enumerate(team.bases) if own == name]
        first = [min(i for i in members if team.owners[i] == n) for n in range(team.adapters[name])]
        return SampledBase(
            source=base.source,
            adapters=tuple(team.names[i] for i in first),
            eos_ids=tuple(base.tokenizer.eos_ids),
            decode=base.tokenizer.decode,
            context=max(team.contexts[i] for i in members),
            longest=max(team.sampling[i].max_new_tokens for i in members),
        )

    own = {name: setup_of(name, base) for name, base in bases.items()}
    return SamplerSetup(config.rollout, own, config.run.seed, config.lora.alpha)


def _open_engine(
    config: Config,
    settings: Rollout,
    meshes: tuple[Mesh, Mesh],
    name: str,
    base: BaseModel,
    team: Team,
    at_once: int,
) -> Engine:
    members = [i for i, own in enumerate(team.bases) if own == name]
    learning, playing = mesh_lib.local_mesh(meshes[0]), meshes[1]
    params = mesh_lib.localize(base.params, learning if config.mesh.rollout else playing)
    if config.mesh.rollout:
        params = copy_base(params, mesh_lib.placer(playing))
    shape = Shape(
        slots=min(settings.slots, processes.share(at_once, jax.process_count())),
        chunk=settings.chunk,
        context=max(team.contexts[i] for i in members),
        longest=max(team.sampling[i].max_new_tokens for i in members),
    )
    return Engine(
        base.config,
        base.graphdef,
        params,
        playing,
        shape,
        eos_ids=base.tokenizer.eos_ids,
        seed=config.run.seed,
        alpha=config.lora.alpha,
        decode=base.tokenizer.decode,
        name=name,
        reuse=settings.reuse,
        forms=lambda form: load_extra("form.constraint")(
            base.tokenizer, base.config.vocab_size, form
        ),
    )


def _at_once(algo: Update) -> int:
    """The most samples of a training step that are played together: the branches of a turn are."""
    return algo.episodes * max(1, algo.branches)


def use_compilation_cache() -> None:
    """Caches compiled programs on disk, so that a second start does not compile them again; and
    says which program is being compiled where that takes long."""
    compilation.watch()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(Path(cache) / "marft_jax" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def restore_state(
    session: Session, run: str | Path | None, step: int | str = "latest"
) -> TrainState:
    """Returns the state after a step of ``run``, or without a run the initial state.

    Args:
        step: its number, ``best`` or ``latest``.

    Raises:
        BadInput: the run has no such checkpoint, or the checkpoint is of another base or team.
    """
    fresh = fresh_state(session, make_learner(session))
    if run is None:
        if step != "latest":
            raise BadInput(f"--step {step}: only a --run has steps; leave it out")
        return initial_state(session, fresh)
    identity = identity_of(session.config, session.bases, session.team)
    with Checkpoints(run, identity, session.config.run.keep) as checkpoints:
        saved = checkpoints.restore(fresh, step)
        if saved is None:
            there = ", ".join(map(str, checkpoints.steps)) or "none"
            raise BadInput(
                f"--run {run} --step {step}: expected best, latest, or a step with an intact "
                f"checkpoint; there are: {there}"
            )
    session.date(checkpoints.identity["started"])
    return saved.state


def initial_state(session: Session, fresh: TrainState) -> TrainState:
    """Returns the state that a training begins with.

    ``lora.init`` may be a run directory, whose newest adapters are read, or ``hub:owner/name``.

    Raises:
        BadInput: as ``interop.initial.initial_adapters``; or the run has no intact checkpoint.
    """
    settings, saved = session.config.lora, None
    run = settings.init
    if run is not None and run.startswith("hub:"):
        run = str(load_extra("lora.hub")(run))
        settings = dataclasses.replace(settings, init=run)
    if run is not None and (Path(run).expanduser() / "checkpoints").is_dir():
        with Checkpoints(Path(run).expanduser(), {}, keep=1) as checkpoints:
            saved = checkpoints.restore_adapters()
        if saved is None:
            raise BadInput(f"--lora.init {run}: it has no intact checkpoint yet")
    models = {name: base.config for name, base in session.bases.items()}
    adapters = initial.initial_adapters(session.team, settings, fresh.adapters, saved, models)
    state = fresh.with_adapters(adapters)
    return state_parts.begin(session.parts, state).begun()


def open_source(stack: contextlib.ExitStack, config: Config, split: Split) -> EnvSource:
    """Opens the environment; the stack closes it."""
    source = make(config.env, split)
    stack.callback(source.close)
    return source


def make_rollout(
    session: Session,
    source: EnvSource,
    threads: Executor,
    report: Callable[[int], None] | None = None,
    stream: Stream = Stream.TRAINING,
    cancelled: Callable[[], bool] = lambda: False,
) -> Player:
    """Makes the player of the session's team in an environment.

    Args:
        report: is called with the number of episodes that are over.
        cancelled: true when playing must end, besides ``Session.stop``.
    """
    settings = session.config.rollout
    rollout = rollout_lib.Rollout(
        session.sampler,
        session.team,
        find_workflow(session.team.workflow),
        source.create,
        threads,
        max_failed=settings.max_failed_fraction,
        step_seconds=settings.step_seconds,
        max_tool_calls=session.config.team.max_tool_calls,
        max_turns=settings.max_turns,
        snapshots=session.config.algo.branches > 0 and stream == Stream.TRAINING,
        stop=lambda: session.stop() or cancelled(),
        report=report,
        stream=stream,
    )
    return processes.play_on_all(rollout, session.collective)


def play_held_out(
    session: Session,
    source: EnvSource,
    threads: Executor,
    sample: int,
    episodes: int,
    start: int = 0,
    report: Callable[[int], None] | None = None,
    step: int = 0,
) -> Played:
    """Plays the held-out tasks from ``start`` to ``episodes`` at the evaluation's temperature.

    The samples of a task depend on its number, ``sample`` and ``step`` alone.
    """
    temperature = session.config.eval.temperature
    sampling = tuple(s._replace(temperature=temperature) for s in session.team.sampling)
    quiet = session._replace(team=session.team._replace(sampling=sampling))
    count = episodes if source.size is None else min(episodes, source.size)
    rollout = make_rollout(quiet, source, threads, report, Stream.EVALUATION)
    return rollout.play([Sample(task, task, sample) for task in range(start, count)], step)


def _check_lengths(team: Team) -> None:
    of_agents = zip(team.profiles, team.sampling, team.contexts, strict=True)
    for profile, sampling, context in of_agents:
        if sampling.max_new_tokens >= context:
            raise BadInput(
                f"agent {profile.name!r}: max_new_tokens: expected less than {context}, the "
                f"context of its base, got {sampling.max_new_tokens}; lower it"
            )
