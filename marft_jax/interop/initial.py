"""Reads the adapters that a team starts from.

``lora.init`` names a folder with one peft folder per adapter, by its name: an export of ours, or
``steps_NNNN`` of the first MARFT release. A profile's own ``init`` names one peft folder and comes
first.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from marft_jax.config import Lora as LoraSettings
from marft_jax.errors import BadInput
from marft_jax.interop import peft
from marft_jax.models.lora import Adapters, shape_of
from marft_jax.team.prompts import Team


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
    if settings.init is None and not any(profile.init for profile in team.profiles):
        return fresh
    loaded = jax.tree.map(lambda x: np.array(jax.device_get(x)), dict(fresh))
    scale = settings.alpha / settings.rank
    for profile, base, n in zip(team.profiles, team.bases, team.owners, strict=True):
        name = team.folder_of(base, n)
        if profile.init is not None:
            folder = Path(profile.init).expanduser()
        elif settings.init is not None and profile.past is None:
            folder = Path(settings.init).expanduser() / name
        else:
            continue
        if saved is None or profile.init is not None:
            adapter = _read(folder, name)
        elif name in saved:
            adapter = saved[name]
        else:
            raise BadInput(f"{folder}: expected this adapter, found {', '.join(saved)}")
        _copy(adapter, loaded[base], n, scale, folder)
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), loaded, dict(fresh))


def _read(folder: Path, name: str) -> peft.Adapter:
    """Reads an adapter; the first release saves one folder deeper once it was continued."""
    if (head := folder.parent / "value_head.pth").is_file():  # a pickle, which could run any code
        raise BadInput(
            f"{head}: value heads of the first release are not read; move the file away, and the "
            "critic starts fresh"
        )
    if not folder.is_dir():
        raise BadInput(
            f"{folder}: expected a peft folder for the adapter {name!r}, found none; see "
            "--lora.init (a run, an export or hub:owner/name) and `init:` in the team file"
        )
    inner = folder / folder.name
    is_inner = (inner / peft.CONFIG).exists() and not (folder / peft.CONFIG).exists()
    return peft.read(inner if is_inner else folder)


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
