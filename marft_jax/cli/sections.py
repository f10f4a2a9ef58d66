"""Sections of the settings: their dataclasses, help and JSON schema.

``env``, ``algo`` and ``rollout`` are unions: each environment, algorithm and sampler declares its
own settings, and one setting tells which are meant. Nothing here imports JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, NamedTuple, NoReturn

from marft_jax.envs import base as envs
from marft_jax.errors import BadInput
from marft_jax.learning import settings as algorithms
from marft_jax.sampling import settings as samplers
from marft_jax.settings.config import Algo, Config, EnvSettings, RolloutSettings
from marft_jax.settings.setting import help_lines, properties, schema_of, texts, words_of
from marft_jax.team import team_files

Words = dict[str, list[str]]
"""``section.name`` to the words that stand for its value."""

_USAGE = """usage: python -m {prog} [--config FILE ...] [--SECTION.NAME VALUE ...]

{about}

  --config FILE    settings of YAML files, before the flags; later ones win
  --dry_run        show the prompts and answers of one task, then end
  --help SECTION   the settings of one section; of all: --help all
  --schema [team]  print the JSON schema of YAML files, or of team files

sections:"""


class SectionUnion(NamedTuple):
    """Section whose dataclass depends on one of its settings.

    Attributes:
        chooser: that setting, and its ``default``.
        find: returns the dataclass of a name, also one of a user's own.
        members: returns the dataclasses that there are, by name.
    """

    chooser: str
    default: str
    find: Callable[[str], type]
    members: Callable[[], dict[str, type]]


def _environments() -> dict[str, type]:
    return {name: envs.settings_type(name) for name in envs.BUILT_IN} | {_CLASS: envs.Own}


_CLASS = "package.module:Class"
UNIONS = {
    "env": SectionUnion("env.name", EnvSettings.name, envs.settings_type, _environments),
    "algo": SectionUnion(
        "algo.name",
        Algo.name,
        algorithms.settings_type,
        lambda: {**algorithms.SETTINGS, "package.module:NAME": Algo},
    ),
    "rollout": SectionUnion(
        "rollout.sampler",
        RolloutSettings.sampler,
        samplers.settings_type,
        lambda: {**{n: samplers.settings_type(n) for n in samplers.NAMES}, _CLASS: RolloutSettings},
    ),
}


def kinds(words: Words) -> dict[str, Any]:
    """Returns the dataclass of each section, that of a union as the words choose it."""
    common = {field.name: type(field.default) for field in fields(Config)}
    return common | {name: union.find(chosen(name, words)) for name, union in UNIONS.items()}


def chosen(section: str, words: Words) -> str:
    """Returns the name of the dataclass that the words choose for a union."""
    of_rows = section == "env" and {"env.data", "env.reward"} & words.keys()
    default = "math" if of_rows else UNIONS[section].default
    return " ".join(words.get(UNIONS[section].chooser, [default]))


def same_choice(section: str, one: Words, other: Words) -> bool:
    """True for a section whose dataclass is the same with these words and with those."""
    return section not in UNIONS or chosen(section, one) == chosen(section, other)


def usual_where_chosen_anew(before: Words, now: Words) -> Words:
    """Returns the defaults of the environment, algorithm and sampler of ``before``, where ``now``
    chooses another one."""
    return {
        f"{section}.{field.name}": words_of("", field.default)
        for section, union in UNIONS.items()
        if not same_choice(section, before, now)
        for field in fields(union.find(chosen(section, before)))
    }


def owners(key: str) -> dict[str, type]:
    """Returns the dataclasses of a union that have this setting, by name."""
    section, _, name = key.partition(".")
    members = UNIONS[section].members() if section in UNIONS else {}
    return {owner: kind for owner, kind in members.items() if name in properties(kind)}


def schema(topic: str = "") -> dict[str, Any]:
    """Returns the JSON schema of a YAML file of settings, or with the topic ``team`` of a team."""
    if topic == "team":
        return team_files.schema()
    if topic:
        raise BadInput(f"--schema: expected nothing or team, got {topic!r:.40}")
    sections = {
        name: {"oneOf": [*_union(name)]} if name in UNIONS else schema_of(kind)
        for name, kind in kinds({}).items()
    }
    draft = "https://json-schema.org/draft/2020-12/schema"
    of_all = {"type": "object", "properties": sections, "additionalProperties": False}
    return {"$schema": draft, "description": Config.__doc__} | of_all


def _union(section: str) -> Iterator[dict[str, Any]]:
    """Yields a schema for each environment or algorithm; code of a user's own may declare more."""
    union = UNIONS[section]
    name = union.chooser.partition(".")[2]
    for member, kind in union.members().items():
        section_schema, is_users = schema_of(kind), ":" in member
        section_schema["properties"][name] |= {"pattern": ":"} if is_users else {"const": member}
        section_schema["additionalProperties"] = is_users
        yield section_schema if member == union.default else section_schema | {"required": [name]}


def show_help(prog: str, flags: Words, topic: str = "") -> NoReturn:
    """Shows the sections; with a ``topic`` the settings of that one, or of ``all``."""
    about = texts(Config)
    if topic not in ("", "all", *about):
        raise BadInput(f"--help: expected all or one of {', '.join(about)}, got {topic!r:.40}")
    print(_USAGE.format(prog=prog, about=Config.__doc__))
    for section, kind in kinds(flags).items():
        print(f"  {section:<15}  {about[section]}")
        if topic in ("all", section):
            if union := UNIONS.get(section):
                which = f"(of --{union.chooser} {chosen(section, flags)}; there are "
                print(f"{'':19}{which}{', '.join(union.members())})")
            print(*help_lines(f"--{section}.", kind), sep="\n")
        if topic == section == "team":
            print(f"{'':19}keys of a team file:")
            for above, part in team_files.PARTS.items():
                print(*help_lines(above, part), sep="\n")
    raise SystemExit(0)
