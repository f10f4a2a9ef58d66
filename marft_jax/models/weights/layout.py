"""How tensors of a Hugging Face checkpoint hold ours: one each, or several in one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from marft_jax.models.decoder import DecoderConfig
from marft_jax.models.names import paths_by_name

Shapes = Mapping[str, tuple[int, ...]]

_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


class Layout(NamedTuple):
    """Our tensors in one of a checkpoint: their rows follow each other.

    Attributes:
        paths: of our tensors, in their order there.
    """

    paths: Sequence[str]

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint."""
        rows = sum(shapes[path][0] for path in self.paths)
        return rows, *shapes[self.paths[0]][1:]

    def split(self, stored: Any, shapes: Shapes) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (our path, array); ``stored`` may read from its file what is indexed."""
        start = 0
        for path in self.paths:
            end = start + shapes[path][0]
            yield path, stored[start:end]
            start = end

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """The inverse of ``split``."""
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def layouts(config: DecoderConfig, paths: Iterable[str]) -> dict[str, Layout]:
    """Every tensor of a checkpoint, by name."""
    found = paths_by_name(config, paths, "hf")
    inside: dict[str, list[str]] = {}
    for i in range(config.n_layers if config.fused else 0):
        for whole, parts in _FUSED.items():
            at = f"model.layers.{i}"
            own = [found.pop(f"{at}.{part}.weight") for part in parts]
            inside[f"{at}.{whole}.weight"] = own
    return {name: Layout(own) for name, own in inside.items()} | {
        name: Layout([path]) for name, path in found.items()
    }
