"""Reads the adapters that a team starts from.

``lora.init`` names a folder with one peft folder per adapter, by its name: an export of ours, or
``steps_NNNN`` of the first MARFT release. A profile's own ``init`` names one peft folder and comes
first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from marft_jax.config import Lora as LoraSettings
from marft_jax.errors import BadInput
from marft_jax.interop import peft
from marft_jax.models.lora import Adapters, shape_of
from marft_jax.team.prompts import Team

_VALUE_HEAD = "value_head.pth"  # a pickle, which could run any code


def initial_adapters(
    team: Team,
    settings: LoraSettings,
    fresh: Mapping[str, Adapters],
    saved: Mapping[str, peft.Adapter] | None = None,
) -> Mapping[str, Adapters]:
    """Reads each base's adapters from their folders or ``saved``; the others stay as in ``fresh``.

    Loading is exact. Another alpha is multiplied into B. An adapter of lower rank leaves the
    remaining rows of B zero and the remaining columns of A fresh, so that these can learn.

    Args:
        saved: adapters by name, if ``lora.init`` is a run directory.

    Raises:
        BadInput: a folder is missing, or does not fit the base, the team or the settings.
    """
    own = settings if saved is None else dataclasses.replace(settings, init=None)
    folders = _folders(team, own)
    if not folders and not saved:
        return fresh
    loaded = jax.tree.map(lambda x: np.array(jax.device_get(x)), dict(fresh))
    scale = settings.alpha / settings.rank
    for profile, base, n in zip(team.profiles, team.bases, team.owners, strict=True):
        name = team.adapter_names[base][n]
        if (folder := folders.get((base, n))) is not None:
            _copy(peft.read(folder), loaded[base], n, scale, folder)
        elif saved is not None and profile.past is None:
            where = Path(settings.init or "") / name
            if name not in saved:
                raise BadInput(f"{where}: expected this adapter, found {', '.join(saved)}")
            _copy(saved[name], loaded[base], n, scale, where)
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), loaded, dict(fresh))


def _folders(team: Team, settings: LoraSettings) -> dict[tuple[str, int], Path]:
    """Folder of every adapter (base, number) that has one."""
    folders, init = dict[tuple[str, int], Path](), settings.init
    if init is not None and not Path(init).expanduser().is_dir():
        expected = "expected a run directory, an export or hub:owner/name"
        raise BadInput(f"--lora.init {init}: {expected}, got a path where there is no folder")
    if init is not None and (head := Path(init).expanduser() / _VALUE_HEAD).is_file():
        raise BadInput(
            f"{head}: value heads of the first release are not read; move the file away, and the "
            "critic starts fresh"
        )
    for profile, base, n in zip(team.profiles, team.bases, team.owners, strict=True):
        if profile.init is not None:
            folders[base, n] = Path(profile.init).expanduser()
        elif init is not None and profile.past is None:
            folders[base, n] = Path(init).expanduser() / team.adapter_names[base][n]
    for (base, n), folder in folders.items():
        inner = folder / folder.name  # where the first release saves once it was continued
        if not (folder / peft.CONFIG).exists() and (inner / peft.CONFIG).exists():
            folders[base, n] = inner
        elif not folder.is_dir():
            name = team.adapter_names[base][n]
            raise BadInput(
                f"{folder}: expected a peft folder for the adapter {name!r}, "
                "found none; see --lora.init and `init:` in the team file"
            )
    return folders


def _copy(adapter: peft.Adapter, into: Adapters, n: int, scale: float, folder: Path) -> None:
    rank = shape_of(into)[1]
    if adapter.rank > rank:
        raise BadInput(f"{folder}: its rank is {adapter.rank}; set --lora.rank {adapter.rank}")
    unknown = sorted({target for target, _ in adapter.matrices} - set(into))
    if unknown:
        raise BadInput(
            f"{folder}: it adapts {', '.join(unknown)} too; expected no more than --lora.targets "
            f"{' '.join(into)}; add them"
        )
    for (target, layer), (a, b) in adapter.matrices.items():
        ours_a, ours_b = into[target]["a"][n], into[target]["b"][n]
        expected = (ours_a.shape[0], ours_a.shape[1], ours_b.shape[2])
        if layer >= expected[0] or (a.shape[0], b.shape[1]) != expected[1:]:
            raise BadInput(
                f"{folder}: {peft.module_name(target, layer)} maps {a.shape[0]} to {b.shape[1]}; "
                f"this base has {expected[0]} layers with {expected[1]} to {expected[2]}"
            )
        ours_a[layer, :, : adapter.rank] = a
        ours_b[layer, : adapter.rank] = b * np.float32(adapter.scale / scale)
