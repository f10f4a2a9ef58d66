"""Merges the settings of a saved run, files, flags and Python into one validated ``Config``.

Each of these is a layer: settings in words, as the command line has them. The later layer wins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from marft_jax import config as config_lib
from marft_jax import sections as sections_lib
from marft_jax.config import Config
from marft_jax.errors import BadInput
from marft_jax.formats import documents
from marft_jax.learning import settings as algorithms
from marft_jax.run.place import place_of
from marft_jax.sections import Words
from marft_jax.setting import from_words, properties, suggestion, words_of


def read_file(file: str) -> Words:
    """Reads a YAML file; a relative team file is looked for beside it, then in this folder."""
    words = flatten(documents.read(file, "--config"), file)
    for name in words.get("team.file", ())[:1]:
        if os.path.isfile(beside := Path(file).parent / name):
            words["team.file"] = [str(beside)]
    return words


def read_run(run: str) -> Words:
    """Reads the settings and the team of a run directory, without the addresses of processes."""
    folder = place_of(run).path
    settings, team = folder / "config.yaml", folder / "team.yaml"
    if not os.path.isfile(settings):
        raise BadInput(f"--run {run}: expected a run directory with config.yaml, found none")
    if not (saved := read_file(str(settings))):
        raise BadInput(f"{settings}: expected the settings of a run, found none; copy it again")
    own = {"run.dir": [run]} | ({"team.file": [str(team)]} if os.path.isfile(team) else {})
    return {key: value for key, value in (saved | own).items() if key not in _NOT_KEPT}


def merge(layers: Sequence[Words]) -> Words:
    """Merges layers; the later one wins."""
    return dict(item for words in layers for item in words.items())


def flatten(tree: Any, file: str, spell: Callable[[str, Any], list[str]] = words_of) -> Words:
    """Turns sections of settings into words by ``section.name``.

    Args:
        tree: sections by name: mappings, or dataclasses of which every field counts as given.
        file: the file that the tree is from, for messages.
        spell: turns ``section.name`` and its value into words.
    """
    if not isinstance(tree or {}, dict):
        raise BadInput(f"--config {file}: expected sections like `run:`, got {tree!r:.80}")
    flat: Words = {}
    for section, settings in (tree or {}).items():
        if is_dataclass(settings):
            settings = {field.name: getattr(settings, field.name) for field in fields(settings)}
        if not isinstance(settings, dict):
            raise BadInput(f"{file}: expected settings below {section!r:.80}, got {settings!r:.80}")
        for key, value in settings.items():
            if isinstance(value, dict):
                raise BadInput(f"{file}: expected one value for {section}.{key}, got {value!r:.80}")
            flat[f"{section}.{key}"] = spell(f"{section}.{key}", value)
    return flat


def to_train(layers: Sequence[Words]) -> Config:
    """Builds the config of a training; if its run has begun, the saved settings are layer 0."""
    run = [*merge(layers).get("run.dir", []), config_lib.Run.dir][0]
    folder = place_of(run).path
    is_run = run.strip() and os.path.isfile(folder / "config.yaml")
    if not is_run or not any(p.name.isdecimal() for p in folder.glob("checkpoints/*")):
        return resolve(layers)
    before = read_run(run)
    config = resolve([before, *layers])
    given, kept = (Path(one.lora.init or "") for one in (config, _build(before)))
    if given.absolute() != kept.absolute():
        raise BadInput(
            f"--lora.init {config.lora.init}: {run} has begun and goes on from its checkpoint; "
            "leave it out, or name another --run.dir"
        )
    return config


def resolve(layers: Sequence[Words]) -> Config:
    """Merges layers, without what a later layer made unknown by another choice of environment,
    algorithm or sampler, and validates the config.

    Raises:
        BadInput: a setting is unknown, has a wrong value, or contradicts another.
    """
    words = merge(layers)
    kinds = sections_lib.kinds(words).items()
    known = [f"{section}.{field.name}" for section, kind in kinds for field in fields(kind)]
    for key in [key for key in words if key not in known]:
        if not (owners := sections_lib.owners(key)):
            raise BadInput(f"unknown setting {key!r:.80}{suggestion(key, known)}")
        section, last = key.partition(".")[0], max(i for i, one in enumerate(layers) if key in one)
        chosen = sections_lib.chosen(section, words)
        if chosen == sections_lib.chosen(section, merge(layers[: last + 1])):
            mine = f"--{sections_lib.UNIONS[section].chooser} {chosen}"
            raise BadInput(
                f"--{key}: unknown setting for {mine}; it belongs to {' and '.join(owners)}, got "
                f"{' '.join(words[key]):.60}"
            )
    config = _build(words)
    config_lib.validate(config)
    algorithms.validate(config.algo, config.critic)
    return config


def _build(words: Words) -> Config:
    """Builds the config from words; raises ``BadInput`` for the first wrong value."""
    sections = sections_lib.kinds(words).items()
    try:
        config = Config(**{name: from_words(name, kind, words) for name, kind in sections})
    except BadInput as error:
        raise BadInput(f"{error}{_takers(str(error), words)}") from error
    return config_lib.fit_base(config, words)


def _takers(fault: str, words: Words) -> str:
    """Names the environments or algorithms whose setting has the refused value, as a suffix."""
    if (found := re.match(r"--((\w+)\.(\w+)): expected one of", fault)) is None:
        return ""
    (key, section, name), value = found.groups(), " ".join(words[found[1]])
    owners = sections_lib.owners(key)
    takes = [o for o, kind in owners.items() if value in properties(kind)[name].get("enum", ())]
    return f"; {value} needs --{section}.name {' or '.join(takes)}" if takes else ""


_NOT_KEPT = ("mesh.coordinator", "mesh.processes", "mesh.process", "guard.max_cut")
"""Settings of a run's config.yaml that belong to that start, or that no longer exist."""
