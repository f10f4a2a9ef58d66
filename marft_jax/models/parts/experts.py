"""Mixture of experts: an mlp whose tokens each choose a few of many gated MLPs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from marft_jax.models.ops.experts import Routes, grouped, of_rows, sort_by_expert, take_copies
from marft_jax.models.ops.products import Activation, clamped_gate, gated, product
from marft_jax.models.ops.remat import keep
from marft_jax.models.parts.part import LayerAdapters, Make, Matrix, Names


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Sizes of E experts, each ``d_model -> d_expert -> d_model``.

    Attributes:
        n_chosen: experts that each token passes through.
        normalised: the weights of the chosen experts sum to 1.
        bias: of the router, and of every matrix of every expert.
        gain, limit: the gate is ``clamped_gate`` with these; 0 for the activation.
    """

    d_model: int
    d_expert: int
    n_experts: int
    n_chosen: int
    normalised: bool = True
    activation: Activation = "silu"
    bias: bool = False
    gain: float = 0.0
    limit: float = 0.0

    MATRICES: ClassVar[Mapping[str, Names]] = {
        "experts_gate_up": Names(
            "mlp.experts.base_layer",  # as peft nests two parameters of one module
            "",
            pieces=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
            stacks=("ffn_gate_exps", "ffn_up_exps"),
            parameter="mlp.experts.gate_up_proj",
        ),
        "experts_down": Names(
            "mlp.experts",
            "",
            pieces=("mlp.experts.{}.down_proj",),
            stacks=("ffn_down_exps",),
            parameter="mlp.experts.down_proj",
        ),
    }
    MODULES: ClassVar[Mapping[str, Names]] = {"router": Names("mlp.gate", "ffn_gate_inp")}

    def matrices(self) -> dict[str, Matrix]:
        d, f = self.d_model, self.d_expert
        many: dict[str, Any] = dict(
            target="experts", experts=self.n_experts, chosen=self.n_chosen, bias=self.bias
        )
        return {
            "experts_gate_up": Matrix(d, 2 * f, ("hidden", "model"), **many),
            "experts_down": Matrix(f, d, ("model", "hidden"), **many),
        }

    def build(self, make: Make) -> Experts:
        return Experts(self, make)


class Router(nnx.Module):
    """The k largest of softmax(W x), computed in float32 over all experts, and their numbers.

    It is frozen and never packed. Computed in float32 it sends a token to the same experts in
    rollout and update, as far as the token's hidden state is the same.
    """

    def __init__(self, config: ExpertsConfig, make: Make):
        self.config = config
        init, shape = jax.nn.initializers.normal(0.02), (config.n_experts, config.d_model)
        self.weight = nnx.Param(init(make.rngs.params(), shape, make.dtype), axes=(None, "model"))
        bias = jnp.zeros((config.n_experts,), make.dtype)
        self.bias = nnx.Param(bias, axes=(None,)) if config.bias else None

    def __call__(self, x_TD: Array) -> tuple[Array, Array]:
        logits_TE = product(x_TD.astype(jnp.float32), self.weight[...].astype(jnp.float32))
        if self.bias is not None:
            logits_TE = logits_TE + self.bias[...].astype(jnp.float32)[None]
        shares_TE = jax.nn.softmax(keep(logits_TE), axis=-1)
        weights_TK, experts_TK = jax.lax.top_k(shares_TE, self.config.n_chosen)
        if self.config.normalised:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdims=True)
        return weights_TK.astype(x_TD.dtype), experts_TK


class ExpertMatrix(nnx.Module):
    """A matrix of every expert, and the low-rank correction by each token's owner: one pair for
    every expert and adapter.

    It is stored as ``[E, in, pieces, out / pieces]``, as a TPU's ragged product reads it; from
    ``[E, out, in]`` XLA copies all experts in every step.
    """

    def __init__(self, name: str, matrix: Matrix, pieces: int, make: Make):
        self.name = name
        init = jax.nn.initializers.normal(matrix.d_in**-0.5)
        shape = (matrix.experts, matrix.d_in, pieces, matrix.d_out // pieces)
        kernel = init(make.rngs.params(), shape, make.dtype)
        out, into = matrix.axes
        self.kernel = nnx.Param(kernel, axes=("expert", into, "piece", out))
        bias = jnp.zeros((matrix.experts, *shape[2:]), make.dtype)
        axes = ("expert", "piece", None if out == "model" else out)
        self.bias = nnx.Param(bias, axes=axes) if matrix.bias else None

    def __call__(
        self, x_MI: Array, routes: Routes, adapters: LayerAdapters, columns_M: Array | None
    ) -> Array:
        kernel_EIO = jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1), self.kernel[...])
        y = grouped(x_MI, kernel_EIO, routes.sizes_E, 1)
        if self.bias is not None:
            bias_EO = self.bias[...].reshape(len(routes.sizes_E), -1)
            y = y + bias_EO[of_rows(routes.sizes_E, len(y))]
        if (lora := adapters.matrices.get(self.name)) is None:
            return y
        assert columns_M is not None, "adapters without owners"
        with jax.named_scope("lora"):
            ranks = grouped(x_MI, lora.a, routes.sizes_E, 2) * columns_M
            return y + grouped(ranks, lora.b, routes.sizes_E, 1)


class Experts(nnx.Module):
    """Σ over the chosen experts e of weight_e · down_e(activation(gate_e(x)) * up_e(x))
    (Shazeer et al. 2017). No token is dropped, however many choose an expert."""

    def __init__(self, config: ExpertsConfig, make: Make):
        self.config = config
        self.router = Router(config, make)
        names, matrices = config.MATRICES, config.matrices()
        self.experts_gate_up, self.experts_down = (
            ExpertMatrix(name, matrix, len(names[name].pieces), make)
            for name, matrix in matrices.items()
            if matrix.experts
        )

    def __call__(self, x_BTD: Array, adapters: LayerAdapters) -> Array:
        c, x_TD = self.config, x_BTD.reshape(-1, x_BTD.shape[-1])
        with jax.named_scope("router"):
            weights_TK, experts_TK = self.router(x_TD)
            routes = sort_by_expert(experts_TK, c.n_experts)
        there = routes.order_M, routes.place_M, c.n_chosen
        columns_M = None
        if adapters.owners is not None:
            columns = adapters.owners.columns
            columns_M = take_copies(columns.reshape(-1, columns.shape[-1]), *there)
        with jax.named_scope("experts"):
            x_MD = take_copies(x_TD, *there)
            both = keep(self.experts_gate_up(x_MD, routes, adapters, columns_M))
            gate, up = both[:, : c.d_expert], both[:, c.d_expert :]
            if c.limit:
                hidden = clamped_gate(gate, up, c.gain, c.limit)
            else:
                hidden = gated(gate, up, c.activation)
            y_MD = self.experts_down(hidden, routes, adapters, columns_M)
        y_MD = take_copies(y_MD, routes.place_M, routes.order_M, 1)
        y_TKD = y_MD.reshape(*experts_TK.shape, -1) * weights_TK[..., None]
        return y_TKD.sum(1).reshape(x_BTD.shape)
