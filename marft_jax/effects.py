"""Finds settings that were given and that the run does not read, see ``setting.py``."""

from __future__ import annotations

import re
from typing import Any

from marft_jax import config as config_lib
from marft_jax.config import Config
from marft_jax.errors import BadInput
from marft_jax.formats import documents
from marft_jax.setting import Condition


def unread(config: Config, evaluating: bool = False) -> dict[str, Condition]:
    """The settings that are not at their defaults and that nothing reads, with what would.

    Args:
        evaluating: a run that evaluates, whatever ``eval.every`` is.
    """
    found: dict[str, Condition] = {}
    for key, field in config_lib.settings():
        if config_lib.get(config, key) == field.default:
            continue
        for condition in field.metadata.get("read", ()):
            there = _values(condition.key, config, evaluating)
            if there and not any(map(condition.fits, there)):
                found.setdefault(key, condition)
    return found


def _values(key: str, config: Config, evaluating: bool) -> tuple[Any, ...]:
    """The values of a setting in a run, as it is resolved, mostly one; ``()`` where unknown.

    Three keys more: ``graded``, the environments of training and of benchmarks; ``agents.x``, the
    setting ``x`` in the profile of each agent; ``training``, true in a run that learns.
    """
    section, _, name = key.partition(".")
    specs = config.eval.benchmarks if evaluating or config.eval.every else ()
    if section == "agents":
        rows = _team(config).get("agents") or ()
        return tuple(row.get(name) for row in rows if isinstance(row, dict))
    if key == "team.workflow" and not config.team.workflow:
        team = _team(config)
        return () if config.team.file and not team else (team.get("workflow") or "sequential",)
    if key in ("env.name", "graded"):
        return (config.env.name, *_environments(specs, of_benchmarks=key == "graded"))
    if key == "training":
        return (not evaluating,)
    value = config_lib.get(config, key)
    if key == "eval.every":
        return (evaluating or value,)
    if key == "critic.mode" and value == "auto":
        return _critic(config.algo.name)
    if key == "algo.correction" and value == "auto":
        return ("decoupled" if config.rollout.lag else "none",)
    return ("group" if key == "algo.baseline" and value == "auto" else value,)


def _critic(algorithm: str) -> tuple[str, ...]:
    """The meaning of ``critic.mode`` auto."""
    has_critic = algorithm in config_lib.WITH_CRITIC
    if ":" in algorithm:
        from marft_jax.learning.algorithms import find_algorithm  # late: it needs JAX

        try:
            has_critic = find_algorithm(algorithm).has_critic
        except BadInput:  # whoever builds the learner says so
            return ()
    return ("shared" if has_critic else "none",)


def _environments(specs: tuple[str, ...], of_benchmarks: bool) -> list[str]:
    """Environments that are benchmarks, and with ``of_benchmarks`` those that grade others."""
    if not specs:
        return []
    from marft_jax.envs.base import BUILT_IN
    from marft_jax.evaluation.benchmarks import BENCHMARKS

    players = {name: name for name in BUILT_IN if name not in BENCHMARKS}
    if of_benchmarks:
        players |= {name: benchmark.env for name, benchmark in BENCHMARKS.items()}
    names = [re.split("[:@]", spec)[0] for spec in specs]
    return [players[name] for name in names if name in players]


def _team(config: Config) -> dict[str, Any]:
    """The team file as it stands, unchecked; empty without one, or where it cannot be read."""
    try:
        tree = documents.read(config.team.file, "--team.file") if config.team.file else {}
    except BadInput:  # whoever loads the team says so
        return {}
    return {"agents": tree} if isinstance(tree, list) else tree if isinstance(tree, dict) else {}
