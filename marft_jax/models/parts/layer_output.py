"""What Gemma 4 does to a layer's output: inputs of each token to each layer, and a scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jax import Array

from marft_jax.models.ops.products import Activation, gated, product
from marft_jax.models.ops.remat import keep
from marft_jax.models.parts.part import LayerAdapters, Make, Matrix, Names


@dataclasses.dataclass(frozen=True)
class LayerOutputConfig:
    """Sizes of a layer's output.

    Attributes:
        d_input: channels of each token's input to the layer; 0: the output is only scaled.
    """

    d_model: int
    d_input: int
    activation: Activation = "gelu_pytorch_tanh"

    MATRICES: ClassVar[Mapping[str, Names]] = {
        "input_gate": Names("per_layer_input_gate", "inp_gate"),
        "input_up": Names("per_layer_projection", "proj"),
    }
    MODULES: ClassVar[Mapping[str, Names]] = {
        "norm": Names("post_per_layer_input_norm", "post_norm"),
        "scale": Names("layer_scalar", "layer_output_scale.weight"),
    }

    def matrices(self) -> dict[str, Matrix]:
        if not self.d_input:
            return {}
        return {
            "input_gate": Matrix(self.d_model, self.d_input, ("hidden", "model")),
            "input_up": Matrix(self.d_input, self.d_model, ("model", "hidden")),
        }

    def build(self, make: Make) -> LayerOutput:
        return LayerOutput(self, make)


class LayerOutput(nnx.Module):
    """s (x + norm(up(activation(gate(x)) * e))) with a number s and the token's input e to the
    layer; s x where the layer has none."""

    def __init__(self, config: LayerOutputConfig, make: Make):
        self.activation: Activation = config.activation
        self.scale = nnx.Param(jnp.ones((1,), make.dtype), axes=(None,))
        linears = dict(zip(config.matrices(), make.linears(config), strict=True))
        self.input_gate, self.input_up = linears.get("input_gate"), linears.get("input_up")
        self.norm = make.norm(config.d_model) if linears else None

    def __call__(self, x_BTD: Array, input_BTP: Array | None, adapters: LayerAdapters) -> Array:
        if self.norm is not None:
            assert self.input_gate is not None and self.input_up is not None
            assert input_BTP is not None
            gate = keep(self.input_gate(x_BTD, adapters))
            up = self.input_up(gated(gate, input_BTP, self.activation), adapters)
            x_BTD = x_BTD + self.norm(keep(up))
        return x_BTD * self.scale[...].reshape(1, 1, 1)


class LayerInputs(nnx.Module):
    """Input of each token to each layer: (norm(W x / √D) + √P e) / √2, P wide, where x is the
    token's embedding and e its row of a table of its own. Both are frozen and never packed."""

    def __init__(self, vocab_size: int, d_model: int, n_layers: int, d_input: int, make: Make):
        width = n_layers * d_input
        init = nnx.initializers.normal(0.02)
        table = init(make.rngs.params(), (vocab_size, width), make.dtype)
        self.embedding = nnx.Param(table, axes=("vocabulary", "model"))
        self.project = make.linear("", Matrix(d_model, width, (None, "model")))
        self.norm = make.norm(d_input)
        self.d_input = d_input

    def __call__(self, tokens_BT: Array, x_BTD: Array) -> list[Array]:
        """``[B, T, P]`` for each layer."""
        embedded = self.embedding[...][tokens_BT]
        embedded = embedded * jnp.asarray(self.d_input**0.5, embedded.dtype)
        seen = product(x_BTD, self.project.kernel[...]) * x_BTD.shape[-1] ** -0.5
        split = (*tokens_BT.shape, -1, self.d_input)
        both = (self.norm(seen.reshape(split)) + embedded.reshape(split)) * 2**-0.5
        return [both[:, :, i] for i in range(both.shape[2])]
