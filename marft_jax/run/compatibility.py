"""Compares a saved run with this start: its settings, its team, and the files that it learns from.

Of these files, rows of data and modules of the user's own code, a run directory keeps sizes and
hashes in ``inputs.json``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from marft_jax.errors import BadInput, is_users
from marft_jax.formats import foreign
from marft_jax.models.weights.load import BaseModel
from marft_jax.run.manifest import digest_of
from marft_jax.settings.config import Config
from marft_jax.settings.setting import that_decide
from marft_jax.team.profiles import Profile
from marft_jax.team.prompts import Team
from marft_jax.tools import name_of
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


class Input(NamedTuple):
    path: str
    size: int
    sha256: str


Inputs = Mapping[str, Sequence[Input]]
"""Files of data by the setting that names them; each file of code by its path as a module."""


def inputs_of(config: Config, workflow: str = "", agents: Iterable[Profile] = ()) -> Inputs:
    """Finds and hashes the files that ``env``, ``algo``, ``rollout`` and the team name.

    Of the user's code these are the named modules, not what they import in turn.
    """
    inputs: dict[str, list[Input]] = {}
    for name, text in _texts(config.env):
        for path in map(Path, dict.fromkeys((text, text.partition("=")[2]))):
            with contextlib.suppress(OSError):  # too long a name
                if path.is_file():
                    inputs.setdefault(f"--env.{name}", []).append(_hashed(path))
    sections = config.env, config.algo, config.rollout
    texts = [workflow, *(text for section in sections for _, text in _texts(section))]
    for agent in agents:
        texts += [agent.reward or "", *map(name_of, agent.tools or ())]
    for module in (t.rpartition("=")[2].partition(":")[0] for t in texts if ":" in t):
        with contextlib.suppress(ImportError, ValueError):  # it is no module
            spec = importlib.util.find_spec(module)
            if spec is not None and spec.has_location and is_users(str(spec.origin)):
                inputs[f"{module.replace('.', '/')}.py"] = [_hashed(Path(str(spec.origin)))]
    return inputs


def check_unchanged(run: Path, now: Inputs) -> list[str]:
    """Returns a line for each file of data or code that a run began with and that has changed; only
    the content of a file counts.

    Raises:
        BadInput: there is one, and the run has checkpoints.
    """
    saved: Inputs = {}
    with contextlib.suppress(BadInput, TypeError, ValueError):  # a run of an earlier release
        rows = foreign.read_settings(run / "inputs.json")
        saved = {name: [Input(*file) for file in files] for name, files in rows.items()}
    differing = list[str]()
    for name in [name for name in saved if name in now]:
        before, after = ([file.sha256 for file in inputs[name]] for inputs in (saved, now))
        if before != after:
            others = [file.path for file in now[name] if file.sha256 not in before]
            differing.append(f"{name} has changed ({', '.join(others) or 'other files or order'})")
    if differing and any(run.glob("checkpoints/*/meta.json")):
        raise BadInput(
            f"{run} cannot be continued: {'; '.join(differing[:9])}; restore what the run began "
            f"with, or begin a new run with another --run.dir (--lora.init {run} starts it from "
            "the adapters of this run)"
        )
    return differing


def _texts(section: Any) -> Iterator[tuple[str, str]]:
    """Yields each text of a section with the name of its setting."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str):
                yield field.name, text


def _hashed(file: Path) -> Input:
    return Input(str(file.absolute()), file.stat().st_size, digest_of(file))
