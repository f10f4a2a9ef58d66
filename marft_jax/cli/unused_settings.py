"""Settings that a run does not read: one warning names them, by what ``setting`` says they need."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

from marft_jax.settings.config import Config, Team, longest_action
from marft_jax.settings.setting import get, needs_of, replaced, settings, spelled
from marft_jax.team.assemble import workflow_of
from marft_jax.team.team_files import Blueprint, load_team

LOGGER = logging.getLogger("marft_jax")


def log(warning: str) -> None:
    """Logs the line of ``warning``, if anything."""
    if warning:
        LOGGER.warning("%s", warning)


def warning(config: Config, *, evaluates: bool = False) -> str:
    """Returns one line that names the settings that are given and that this run does not read.

    Args:
        evaluates: the team only plays, and learns nothing.

    Raises:
        BadInput: the team file cannot be read.
    """
    blueprint = load_team(config.team.file)
    needs_of_unread = unread(config, blueprint, evaluates)
    if evaluates and config.mesh.rollout:
        needs_of_unread["mesh.rollout"] = "a training"
    lines = [
        f"--{key} {spelled(get(config, key)):.60} (it needs {needs})"
        for key, needs in needs_of_unread.items()
    ]
    if not evaluates and not config.algo.recorded:  # what a team file has for its training
        lines += [f"{key} (it needs {needs})" for key, needs in unread_keys(config, blueprint)]
    return f"this run does not read {', '.join(lines)}" if lines else ""


def unread(config: Config, blueprint: Blueprint, evaluates: bool = False) -> dict[str, str]:
    """Finds settings that are neither none nor their default and lack what they need, with what
    that is."""
    lacking, usual = dict[str, str](), longest_action(config.model.context)
    config = replaced(config, "team.workflow", workflow_of(config.team, blueprint))
    if config.team.max_new_tokens == usual:  # the base decided it
        config = replaced(config, "team.max_new_tokens", Team.max_new_tokens)
    if evaluates:
        config = replaced(config, "eval.every", 1)

    def values(key: str) -> Iterator[Any]:
        """Yields the value of a setting that is read, or what each agent has."""
        section, _, name = key.partition(".")
        if section == "agents":
            yield from (getattr(agent, name) for agent in blueprint.agents)
        elif key not in lacking:
            yield get(config, key)

    def holds(need: str) -> bool:
        key = ""
        for part in need.split(" or "):
            first, _, rest = part.partition(" ")
            key, wanted = (first, rest) if "." in first else (key, part)
            if any(_fits(value, wanted) for value in values(key)):
                return True
        return False

    for key, field in settings(config):
        needs, value = field.metadata.get("needs"), get(config, key)
        if needs and value != field.default and spelled(value) != "none":
            if not all(map(holds, needs.split(" and "))):
                lacking[key] = needs_of(field)
    return lacking


def unread_keys(config: Config, blueprint: Blueprint) -> Iterator[tuple[str, str]]:
    """Yields keys of the team file that lack what they need, with what that is."""
    config = replaced(config, "team.workflow", workflow_of(config.team, blueprint))
    agents = ((f"agent {agent.name}'s", agent) for agent in blueprint.agents)
    for where, part in [("the team file's", blueprint), *agents]:
        for field in dataclasses.fields(part):
            needs = field.metadata.get("needs")
            if needs and getattr(part, field.name) != field.default:
                key, _, wanted = needs.partition(" ")
                if not any(_fits(get(config, key), want) for want in wanted.split(" or ")):
                    yield f"{where} {field.name}", needs_of(field)


def _fits(value: Any, wanted: str) -> bool:
    """Tells if a value is the wanted one; "": if it is on."""
    if wanted in ("", "your own"):
        return ":" in str(value) if wanted else bool(value)
    if wanted.startswith("not "):
        return bool(value) and value != wanted.removeprefix("not ")
    return spelled(value) == wanted
