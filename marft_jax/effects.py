"""Refuses settings that were given and that the run does not read, see ``setting.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from marft_jax import config as config_lib
from marft_jax.config import Config
from marft_jax.errors import BadInput
from marft_jax.formats import documents
from marft_jax.setting import Condition

Situation = Callable[[str], tuple[Any, ...]]
"""The values that a setting has in a run, mostly one; ``()`` where that cannot be known."""


def unread(config: Config, evaluating: bool = False) -> dict[str, Condition]:
    """The settings that are not at their defaults and that nothing reads, with what would.

    Args:
        evaluating: a run that evaluates, whatever ``eval.every`` is.
    """
    values, found = situation(config, evaluating), {}
    for key, field in config_lib.settings():
        if config_lib.get(config, key) == field.default:
            continue
        for condition in field.metadata.get("read", ()):
            there = values(condition.key)
            if there and not any(map(condition.fits, there)):
                found[key] = condition
                break
    return found


def situation(config: Config, evaluating: bool = False) -> Situation:
    """Values that conditions ask for: settings as they are resolved, and a few keys more.

    ``graded``: the environments of training and of benchmarks; ``agents.x``: the setting ``x`` in
    the profile of each agent.
    """
    team = _team(config)
    rows = team.get("agents") or ()
    specs = config.eval.benchmarks if evaluating or config.eval.every else ()
    resolved: dict[str, Any] = {
        "eval.every": (evaluating or config.eval.every,),
        "env.name": (config.env.name, *_environments(specs)),
        "graded": (config.env.name, *_graders(specs)),
        "critic.mode": _critic(config),
        "algo.baseline": ("group" if config.algo.baseline == "auto" else config.algo.baseline,),
    }
    if not config.team.workflow:
        unknown = config.team.file and not team
        resolved["team.workflow"] = () if unknown else (team.get("workflow") or "sequential",)

    def values(key: str) -> tuple[Any, ...]:
        if key in resolved:
            return resolved[key]
        section, name = key.split(".")
        if section == "agents":
            return tuple(row.get(name) for row in rows if isinstance(row, dict))
        return (config_lib.get(config, key),)

    return values


def refusal(key: str, value: Any, condition: Condition, source: str | None) -> BadInput:
    """The error for a setting that was given and is not read."""
    where = f"{source}: {key}" if source else f"--{key}"
    shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
    return BadInput(
        f"{where}: this run does not read it, got {shown!s:.60}; it is read "
        f"{condition.says}: change that, or leave this out"
    )


def _critic(config: Config) -> tuple[str, ...]:
    if config.critic.mode != "auto":
        return (config.critic.mode,)
    from marft_jax.learning.algorithms import find_algorithm  # late: it needs JAX

    try:
        return ("shared" if find_algorithm(config.algo.name).has_critic else "none",)
    except BadInput:  # whoever builds the learner says so
        return ()


def _environments(specs: tuple[str, ...]) -> list[str]:
    """Benchmarks that are environments, with all settings of theirs."""
    from marft_jax.envs.base import BUILT_IN
    from marft_jax.evaluation.benchmarks import BENCHMARKS

    names = [spec.partition(":")[0].partition("@")[0] for spec in specs]
    return [name for name in names if name in BUILT_IN and name not in BENCHMARKS]


def _graders(specs: tuple[str, ...]) -> list[str]:
    """The environments that grade benchmarks."""
    from marft_jax.evaluation.benchmarks import BENCHMARKS

    names = [spec.partition(":")[0].partition("@")[0] for spec in specs]
    graders = [BENCHMARKS[name].env for name in names if name in BENCHMARKS]
    return [*graders, *_environments(specs)]


def _team(config: Config) -> dict[str, Any]:
    """The team file as it stands, unchecked; empty without one, or where it cannot be read."""
    try:
        tree = documents.read(config.team.file, "--team.file") if config.team.file else {}
    except BadInput:  # whoever loads the team says so
        return {}
    return {"agents": tree} if isinstance(tree, list) else tree if isinstance(tree, dict) else {}
