"""Sections of the settings: their dataclasses, help and JSON schema.

``env``, ``algo`` and ``rollout`` are unions: each environment, algorithm and sampler declares its
own settings, and one setting tells which are meant. Nothing here imports JAX.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, fields
from typing import Any, NoReturn

from marft_jax.config import Algo, Config, EnvSettings, RolloutSettings
from marft_jax.envs import base as envs
from marft_jax.errors import BadInput
from marft_jax.learning import settings as algorithms
from marft_jax.sampling import settings as samplers
from marft_jax.setting import help_lines, schema_of, texts

Words = dict[str, list[str]]
"""``section.name`` to the words that stand for its value."""

CHOOSES = {"env": "name", "algo": "name", "rollout": "sampler"}
"""The setting of each union that tells which of its settings are meant."""
_DEFAULTS = {"env": EnvSettings.name, "algo": Algo.name, "rollout": RolloutSettings.sampler}
_USAGE = """usage: python -m {prog} [--config FILE ...] [--SECTION.NAME VALUE ...]

{about}

  --config FILE    settings of YAML files, before the flags; later ones win
  --dry_run        show the prompts and answers of one task, then end
  --help SECTION   the settings of one section; of all: --help all
  --schema         print the JSON schema of YAML files, for editors

sections:"""


def kinds(words: Words) -> dict[str, Any]:
    """Returns the dataclass of each section, that of a union as the words choose it."""
    found = {field.name: type(field.default) for field in fields(Config)}
    find = {
        "env": envs.settings_type,
        "algo": algorithms.settings_type,
        "rollout": samplers.settings_type,
    }
    of_rows = {"env.data", "env.reward"} & words.keys()
    usual = _DEFAULTS | ({"env": "math"} if of_rows else {})
    for section, default in usual.items():
        found[section] = find[section](" ".join(words.get(chooser(section), [default])))
    return found


def chooser(section: str) -> str:
    """Returns the setting that chooses among the dataclasses of a union."""
    return f"{section}.{CHOOSES[section]}"


def family(section: str) -> dict[str, Any]:
    """Returns the dataclasses that a union may have, by name."""
    if section == "env":
        named = {name: envs.settings_type(name) for name in envs.BUILT_IN}
        return named | {"package.module:Class": envs.Own}
    if section == "rollout":
        return samplers.SETTINGS | {"package.module:Class": RolloutSettings}
    return algorithms.SETTINGS | {"package.module:NAME": Algo} if section == "algo" else {}


def owners(key: str) -> dict[str, Field[Any]]:
    """Returns the fields of a setting, by the names of the dataclasses that have it."""
    section, _, name = key.partition(".")
    own = ((owner, field) for owner, kind in family(section).items() for field in fields(kind))
    return {owner: field for owner, field in own if field.name == name}


def schema() -> dict[str, Any]:
    """Returns the JSON schema of a YAML file of settings."""
    sections = {
        name: {"oneOf": [*_union(name)]} if name in _DEFAULTS else schema_of(kind)
        for name, kind in kinds({}).items()
    }
    draft = "https://json-schema.org/draft/2020-12/schema"
    of_all = {"type": "object", "properties": sections, "additionalProperties": False}
    return {"$schema": draft, "description": Config.__doc__} | of_all


def _union(section: str) -> Iterator[dict[str, Any]]:
    """Yields a schema for each environment or algorithm; code of a user's own may declare more."""
    for name, kind in family(section).items():
        found, is_own = schema_of(kind), ":" in name
        chosen = CHOOSES[section]
        found["properties"][chosen] |= {"pattern": ":"} if is_own else {"const": name}
        found["additionalProperties"] = is_own
        yield found if name == _DEFAULTS[section] else found | {"required": [chosen]}


def show_help(prog: str, flags: Words, topic: str = "") -> NoReturn:
    """Shows the sections; with a ``topic`` the settings of that one, or of ``all``."""
    about = texts(Config)
    if topic not in ("", "all", *about):
        raise BadInput(f"--help: expected all or one of {', '.join(about)}, got {topic!r:.40}")
    print(_USAGE.format(prog=prog, about=Config.__doc__))
    for section, kind in kinds(flags).items():
        print(f"  {section:<15}  {about[section]}")
        if topic in ("all", section):
            if named := family(section):
                which = " ".join(flags.get(chooser(section), [_DEFAULTS[section]]))
                print(f"{'':19}(of --{chooser(section)} {which}; there are {', '.join(named)})")
            print(*help_lines(section, kind), sep="\n")
    raise SystemExit(0)
