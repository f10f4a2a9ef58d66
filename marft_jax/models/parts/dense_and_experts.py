"""Mixture of experts beside a dense mlp, each between norms of its own: the mlp of Gemma 4 26B."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from marft_jax.models.ops.attention import Layer
from marft_jax.models.parts.dense import DenseConfig, gated_mlp
from marft_jax.models.parts.experts import Experts, ExpertsConfig
from marft_jax.models.parts.part import LayerAdapters, Make, Matrix, Names, over_rms


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseAndExpertsConfig(ExpertsConfig):
    """Sizes of E experts and of the dense mlp, ``d_model -> d_ff -> d_model``."""

    d_ff: int

    MATRICES: ClassVar[Mapping[str, Names]] = {**DenseConfig.MATRICES, **ExpertsConfig.MATRICES}
    MODULES: ClassVar[Mapping[str, Names]] = {
        "router": Names("router.proj", "ffn_gate_inp"),
        "router_scale": Names("router.scale", "ffn_gate_inp.scale"),
        "expert_scale": Names("router.per_expert_scale", "ffn_down_exps.scale"),
        "dense_norm": Names("pre_feedforward_layernorm", "ffn_norm"),
        "dense_post_norm": Names("post_feedforward_layernorm_1", "post_ffw_norm_1"),
        "experts_norm": Names("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
        "experts_post_norm": Names("post_feedforward_layernorm_2", "post_ffw_norm_2"),
    }
    normalises: ClassVar[bool] = True

    @property
    def dense(self) -> DenseConfig:
        return DenseConfig(self.d_model, self.d_ff, self.activation)

    def matrices(self) -> dict[str, Matrix]:
        return self.dense.matrices() | super().matrices()

    def build(self, make: Make) -> DenseAndExperts:
        return DenseAndExperts(self, make)


class DenseAndExperts(Experts):
    """norm(dense(norm x)) + norm(Σ s_e weight_e expert_e(norm x)) over the chosen experts e, with
    four norms and a number s_e of each expert; the router reads x / rms(x) · scale / √D."""

    def __init__(self, config: DenseAndExpertsConfig, make: Make):
        super().__init__(config, make)
        self.eps, d = make.norm_eps, config.d_model
        self.gate, self.up, self.down = make.linears(config.dense)
        self.dense_norm, self.dense_post_norm = make.norm(d), make.norm(d)
        self.experts_norm, self.experts_post_norm = make.norm(d), make.norm(d)
        self.router_scale = nnx.Param(jnp.ones((d,), make.dtype), axes=(None,))
        self.expert_scale = nnx.Param(jnp.ones((config.n_experts,), make.dtype), axes=(None,))

    def __call__(self, x_BTD: Array, layer: Layer, adapters: LayerAdapters) -> Array:
        matrices, activation = (self.gate, self.up, self.down), self.config.activation
        dense = gated_mlp(self.dense_norm(x_BTD), matrices, activation, adapters)
        with jax.named_scope("router"):
            scale = self.router_scale[...].astype(jnp.float32)[None, None]
            x32 = over_rms(x_BTD, self.eps) * scale * x_BTD.shape[-1] ** -0.5
            weights, experts = self.router(x32)
            weights = (weights * self.expert_scale[...][experts]).astype(x_BTD.dtype)
        routed = self.weighted(self.experts_norm(x_BTD), layer, weights, experts, adapters)
        return self.dense_post_norm(dense) + self.experts_post_norm(routed)
