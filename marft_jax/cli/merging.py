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

from marft_jax.cli import sections as sections_lib
from marft_jax.cli.sections import Words
from marft_jax.errors import BadInput
from marft_jax.formats import documents
from marft_jax.learning import settings as algorithms
from marft_jax.run.storage import is_run, storage_of
from marft_jax.settings import config as config_lib
from marft_jax.settings.config import Config
from marft_jax.settings.setting import (
    from_words,
    get,
    properties,
    suggestion,
    that_decide,
    with_absolute_paths,
    words_of,
)

_RENAMED = {"algo.kl_moves": "algo.kl_reference_every"}
"""Settings of an older release that have another name now."""


def read_file(file: str) -> Words:
    """Reads a YAML file; a relative team file is looked for beside it, then in this folder."""
    file = os.path.expanduser(file)
    tree = documents.read(file, "--config")
    is_team = isinstance(tree, list) and all(isinstance(agent, dict) for agent in tree)
    if is_team or isinstance(tree, dict) and "agents" in tree:
        raise BadInput(f"--config {file}: expected settings, got a team; name it by --team.file")
    words = flatten(tree, file)
    for name in words.get("team.file", ())[:1]:
        if os.path.isfile(beside := Path(file).parent / name):
            words["team.file"] = [str(beside)]
    return words


def read_run(run: str) -> Words:
    """Reads the settings and the team of a run directory, without the addresses of processes."""
    folder = storage_of(run).path
    settings, team = folder / "config.yaml", folder / "team.yaml"
    if not os.path.isfile(settings):
        raise BadInput(f"--run {run}: expected a run directory with config.yaml, found none")
    if not (saved := read_file(str(settings))):
        raise BadInput(f"{settings}: expected the settings of a run, found none; copy it again")
    blueprint = [str(team)] if os.path.isfile(team) else saved.get("team.file", ["none"])
    gone = [*that_decide("start", Config)]
    if "env.move_seconds" in saved:  # of a game, whose processes an older release had
        gone += ["env.move_seconds", "env.workers"]
    kept = {_RENAMED.get(key, key): value for key, value in saved.items() if key not in gone}
    return kept | {"run.dir": [run], "team.file": blueprint}


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
    """Builds the config of a training; the settings of a run that has begun are layer 0.

    Where a later layer chooses another environment, algorithm or sampler, the settings of layer 0
    that had the defaults of the one before have those of the new one.
    """
    run = [*merge(layers).get("run.dir", []), config_lib.Run.dir][0]
    folder = storage_of(run).path
    if not run.strip() or not is_run(folder) or not os.path.isfile(folder / "config.yaml"):
        return resolve(layers)
    before = read_run(run)
    is_saved = any(p.name.isdecimal() for p in folder.glob("checkpoints/*"))
    now = merge([before, *layers])
    can_go_on = any(folder.glob("checkpoints/*/meta.json"))
    for key in sorted(that_decide("run", Config)) if can_go_on else ():
        if key in before and now[key] != before[key]:
            old, new = (" ".join(words[key]) for words in (before, now))
            raise BadInput(
                f"{run} cannot be continued with these settings: --{key} was {old}, is {new:.60}; "
                "use the old one, or another --run.dir"
            )
    usual = sections_lib.usual_where_chosen_anew(before, now)
    config = resolve([{k: v for k, v in before.items() if usual.get(k) != v}, *layers])
    given, kept = (with_absolute_paths(one) for one in (config, _build(before)))
    if is_saved:
        key, why = "lora.init", "goes on from its checkpoint"
    else:  # where steps are saved, the bases themselves are compared
        key, why = "model.base", f"has settings that follow from {kept.model.base}"
    if get(given, key) != get(kept, key):
        raise BadInput(
            f"--{key} {get(config, key)}: {run} has begun and {why}; leave it out, or name another "
            "--run.dir"
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
    for number, layer in enumerate(layers[:-1], 1):  # what a later layer replaces is checked too
        for section, kind in kinds:
            if sections_lib.same_choice(section, merge(layers[:number]), words):
                _section(section, kind, layer)
    known = [f"{section}.{field.name}" for section, kind in kinds for field in fields(kind)]
    for key in [key for key in words if key not in known]:
        if not (owners := sections_lib.owners(key)):
            raise BadInput(f"unknown setting {key!r:.80}{suggestion(key, known)}")
        section, last = key.partition(".")[0], max(i for i, one in enumerate(layers) if key in one)
        if sections_lib.same_choice(section, words, merge(layers[: last + 1])):
            mine = f"--{sections_lib.UNIONS[section].chooser} {sections_lib.chosen(section, words)}"
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
    kinds = sections_lib.kinds(words).items()
    sections = {name: _section(name, kind, words) for name, kind in kinds}
    return config_lib.fit_base(Config(**sections), words)


def _section(section: str, kind: type, words: Words) -> Any:
    """Builds a section; the fault of a value names the environments or algorithms that take it."""
    try:
        return from_words(section, kind, words)
    except BadInput as error:
        match = re.match(rf"--({section}\.(\w+)): expected one of", str(error))
        if match is None:
            raise
        (key, name), value = match.groups(), " ".join(words[match[1]])
        owners = sections_lib.owners(key).items()
        takes = [o for o, kind in owners if value in properties(kind)[name].get("enum", ())]
        hint = f"; {value} needs --{section}.name {' or '.join(takes)}" if takes else ""
        raise BadInput(f"{error}{hint}") from error
