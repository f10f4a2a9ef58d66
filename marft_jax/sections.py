"""Sections of the settings: their dataclasses, of environments and algorithms by name; their help.

Nothing here imports JAX.
"""

from __future__ import annotations

from dataclasses import Field, fields
from typing import Any, NoReturn

from marft_jax.config import Config
from marft_jax.envs import base as envs
from marft_jax.errors import BadInput
from marft_jax.learning import settings as algorithms
from marft_jax.setting import help_lines, texts, words_of

Words = dict[str, list[str]]
"""``section.name`` to the words that stand for its value."""

_USAGE = """usage: python -m {prog} [--config FILE ...] [--SECTION.NAME VALUE ...]

{about}

  --config FILE    settings of YAML files, before the flags; later ones win
  --dry_run        show the prompts and answers of one task, then end
  --help SECTION   the settings of one section; of all: --help all

sections:"""


def kinds(words: Words) -> dict[str, Any]:
    """Dataclass of each section, those of ``env`` and ``algo`` by their names."""
    found = {field.name: type(field.default) for field in fields(Config)}
    for section, default, find in (
        ("env", "arithmetic", envs.settings_type),
        ("algo", "appo", algorithms.settings_type),
    ):
        found[section] = find(" ".join(words.get(f"{section}.name", [default])))
    return found


def family(section: str) -> dict[str, Any]:
    """Dataclasses that a section may have, by the names of the environments or algorithms."""
    if section == "env":
        named = {name: envs.settings_type(name) for name in envs.BUILT_IN}
        return named | {"package.module:Class": envs.Own}
    return dict(algorithms.SETTINGS) if section == "algo" else {}


def owners(key: str) -> dict[str, Field[Any]]:
    """Fields of a setting, by the environments or algorithms that have it."""
    section, _, name = key.partition(".")
    own = ((owner, field) for owner, kind in family(section).items() for field in fields(kind))
    return {owner: field for owner, field in own if field.name == name}


def is_default(key: str, words: list[str]) -> bool:
    """True where someone who has the setting has it at this by default."""
    defaults = [words_of(key, field.default) for field in owners(key).values()]
    return words in [*defaults, ["auto"], ["None"]]


def show_help(prog: str, flags: Words, topic: str = "") -> NoReturn:
    """Shows the sections; with a ``topic`` the settings of that one, or of ``all``."""
    sections = texts(Config)
    if topic not in ("", "all", *sections):
        raise BadInput(f"--help: expected all or one of {', '.join(sections)}, got {topic!r:.40}")
    print(_USAGE.format(prog=prog, about=Config.__doc__))
    for section, kind in kinds(flags).items():
        print(f"  {section:<15}  {sections[section]}")
        if topic in ("all", section):
            if named := family(section):
                print(f"{'':19}(of --{section}.name {kind.name}; there are {', '.join(named)})")
            print(*help_lines(section, kind), sep="\n")
    raise SystemExit(0)
