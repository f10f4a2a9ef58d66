"""Dense gated MLP: the mlp of layers without experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from flax import nnx
from jax import Array

from marft_jax.models.ops.attention import Layer
from marft_jax.models.ops.products import Activation, gated
from marft_jax.models.ops.remat import keep
from marft_jax.models.parts.part import LayerAdapters, Linear, Make, Matrix, Names


@dataclasses.dataclass(frozen=True)
class DenseConfig:
    """Sizes of a gated MLP, ``d_model -> d_ff -> d_model``."""

    d_model: int
    d_ff: int
    activation: Activation = "silu"

    MATRICES: ClassVar[Mapping[str, Names]] = {
        "gate": Names("mlp.gate_proj", "ffn_gate"),
        "up": Names("mlp.up_proj", "ffn_up"),
        "down": Names("mlp.down_proj", "ffn_down"),
    }
    MODULES: ClassVar[Mapping[str, Names]] = {}
    normalises: ClassVar[bool] = False

    def matrices(self) -> dict[str, Matrix]:
        wide = Matrix(self.d_model, self.d_ff, ("hidden", "model"))
        return {
            "gate": wide,
            "up": wide,
            "down": Matrix(self.d_ff, self.d_model, ("model", "hidden")),
        }

    def build(self, make: Make) -> Dense:
        return Dense(self, make)


class Dense(nnx.Module):
    """``gated_mlp`` of every position."""

    def __init__(self, config: DenseConfig, make: Make):
        self.activation: Activation = config.activation
        self.gate, self.up, self.down = make.linears(config)

    def __call__(self, x_BTD: Array, layer: Layer, adapters: LayerAdapters) -> Array:
        return gated_mlp(x_BTD, (self.gate, self.up, self.down), self.activation, adapters)


def gated_mlp(
    x_BTD: Array, matrices: Sequence[Linear], activation: Activation, adapters: LayerAdapters
) -> Array:
    """down(activation(gate(x)) * up(x)) (Shazeer 2020), with the matrices gate, up, down."""
    gate, up, down = matrices
    hidden = gated(keep(gate(x_BTD, adapters)), keep(up(x_BTD, adapters)), activation)
    return down(hidden, adapters)
