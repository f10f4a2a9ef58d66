"""Settings of samplers by name, and what a sampler of a user's own is made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias, cast

import numpy as np

from marft_jax.errors import BadInput, described, place
from marft_jax.plugins import extras_of, load_extra, load_plugin, settings_of, shown
from marft_jax.sampling.protocol import Sampler
from marft_jax.settings.config import Rollout, RolloutSettings

NAMES = ("engine", *extras_of("sampler"))
"""The samplers that have a name: our engine, and those of extras."""
_METHODS = [name for name in vars(Sampler) if not name.startswith("_")]

Matrices: TypeAlias = "Mapping[str, Mapping[str, np.ndarray]]"
"""LoRA matrices by name, ``{"q": {"a", "b"}, ...}``: with an axis for the adapters of a base in
front, see ``models.lora.Adapters``, or of one adapter."""


Scored = tuple[np.ndarray, np.ndarray, int, float]
"""An action to score: the ids of prompt and action; the place of its adapter among all that are
given, -1 for the base without an adapter; the temperature, of which 0 counts as 1."""


class AdapterTools(NamedTuple):
    """What a sampler elsewhere needs of the adapters of a base, on this process's own devices.

    Attributes:
        draw: makes new adapters, which change nothing.
        write: writes one adapter as a folder of peft, or with tensors of each routed expert on its
            own; raises ``BadInput`` where peft cannot name its matrices.
        score: log-probs of actions, each under one of several stacks of adapters, one after
            another.
    """

    draw: Callable[[], Matrices]
    write: Callable[[Path, Matrices, bool], None]
    score: Callable[[Sequence[Matrices], Sequence[Scored]], list[np.ndarray]]


class SampledBase(NamedTuple):
    """A base whose agents a sampler serves.

    Attributes:
        source: the model, as ``--model.base`` or the team file names it.
        adapters: name of each adapter: its only agent's, its group's, or ``team``.
        eos_ids: tokens that end an action.
        decode: turns ids into text, in which stop texts are searched.
        context: longest prompt and action together, in tokens.
        longest: longest action, in tokens.
        vocabulary: number of token ids.
        tools: writes, draws and scores adapters.
    """

    source: str
    adapters: tuple[str, ...]
    eos_ids: tuple[int, ...]
    decode: Callable[[list[int]], str]
    context: int
    longest: int
    vocabulary: int
    tools: AdapterTools


class SamplerSetup(NamedTuple):
    """What a sampler is made from.

    Attributes:
        settings: the section ``rollout``: of the class's ``Settings``, if it declares them.
        bases: by their names.
        seed: ``run.seed``.
        alpha: an adapter's product is multiplied by alpha / rank.
        folder: the run directory; None where there is none.
        process: the run and the process in it, the same whenever it is started; "" without a run.
    """

    settings: RolloutSettings
    bases: Mapping[str, SampledBase]
    seed: int
    alpha: float
    folder: Path | None = None
    process: str = ""


def settings_type(name: str) -> type[RolloutSettings]:
    """Finds the type of a sampler's settings. A user's class may declare it as ``Settings``, a
    frozen dataclass that extends ``RolloutSettings``.

    Raises:
        BadInput: there is no such sampler.
    """
    if name == RolloutSettings.sampler:
        return Rollout
    return settings_of(_find(name), f"--rollout.sampler {name}", RolloutSettings, RolloutSettings)


def make_sampler(setup: SamplerSetup) -> Sampler:
    """Makes a sampler of a user's own.

    Raises:
        BadInput: the class raised, or what it made lacks a method of ``Sampler``.
    """
    name = setup.settings.sampler
    if name in NAMES:
        return _find(name)(setup)
    try:
        made = _find(name)(setup)
    except (Exception, SystemExit) as error:
        raise BadInput(f"--rollout.sampler {name}: {described(error)}{place(error)}") from error
    if missing := [method for method in _METHODS if not hasattr(made, method)]:
        raise BadInput(
            f"--rollout.sampler {name}: expected the methods of marft_jax.sampling.Sampler, got "
            f"{type(made).__name__} without {', '.join(missing)}"
        )
    return made


def _find(name: str) -> Callable[[SamplerSetup], Sampler]:
    if name in NAMES:
        return load_extra(f"sampler.{name}")
    plugin = load_plugin(name, "--rollout.sampler", NAMES, "Class")
    if not callable(plugin):
        raise BadInput(f"--rollout.sampler {name}: expected a class, got {shown(plugin)}")
    return cast(Callable[[SamplerSetup], Sampler], plugin)
