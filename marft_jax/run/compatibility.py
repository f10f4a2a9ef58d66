"""What a saved run belongs to, and what may change when it continues."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any

from marft_jax.config import BadInput, Config
from marft_jax.learning.algorithms import settle
from marft_jax.models.weights.load import BaseModel
from marft_jax.team.prompts import Team

FIXED = (
    "run.seed",
    "lora.mode",
    "lora.rank",
    "lora.alpha",
    "lora.targets",
    "critic.mode",
    "critic.hidden",
)
"""Settings that a run cannot change when it continues: the saved arrays depend on them."""

_PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "transformers")


def identity_of(
    config: Config, base: BaseModel, team: Team, workflow: str = "sequential"
) -> dict[str, Any]:
    """What must be equal for a saved state to fit, all settings, and the versions that wrote it."""
    sections = dataclasses.asdict(settle(config))
    return {
        "base": {"source": base.source, "digest": base.digest},
        "agents": list(team.names),
        "adapters": [team.adapter_names[n] for n in team.owners],
        "team": described(team, workflow),
        "config": {name: _plain(section) for name, section in sections.items()},
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
    }


def check_identity(saved: Mapping[str, Any], now: Mapping[str, Any], run: str) -> None:
    """Raises ``BadInput`` naming what differs between a saved run and this start."""
    pairs = [("base model", saved["base"]["digest"], now["base"]["digest"])]
    pairs += [(f"their {what}" if what == "adapters" else what, saved[what], now[what])
              for what in ("agents", "adapters")]  # fmt: skip
    pairs += [(f"--{key}", old, new) for key, old, new in changes(saved, now) if key in FIXED]
    differing = [f"{name} was {old}, is {new}" for name, old, new in pairs if old != new]
    if differing:
        raise BadInput(
            f"{run} cannot be continued with these settings: {'; '.join(differing)}; "
            "use the old ones, or another --run.dir"
        )


def check_shapes(saved: Mapping[str, str], now: Mapping[str, str], run: str) -> None:
    """Raises ``BadInput`` where the saved arrays are not those of this training state."""
    differing = [
        f"{path} was {saved.get(path, 'not there')}, is {now.get(path, 'not there')}"
        for path in sorted(saved.keys() | now.keys())
        if saved.get(path) != now.get(path)
    ]
    if differing:
        more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise BadInput(
            f"{run} cannot be continued with these settings: its saved state has another form: "
            f"{differing[0]}{more}; use the old settings, or another --run.dir"
        )


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """``(setting, old, new)`` for each setting that a continued run has changed."""
    return [
        (f"{section}.{key}", old, now["config"][section][key])
        for section, settings in saved["config"].items()
        for key, old in settings.items()
        if key in now["config"].get(section, {})
        and old != now["config"][section][key]
        and (section, key) not in (("run", "dir"), ("team", "file"))  # the team is compared itself
    ]


def described(team: Team, workflow: str) -> dict[str, Any]:
    """All that a team file says, flat: ``{"solver.prompt": "Solve.", ..., "workflow": ...}``."""
    flat: dict[str, Any] = {"workflow": workflow, "messages": list(team.messages)}
    for what in ("orchestrator", "judge"):
        member = getattr(team, what)
        flat[what] = None if member is None else team.names[member]
    flat["nodes"] = [list(node) for node in team.graph.nodes]
    flat["edges"] = [list(edge) for edge in team.graph.edges]
    for profile in team.profiles:
        flat |= {f"{profile.name}.{k}": v for k, v in dataclasses.asdict(profile).items()}
    return flat


def team_changes(saved: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[str]:
    """A line for each thing that a continued run's team file says otherwise."""
    if saved is None:  # a checkpoint of an earlier release
        return []
    keys = [*now, *(key for key in saved if key not in now)]
    pairs = [(key, repr(saved.get(key)), repr(now.get(key))) for key in keys]
    return [
        f"team: {key} was {_around(old, new)}, is {_around(new, old)}"
        for key, old, new in pairs
        if old != new
    ]


def _around(text: str, other: str, width: int = 60) -> str:
    """The part of a text where it begins to differ from another."""
    start = max(0, len(os.path.commonprefix([text, other])) - 20) if len(text) > width else 0
    end = start + width
    return "..." * (start > 0) + text[start:end] + "..." * (end < len(text))


def _plain(section: Mapping[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in section.items()}
