"""Saving and restoring a run with Orbax: everything needed to continue where it stopped.

Random keys, the order of tasks and of minibatches are pure functions of the seed and the step, so
the step number is the data position too. The frozen base is not saved; its identity is.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from marft_jax.config import BadInput, Config
from marft_jax.learner import TrainState
from marft_jax.models.load import BaseModel
from marft_jax.team.context import Team

_FIXED = ("run.seed", "lora.mode", "lora.rank", "lora.targets", "critic.mode", "critic.hidden")
"""Settings that a run cannot change when it continues: the saved arrays depend on them."""


class Checkpoints:
    """The folder ``checkpoints/`` of a run; a context manager that waits for its last save.

    Args:
        directory: the run directory.
        identity: what the saved arrays belong to, as ``identity_of`` gives it.
        keep: how many of the newest stay.
    """

    def __init__(self, directory: str | Path, identity: dict[str, Any], keep: int):
        self._identity = identity
        folder = (Path(directory) / "checkpoints").absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(folder, options=options, item_names=("state", "meta"))

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        self._manager.close()

    @property
    def latest(self) -> int | None:
        """The newest saved step, if any."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState) -> None:
        """Starts saving in the background; arrays may be donated as soon as this returns."""
        if step == self.latest:
            return
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(self._identity)
        )
        self._manager.save(step, args=arguments)

    def restore(self, fresh: TrainState) -> TrainState:
        """The newest saved state, laid out like ``fresh``; ``fresh`` itself where none is saved.

        Raises:
            BadInput: what was saved belongs to another base, team or shape of adapters.
        """
        step = self.latest
        if step is None:
            return fresh
        meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))
        check_identity(meta["meta"], self._identity, str(self._manager.directory.parent))
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, fresh)
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        return self._manager.restore(step, args=arguments)["state"]


def identity_of(config: Config, base: BaseModel, team: Team) -> dict[str, Any]:
    """What must be equal for a saved state to fit, and the versions that wrote it."""
    packages = ("jax", "flax", "optax", "orbax-checkpoint", "transformers")
    sections = {
        key: getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) for key in _FIXED
    }
    return {
        "base": {"source": base.source, "digest": base.digest},
        "agents": list(team.names),
        "settings": {k: list(v) if isinstance(v, tuple) else v for k, v in sections.items()},
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def check_identity(saved: dict[str, Any], now: dict[str, Any], run: str) -> None:
    """Raises ``BadInput`` naming what differs between a saved run and this start."""
    pairs = [("base model", saved["base"]["digest"], now["base"]["digest"])]
    pairs += [("agents", saved["agents"], now["agents"])]
    pairs += [(f"--{key}", saved["settings"].get(key), now["settings"][key]) for key in _FIXED]
    differing = [f"{name} was {old}, is {new}" for name, old, new in pairs if old != new]
    if differing:
        raise BadInput(
            f"{run} cannot be continued with these settings: {'; '.join(differing)}; "
            "use the old ones, or another --run.dir"
        )
