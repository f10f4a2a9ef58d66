"""Settings of samplers by name, and what a sampler of a user's own is made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

from marft_jax.config import Rollout, RolloutSettings
from marft_jax.errors import BadInput, described, place
from marft_jax.plugins import load_plugin, settings_of, shown
from marft_jax.sampling.protocol import Sampler

SETTINGS: dict[str, type[RolloutSettings]] = {"engine": Rollout}
"""Name to settings of the built-in samplers."""
_METHODS = ("load", "submit", "cancel", "step", "release", "busy", "capabilities")


class SampledBase(NamedTuple):
    """A base whose agents a sampler serves.

    Attributes:
        source: the model, as ``--model.base`` or the team file names it.
        adapters: for each adapter, its agent; in mode shared the first of its agents.
        eos_ids: tokens that end an action.
        decode: turns ids into text, in which stop texts are searched.
        context: longest prompt and action together, in tokens.
        longest: longest action, in tokens.
    """

    source: str
    adapters: tuple[str, ...]
    eos_ids: tuple[int, ...]
    decode: Callable[[list[int]], str]
    context: int
    longest: int


class SamplerSetup(NamedTuple):
    """What a sampler is made from.

    Attributes:
        settings: the section ``rollout``: of the class's ``Settings``, if it declares them.
        bases: by their names.
        seed: ``run.seed``.
        alpha: an adapter's product is multiplied by alpha / rank.
    """

    settings: RolloutSettings
    bases: Mapping[str, SampledBase]
    seed: int
    alpha: float


def settings_type(name: str) -> type[RolloutSettings]:
    """Finds the type of a sampler's settings. A user's class may declare it as ``Settings``, a
    frozen dataclass that extends ``RolloutSettings``.

    Raises:
        BadInput: there is no such sampler.
    """
    if name in SETTINGS:
        return SETTINGS[name]
    return settings_of(_find(name), f"--rollout.sampler {name}", RolloutSettings, RolloutSettings)


def make_sampler(setup: SamplerSetup) -> Sampler:
    """Makes a sampler of a user's own.

    Raises:
        BadInput: the class raised, or what it made lacks a method of ``Sampler``.
    """
    name = setup.settings.sampler
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
    found = load_plugin(name, "--rollout.sampler", SETTINGS, "Class")
    if not callable(found):
        raise BadInput(f"--rollout.sampler {name}: expected a class, got {shown(found)}")
    return cast(Callable[[SamplerSetup], Sampler], found)
