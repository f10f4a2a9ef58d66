"""Mixture of experts: an mlp whose tokens each choose a few of many gated MLPs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from marft_jax.models.ops import per_device
from marft_jax.models.ops.attention import Layer
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
    normalises: ClassVar[bool] = False

    def matrices(self) -> dict[str, Matrix]:
        d, f = self.d_model, self.d_expert
        many: dict[str, Any] = dict(
            target="experts", experts=self.n_experts, chosen=self.n_chosen, bias=self.bias
        )
        return {
            "experts_gate_up": Matrix(d, 2 * f, (None, None), **many),
            "experts_down": Matrix(f, d, (None, None), **many),
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

    def __call__(self, x_BTD: Array) -> tuple[Array, Array]:
        logits_BTE = product(x_BTD.astype(jnp.float32), self.weight[...].astype(jnp.float32))
        if self.bias is not None:
            logits_BTE = logits_BTE + self.bias[...].astype(jnp.float32)[None, None]
        shares_BTE = jax.nn.softmax(keep(logits_BTE), axis=-1)
        weights_BTK, experts_BTK = jax.lax.top_k(shares_BTE, self.config.n_chosen)
        if self.config.normalised:
            weights_BTK = weights_BTK / weights_BTK.sum(-1, keepdims=True)
        return weights_BTK.astype(x_BTD.dtype), experts_BTK


class ExpertMatrix(nnx.Module):
    """A matrix of every expert, and the low-rank correction by each token's owner: one pair for
    every expert and adapter.

    It is stored as ``[pieces, E, in, out / pieces]``, as a TPU's ragged product reads it; from
    ``[E, out, in]`` XLA copies all experts in every step.
    """

    def __init__(self, name: str, matrix: Matrix, pieces: int, make: Make):
        self.name, self.pieces = name, pieces
        init = jax.nn.initializers.normal(matrix.d_in**-0.5)
        shape = (pieces, matrix.experts, matrix.d_in, matrix.d_out // pieces)
        kernel = init(make.rngs.params(), shape, make.dtype)
        self.kernel = nnx.Param(kernel, axes=("piece", "expert", *reversed(matrix.axes)))
        bias = jnp.zeros((*shape[:2], shape[3]), make.dtype)
        self.bias = nnx.Param(bias, axes=("piece", "expert", None)) if matrix.bias else None

    def __call__(
        self,
        x_MI: Array,
        layer: Array | None,
        routes: Routes,
        adapters: LayerAdapters,
        columns_M: Array | None,
    ) -> list[Array]:
        """Each piece of the products.

        Args:
            layer: number of the layer where kernel and bias have all layers in front.
        """
        sizes_E, before = routes.sizes_E, 0 if layer is None else layer * self.pieces
        kernel, experts = self.kernel.get_value(), len(sizes_E)
        products = [
            grouped(x_MI, kernel, sizes_E, 1, (before + piece) * experts)
            for piece in range(self.pieces)
        ]
        if self.bias is not None:
            expert_M = of_rows(sizes_E, len(x_MI))
            biases = self.bias[...] if layer is None else self.bias[...][layer]
            products = [y + bias[expert_M] for y, bias in zip(products, biases, strict=True)]
        if (lora := adapters.matrices.get(self.name)) is None:
            return products
        assert columns_M is not None, "adapters without owners"
        with jax.named_scope("lora"):
            ranks = grouped(x_MI, lora.a, sizes_E, 2) * columns_M
            more = jnp.split(grouped(ranks, lora.b, sizes_E, 1), self.pieces, axis=-1)
            return [y + correction for y, correction in zip(products, more, strict=True)]


class _Tokens(NamedTuple):
    """Activations of tokens, the weights and numbers of their experts, their owners' columns."""

    x: Array
    weights: Array
    experts: Array
    columns: Array | None


class Experts(nnx.Module):
    """Σ over the chosen experts e of weight_e · down_e(activation(gate_e(x)) * up_e(x))
    (Shazeer et al. 2017). No token is dropped, however many choose an expert.

    On a mesh, each device has some of the experts and computes their part of the sum.
    """

    def __init__(self, config: ExpertsConfig, make: Make):
        self.config = config
        self.router = Router(config, make)
        names, matrices = config.MATRICES, config.matrices()
        self.experts_gate_up, self.experts_down = (
            ExpertMatrix(name, matrix, len(names[name].pieces), make)
            for name, matrix in matrices.items()
            if matrix.experts
        )

    def __call__(self, x_BTD: Array, layer: Layer, adapters: LayerAdapters) -> Array:
        with jax.named_scope("router"):
            weights_BTK, experts_BTK = self.router(x_BTD)
        return self.weighted(x_BTD, layer, weights_BTK, experts_BTK, adapters)

    def weighted(
        self,
        x_BTD: Array,
        layer: Layer,
        weights_BTK: Array,
        experts_BTK: Array,
        adapters: LayerAdapters,
    ) -> Array:
        """Sums the outputs of each token's experts, with these weights."""
        names = "experts_gate_up", "experts_down"
        graphdef, matrices = nnx.split([getattr(self, name) for name in names])
        lora = {name: adapters.matrices[name] for name in names if name in adapters.matrices}
        columns_BTR = adapters.owners.columns if lora and adapters.owners else None

        def run(
            first: int | Array, tokens: _Tokens, matrices: Any, lora: Any, number: Any
        ) -> Array:
            modules = nnx.merge(graphdef, matrices)
            return self._of_device(modules, LayerAdapters(lora, None), number, first, tokens)

        axis = 1 if layer.number is None else 2  # behind the layers and the pieces
        return per_device.by_expert(
            run,
            self.config.n_experts,
            _Tokens(x_BTD, weights_BTK, experts_BTK, columns_BTR),
            (matrices, axis),
            (lora, 0),
            (layer.number, None),
        )

    def _of_device(
        self,
        matrices: list[ExpertMatrix],
        adapters: LayerAdapters,
        number: Array | None,
        first: int | Array,
        tokens: _Tokens,
    ) -> Array:
        """Sums the outputs of a device's experts, of which ``first`` is the number of the first."""
        (gate_up, down), c = matrices, self.config
        flat: Any = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), tokens)
        with jax.named_scope("sort"):
            routes = sort_by_expert(flat.experts, first, gate_up.kernel.shape[-3])
        there = routes.order_M, routes.place_M, c.n_chosen
        columns_M = None if flat.columns is None else take_copies(flat.columns, *there)
        rest = number, routes, adapters, columns_M
        with jax.named_scope("experts"):
            x_MD = routes.known(take_copies(flat.x, *there))
            gate, up = map(keep, gate_up(x_MD, *rest))
            if c.limit:
                hidden = clamped_gate(gate, up, c.gain, c.limit)
            else:
                hidden = gated(gate, up, c.activation)
            y_MD = routes.known(down(hidden, *rest)[0])
        with jax.named_scope("combine"):
            y_MD = take_copies(y_MD, routes.place_M, routes.order_M, 1)
            y_TKD = y_MD.reshape(*flat.experts.shape, -1) * flat.weights[..., None]
            return y_TKD.sum(1).reshape(tokens.x.shape)
