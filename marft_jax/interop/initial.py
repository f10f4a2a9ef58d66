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

from marft_jax.errors import BadInput
from marft_jax.interop import peft
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.models.lora import Adapters, matrix_of, shape_of
from marft_jax.settings.config import Lora as LoraSettings
from marft_jax.team.prompts import Team


def initial_adapters(
    team: Team,
    settings: LoraSettings,
    fresh: Mapping[str, Adapters],
    saved: Mapping[str, peft.Adapter] | None,
    models: Mapping[str, DecoderConfig],
) -> Mapping[str, Adapters]:
    """Reads each base's adapters from their folders or ``saved``; the others stay as in ``fresh``.

    Loading is exact. Another alpha is multiplied into B. An adapter of lower rank leaves the
    remaining rows of B zero and the remaining columns of A fresh, so that these can learn.

    Args:
        saved: adapters by name, if ``lora.init`` is a run directory.
        models: shapes of the bases.

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
            folder = Path(profile.init)
        elif settings.init is not None and profile.past is None:
            folder = Path(settings.init) / name
        else:
            continue
        layers_with = models[base].layers_with
        if saved is None or profile.init is not None:
            adapter = _read(folder, name)
        elif name in saved:
            adapter = _by_layer(saved[name], layers_with)
        else:
            raise BadInput(f"{folder}: expected this adapter, found {', '.join(saved)}")
        _copy(adapter, loaded[base], n, scale, folder, layers_with)
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), loaded, dict(fresh))


def _by_layer(saved: peft.Adapter, layers_with: peft.LayersWith) -> peft.Adapter:
    """An adapter of a checkpoint, by matrix and layer as in a peft folder: a checkpoint counts the
    layers of each stack of matrices from 0; layers that the base lacks are refused later."""
    matrices = {
        (matrix_of(stack), dict(enumerate(layers_with(stack))).get(i, i)): pair
        for (stack, i), pair in saved.matrices.items()
    }
    return saved._replace(matrices=matrices)


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


def _copy(
    adapter: peft.Adapter,
    into: Adapters,
    n: int,
    scale: float,
    folder: Path,
    layers_with: peft.LayersWith,
) -> None:
    rank = shape_of(into)[1]
    if adapter.rank > rank:
        raise BadInput(f"{folder}: its rank is {adapter.rank}; set --lora.rank {adapter.rank}")
    unknown = sorted({target for target, _ in adapter.matrices} - {*map(matrix_of, into)})
    if unknown:
        raise BadInput(
            f"{folder}: it adapts {', '.join(unknown)} too; expected no more than --lora.targets "
            f"{' '.join(into)}; add them"
        )
    for (target, layer), (a, b) in adapter.matrices.items():
        stacks = [name for name in into if matrix_of(name) == target]
        name = next((x for x in stacks[1:] if layer in layers_with(x)), stacks[0])
        ours_a, ours_b = into[name]["a"][n], into[name]["b"][n]
        (count, *stack, d_in, _), d_out = ours_a.shape, ours_b.shape[-1]
        layers = layers_with(name)
        if layer not in layers or [*a.shape[:-1], b.shape[-1]] != [*stack, d_in, d_out]:
            raise BadInput(
                f"{folder}: {peft.module_name(target, layer)} maps {a.shape[-2]} to "
                f"{b.shape[-1]}; this base has {count} layers with {d_in} to {d_out}"
                f"{f', for each of {stack[0]} experts' if stack else ''}"
            )
        at = layers.index(layer)
        ours_a[at, ..., : adapter.rank] = a
        ours_b[at, ..., : adapter.rank, :] = b * np.float32(adapter.scale / scale)
