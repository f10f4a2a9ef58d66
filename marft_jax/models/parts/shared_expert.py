"""Mixture of experts with a dense mlp beside it, which every token passes through."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
from flax import nnx
from jax import Array

from marft_jax.models.ops.attention import Layer
from marft_jax.models.ops.products import product
from marft_jax.models.parts.dense import gated_mlp
from marft_jax.models.parts.experts import Experts, ExpertsConfig
from marft_jax.models.parts.part import LayerAdapters, Make, Matrix, Names


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedExpertConfig(ExpertsConfig):
    """Sizes of E experts and of the expert that all tokens share, ``d_model -> d_shared``."""

    d_shared: int

    MATRICES: ClassVar[Mapping[str, Names]] = {
        **ExpertsConfig.MATRICES,
        "shared_gate": Names("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
        "shared_up": Names("mlp.shared_expert.up_proj", "ffn_up_shexp"),
        "shared_down": Names("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    }
    MODULES: ClassVar[Mapping[str, Names]] = {
        **ExpertsConfig.MODULES,
        "shared_weight": Names("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    }

    def matrices(self) -> dict[str, Matrix]:
        wide = Matrix(self.d_model, self.d_shared, ("hidden", "model"))
        down = Matrix(self.d_shared, self.d_model, ("model", "hidden"))
        shared = {"shared_gate": wide, "shared_up": wide, "shared_down": down}
        return super().matrices() | shared

    def build(self, make: Make) -> SharedExpert:
        return SharedExpert(self, make)


class SharedWeight(nnx.Module):
    """sigmoid(w · x), the weight of the shared expert; frozen and never packed."""

    def __init__(self, d_model: int, make: Make):
        init = nnx.initializers.normal(d_model**-0.5)
        self.weight = nnx.Param(
            init(make.rngs.params(), (1, d_model), make.dtype), axes=(None, "model")
        )

    def __call__(self, x: Array) -> Array:
        return jax.nn.sigmoid(product(x, self.weight[...]))


class SharedExpert(Experts):
    """Σ over the chosen experts, and sigmoid(w · x) · down(activation(gate(x)) * up(x))."""

    def __init__(self, config: SharedExpertConfig, make: Make):
        super().__init__(config, make)
        self.shared_gate, self.shared_up, self.shared_down = (
            make.linear(name, matrix)
            for name, matrix in config.matrices().items()
            if not matrix.experts
        )
        self.shared_weight = SharedWeight(config.d_model, make)

    def __call__(self, x_BTD: Array, layer: Layer, adapters: LayerAdapters) -> Array:
        routed = super().__call__(x_BTD, layer, adapters)
        with jax.named_scope("shared_expert"):
            matrices = self.shared_gate, self.shared_up, self.shared_down
            shared = gated_mlp(x_BTD, matrices, self.config.activation, adapters)
            return routed + self.shared_weight(x_BTD) * shared
