"""Loads the bases of a team onto the devices, and makes the team on them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from rich.console import Console

from marft_jax.errors import BadInput, reason
from marft_jax.learning.settings import LearnerSettings, resolve, resolved
from marft_jax.learning.state_parts import StatePart, find_state_parts
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.models.lora import Adapters, check_rank, check_targets, named
from marft_jax.models.weights.load import BaseModel, load_base
from marft_jax.parallel import compilation, processes
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.run import memory
from marft_jax.run.reporters import Progress
from marft_jax.settings import config as config_lib
from marft_jax.settings.config import Config, Model, with_context
from marft_jax.settings.setting import Derived, get, replaced, settings, words_of
from marft_jax.team.assemble import make_team
from marft_jax.team.bases import context_of, models_of
from marft_jax.team.prompts import Team
from marft_jax.team.team_files import Blueprint
from marft_jax.types import MAIN

LOGGER = logging.getLogger("marft_jax")


class Devices(NamedTuple):
    """The devices that learn, which hold the bases, and those that play: the same, unless
    ``mesh.rollout`` names some that only play."""

    learning: Mesh
    playing: Mesh

    @property
    def are_apart(self) -> bool:
        """True where the devices that play only play."""
        return self.playing is not self.learning

    @property
    def copy_adapters(self) -> Callable[[dict[str, Adapters]], dict[str, Adapters]] | None:
        """Copies adapters to the devices that only play; None where there are none."""
        playing = self.playing.local_mesh
        return functools.partial(mesh_lib.placed, mesh=playing) if self.are_apart else None


class TeamModels(NamedTuple):
    """A team on its loaded bases, and the settings that follow from them.

    Attributes:
        config: every setting, with those that follow from the bases.
        derived: the flags of settings that nobody gave, and that follow from the bases.
        blueprint: the team as its file has it.
        learning: settings of the learner, with the learning rate on each base.
        parts: of the training state, beside those that every run has.
    """

    config: Config
    derived: list[str]
    blueprint: Blueprint
    devices: Devices
    bases: dict[str, BaseModel]
    team: Team
    learning: LearnerSettings
    parts: dict[str, StatePart]

    def date(self, started: int | None) -> None:
        """Tells chat templates that ask for the date when the run started; without a run the date
        of today, or where no template asks for one, the same always."""
        if started is None:
            today = processes.of_first(int(time.time()) // 86400 * 86400)
            started = today if any(b.tokenizer.shows_date for b in self.bases.values()) else 0
        for base in self.bases.values():
            base.tokenizer.date(started)


@contextlib.contextmanager
def open_models(
    config: Config, blueprint: Blueprint, trains_on: Devices | None = None
) -> Iterator[TeamModels]:
    """Opens the devices, loads the bases onto them, and makes the team. When it is closed, it holds
    no weights any more.

    Raises:
        BadInput: a mesh, a model or a team that does not fit.
    """
    given, devices = config, trains_on or open_devices(config.mesh)
    bases, contexts = load_bases(config, blueprint, devices, trains=bool(trains_on))
    config = with_context(config, contexts.get(MAIN, config.model.context))
    talk = {name: (base.tokenizer, contexts[name]) for name, base in bases.items()}
    team = make_team(config.team, config.lora.mode, blueprint, talk)
    targets = config.lora.targets
    adapted = itertools.chain(*(named(base.config, targets) for base in bases.values()))
    config = replaced(config, "lora.targets", tuple(dict.fromkeys(adapted)))
    known = {name: (base.source, base.config) for name, base in bases.items()}
    learning = resolve(config, known, {name: base.lr for name, base in blueprint.bases.items()})
    config = resolved(config, learning)
    parts, derived = find_state_parts(config, team), [*_derived(given, config)]
    try:
        yield TeamModels(config, derived, blueprint, devices, bases, team, learning, parts)
    finally:
        bases.clear()


def open_devices(mesh: config_lib.Mesh) -> Devices:
    """Joins the processes, and makes the meshes over their devices. Compiled programs are cached on
    disk, so that a second start does not compile them again.

    Raises:
        BadInput: there are no such devices.
    """
    compilation.watch()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    usual = str(Path(cache) / "marft_jax" / "xla")
    programs = jax.config.jax_compilation_cache_dir or usual  # pyright: ignore[reportAttributeAccessIssue]
    try:
        os.makedirs(programs, exist_ok=True)
        tempfile.TemporaryFile(dir=programs).close()
    except OSError as error:
        LOGGER.warning(
            "%s: expected a folder that can be written, got: %s; each start compiles all programs "
            "anew: name another one in JAX_COMPILATION_CACHE_DIR", programs, reason(error),
        )  # fmt: skip
        programs = None
    jax.config.update("jax_compilation_cache_dir", programs)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    processes.start(mesh)
    return Devices(*mesh_lib.make_meshes(mesh))


def load_bases(
    config: Config, blueprint: Blueprint, devices: Devices, trains: bool
) -> tuple[dict[str, BaseModel], dict[str, int]]:
    """Loads each base that an agent is on; its context and its matrices are checked before, and
    those of a training also for their rank and the memory.

    Returns:
        The bases, and the context of each: longest prompt and action together, in tokens.
    """
    models = models_of(config.model, blueprint.bases, blueprint.on)
    shapes, contexts = list[DecoderConfig](), dict[str, int]()
    lora, needed = config.lora, Counter[str]()

    def check(name: str, shape: DecoderConfig) -> None:
        shapes.append(shape)
        contexts[name] = context_of(name, models[name], shape.max_position)
        if len(shapes) == len(models):
            check_targets(shapes, lora.targets)
        if trains:
            check_rank(shape, lora.targets, lora.rank)
            members = [
                a for a, on in zip(blueprint.agents, blueprint.on, strict=True) if on == name
            ]
            where, context = devices.learning, contexts[name]
            needed.update(memory.least(config, models[name], shape, context, members, where))
            line = memory.check(needed, where, len(blueprint.agents), lora.rank)
            if line and len(shapes) == len(models) and processes.is_lead():
                print(line, flush=True)  # stderr has one line where a start is refused

    bases = {
        name: load_onto(devices, model, functools.partial(check, name), name)
        for name, model in models.items()
    }
    return bases, contexts


def load_onto(
    meshes: tuple[Mesh, ...],
    model: Model,
    check: Callable[[DecoderConfig], object] | None = None,
    name: str = MAIN,
) -> BaseModel:
    """Loads a base onto the devices of the first mesh, with a bar of progress.

    Args:
        check: is given the shape before weights are read, and may raise.
        name: its name in the team file, ``MAIN`` for that of the settings.

    Raises:
        BadInput: it cannot be loaded; the key of the team file is named where one decides it.
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
        try:
            base = load_base(model, place, platform, report, check_shape)
        except BadInput as error:
            if name == MAIN:
                raise
            text = str(error).replace("--model.base", "--model.model")
            raise BadInput(text.replace("--model.", f"--team.file: bases.{name}.")) from error
    base.tokenizer.date(processes.of_first(base.tokenizer.started))
    return base


def _derived(given: Config, config: Config) -> Iterator[str]:
    """Yields the flags of settings that nobody gave and that follow from the bases."""
    for key, _ in settings(config):
        value = get(config, key)
        if isinstance(value, Derived) or value != get(given, key):
            yield f"--{key} {' '.join(words_of(key, value))}"
