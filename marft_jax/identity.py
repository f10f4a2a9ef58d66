"""What a saved run belongs to, and what may change when it continues."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from marft_jax.algorithms import settle
from marft_jax.config import BadInput, Config
from marft_jax.models.load import BaseModel
from marft_jax.team.context import Team

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


def identity_of(config: Config, base: BaseModel, team: Team) -> dict[str, Any]:
    """What must be equal for a saved state to fit, all settings, and the versions that wrote it."""
    sections = dataclasses.asdict(settle(config))
    return {
        "base": {"source": base.source, "digest": base.digest},
        "agents": list(team.names),
        "adapters": [team.adapter_names[n] for n in team.owners],
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


def _plain(section: Mapping[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in section.items()}
