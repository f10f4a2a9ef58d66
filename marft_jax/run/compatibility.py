"""Compares a saved run with this start: settings that must be equal, and changes."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from marft_jax.errors import BadInput
from marft_jax.models.weights.load import BaseModel
from marft_jax.settings.config import Config
from marft_jax.settings.setting import that_decide
from marft_jax.team.prompts import Team
from marft_jax.types import MAIN

_PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "transformers")


def identity_of(config: Config, bases: Mapping[str, BaseModel], team: Team) -> dict[str, Any]:
    """Returns the bases, team, settings and library versions of a state, and the time at which the
    run started, as chat templates may show the date."""
    settings = dataclasses.asdict(config)
    if not config.algo.has_critic:
        del settings["critic"]
    return {
        "bases": {
            name: {"source": base.source, "digest": base.digest} for name, base in bases.items()
        },
        "started": next(iter(bases.values())).tokenizer.started,
        "agents": list(team.names),
        "adapters": [
            team.adapter_names[b][n] for b, n in zip(team.bases, team.owners, strict=True)
        ],
        "on": list(team.bases),
        "team": json.loads(json.dumps(described(team))),
        "config": json.loads(json.dumps(settings)),  # as it will be read
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
    }


def described(team: Team) -> dict[str, Any]:
    """Returns the contents of a team file as a flat dict: ``{"solver.prompt": "Solve.", ...}``."""
    flat: dict[str, Any] = {"workflow": team.workflow, "messages": list(team.messages)}
    for role, member in (("orchestrator", team.orchestrator), ("judge", team.judge)):
        flat[role] = None if member is None else team.names[member]
    if team.teachers:
        flat["teachers"] = [teacher and dataclasses.asdict(teacher) for teacher in team.teachers]
    flat["nodes"] = [list(dataclasses.astuple(node)) for node in team.graph.nodes]
    flat["edges"] = [list(edge) for edge in team.graph.edges]
    for profile in team.profiles:
        fields = dataclasses.asdict(profile)
        del fields["teacher"]  # it is above
        flat |= {f"{profile.name}.{key}": value for key, value in fields.items()}
    return flat


class Changed(NamedTuple):
    """A flag, or a part of the team file, that differs between a saved run and this start."""

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name} was {self.old}, is {self.new}"


def check_fits(
    saved: Mapping[str, Any], now: Mapping[str, Any], run: Path, continues: bool
) -> None:
    """Raises ``BadInput`` that names the difference between a saved run and this start.

    Settings that decide the arrays are compared first. Others may still change them; the line then
    names all that have changed, and the arrays only where none has.

    Args:
        continues: the run itself goes on, and is not only evaluated.
    """
    fixed = that_decide("arrays", Config) | (that_decide("run", Config) if continues else set())
    changed = setting_changes(saved["config"], now["config"])
    old, new = ({n: b["digest"] for n, b in meta["bases"].items()} for meta in (saved, now))
    pairs = [
        (
            "base model" if name == MAIN else f"base {name}",
            old.get(name, "none"),
            new.get(name, "none"),
        )
        for name in {**old, **new}
    ]
    pairs += [
        ("agents", saved["agents"], now["agents"]),
        ("their adapters", saved["adapters"], now["adapters"]),
        *(change for change in changed if change.name.removeprefix("--") in fixed),
    ]
    if continues:
        pairs.append(("--team.workflow", saved["team"]["workflow"], now["team"]["workflow"]))
    _check_equal(pairs, run)
    old, new = saved["arrays"], now["arrays"]
    if old != new:
        changed = [change for change in changed if change.name != "--run.steps"]
        _check_equal([*changed, *team_changes(saved["team"], now["team"])], run)
        _check_equal([(p, old.get(p, "absent"), new.get(p, "absent")) for p in {**old, **new}], run)


def _check_equal(pairs: Iterable[tuple[str, Any, Any]], run: Path) -> None:
    differing = [str(Changed(*pair)) for pair in pairs if pair[1] != pair[2]]
    if differing:
        raise BadInput(
            f"{run} cannot be continued with these settings: {'; '.join(differing[:9])}; "
            "use the old ones, or another --run.dir"
        )


def setting_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Changed]:
    """Lists the settings that both have and that differ; not those of where a start runs.

    Args:
        saved, now: sections of settings.
    """
    of_start = that_decide("start", Config)
    return [
        Changed(f"--{section}.{key}", old, now[section][key])
        for section, settings in saved.items()
        for key, old in settings.items()
        if key in now.get(section, {})
        and f"{section}.{key}" not in of_start
        and old != now[section][key]
    ]


def team_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Changed]:
    """Lists the parts of a team file that have changed, in words."""
    return [
        Changed(f"team: {key}", f"{saved.get(key)!r:.60}", f"{now.get(key)!r:.60}")
        for key in {**now, **saved}
        if repr(saved.get(key)) != repr(now.get(key))
    ]
