"""The lines that a training begins with, and the commands that it prints at its end."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import jax

from marft_jax.learning.settings import reuses_samples
from marft_jax.learning.state import TrainState
from marft_jax.models import lora
from marft_jax.plugins import PYTHON
from marft_jax.run.models import TeamModels
from marft_jax.run.reporters import FROM_BASE
from marft_jax.sampling.protocol import Capabilities
from marft_jax.settings.config import Config
from marft_jax.settings.setting import get, is_address, settings
from marft_jax.team.workflows import NEED_ENV


def greeting(models: TeamModels, state: TrainState, where: str) -> str:
    """Returns the first line of a run: who plays what, on which devices, and ``where`` the run is
    saved."""
    start, config, mesh = int(state.step), models.config, models.devices.learning
    device = mesh.devices.flat[0].device_kind
    if apart := config.mesh.rollout:
        size = sum(x.nbytes for x in jax.tree.leaves(state.adapters)) / 1e6
        device += f", plays on {'x'.join(map(str, apart))} others ({size:.2g} MB of adapters each)"
        device += ", learns on"
    device += f" mesh {'x'.join(map(str, mesh.shape.values()))}"
    who = f"{', '.join(models.team.names)} ({models.team.workflow})"
    on = ", ".join(dict.fromkeys(base.source for base in models.bases.values()))
    what = f"{who} on {on}, {config.env.name}"
    begin = f"continuing after step {start}" if start else "from the beginning"
    return f"{config.algo.name}: {what}; {device}; {where}, {begin}"


def notices(models: TeamModels, able: Capabilities) -> Iterator[str]:
    """Yields what a user should know of a run before its first step.

    Args:
        able: what the sampler can do.
    """
    config = models.config
    if warning := reuses_samples(config.algo):
        yield warning
    if models.derived:
        yield f"{FROM_BASE}{', '.join(models.derived)}"
    if objects := _objects(config):
        yield (
            f"{', '.join(objects)}: an object of Python, which no command can load; continue, "
            "evaluate and export this run with the same calls in Python"
        )
    if not able.repeats:
        yield "the sampler does not repeat: what is sampled again is sampled anew"
    for base in models.bases.values():
        adapted = lora.counts(base.config, config.lora.targets)
        yield f"matrices with adapters in {base.source}: {adapted}"
        if base.config.recurrent:
            yield (
                f"{base.source} has layers with a recurrent state: prefixes are shared up to a "
                f"multiple of {base.config.branches} tokens, in sampling and in the update"
            )


def _objects(config: Config) -> list[str]:
    """Returns the flags of settings that are objects of this process; the team is saved."""
    keys = (key for key, _ in settings(config) if key != "team.file")
    return [f"--{key}" for key in keys if PYTHON in str(get(config, key))]


def first_step_notice(config: Config, programs: int, first: int) -> str:
    """Says that a run's first step compiles, how many programs there can be, and where they are
    kept for the next start."""
    most = f"; playing compiles at most {programs} programs in all, as prompts grow"
    played = "" if config.algo.recorded or not programs else most
    kept = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    where = f"; kept in {kept}" if kept else ""
    return f"compiling ... (step {first} takes longer than those after it{played}{where})"


def next_steps(config: Config, workflow: str) -> Iterator[str]:
    """Yields the lines that a finished run prints last.

    Args:
        workflow: the workflow that was played; some offer no chat.
    """
    steps, place = config.run.steps, config.run.dir
    run = shlex.quote(f"./{place}" if place.startswith("-") else place)
    before = "marft " if Path(sys.argv[0]).name == "marft" else "python -m marft_jax."
    yield f"done: {steps} steps in {place}; to go on: --run.steps {2 * steps}"
    if config.algo.recorded:
        flags = f"--lora.init {run} --run.dir ANOTHER"
        yield f"next, with the settings of this start: {before}train {flags}"
    page = shlex.quote(str(Path("" if is_address(place) else place) / "report.html"))
    commands = {
        "held-out tasks": f"{before}evaluate --run {run}",
        "ask the team": f"{before}chat --run {run}",
        "what it wrote": f"{before}report --run {run} --out {page}",
    }
    if _objects(config):  # no command can load them
        commands["held-out tasks"] = f"marft_jax.evaluate_team({place!r})"
        commands["ask the team"] = f"marft_jax.LoadedTeam({place!r}).ask(QUESTION)"
    if workflow in NEED_ENV:
        del commands["ask the team"]
    commands["to serve it"] = "marft_jax/README.md#export-and-serve"
    yield from (f"  {task + ':':<16}{command}" for task, command in commands.items())
