"""Gated short convolution: the mixer of LFM2's layers without attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from marft_jax.models.ops.attention import Layer
from marft_jax.models.ops.remat import keep
from marft_jax.models.ops.state import MixerState, causal_convolution, inputs_before
from marft_jax.models.parts.attention import Ropes
from marft_jax.models.parts.part import LayerAdapters, Make, Matrix, Names, Reading


@dataclasses.dataclass(frozen=True)
class ShortConvConfig:
    """Sizes of a gated convolution over the last ``taps`` tokens, channel by channel."""

    d_model: int
    taps: int

    MATRICES: ClassVar[Mapping[str, Names]] = {
        "conv_in_proj": Names("conv.in_proj", "shortconv.in_proj"),
        "conv_out_proj": Names("conv.out_proj", "shortconv.out_proj"),
    }
    MODULES: ClassVar[Mapping[str, Names]] = {"filter": Names("conv.conv", "shortconv.conv")}
    recurrent: ClassVar[bool] = True
    source: ClassVar[None] = None

    @property
    def heads(self) -> int:
        return self.d_model

    def matrices(self) -> dict[str, Matrix]:
        return {
            "conv_in_proj": Matrix(self.d_model, 3 * self.d_model, ("hidden", "model")),
            "conv_out_proj": Matrix(self.d_model, self.d_model, ("model", "hidden")),
        }

    def build(self, make: Make) -> ShortConv:
        return ShortConv(self, make)

    def init_cache(self, slots: int, length: int, dtype: DTypeLike, places: int = 1) -> MixerState:
        return MixerState(jnp.zeros((slots, self.taps - 1, self.d_model), dtype))

    def flops(self, tokens: int, read: float) -> float:
        return 2 * tokens * self.taps * self.d_model


class Filter(nnx.Module):
    """Weights of a convolution that keeps channels apart, ``[channels, 1, taps]`` as in files."""

    def __init__(self, channels: int, taps: int, make: Make):
        weight = nnx.initializers.normal(taps**-0.5)(
            make.rngs.params(), (channels, 1, taps), make.dtype
        )
        self.weight = nnx.Param(weight, axes=(None, None, None))

    def __call__(
        self, x_BTX: Array, state: MixerState | None, reading: Reading
    ) -> tuple[Array, Array, Array]:
        """The convolution of x, and its last inputs, at the end and at the snapshot."""
        (b, t, _), before = x_BTX.shape, None if state is None else state.inputs
        filter_XK = self.weight[...][:, 0]
        y, x = causal_convolution(x_BTX, filter_XK, before, reading.until_BT, reading.before_BN)
        n, at_B = filter_XK.shape[1] - 1, reading.snapshot_B
        end_B = jnp.full(b, t) if reading.real_BT is None else reading.real_BT.sum(1)
        now = inputs_before(x, end_B, n)
        return y, now, now if at_B is None else inputs_before(x, at_B, n)


class ShortConv(nnx.Module):
    """out(c * convolution(b * x)), where in(x) gives b, c and x (Liquid AI 2025, LFM2)."""

    def __init__(self, config: ShortConvConfig, make: Make):
        self.conv_in_proj, self.conv_out_proj = make.linears(config)
        self.filter = Filter(config.d_model, config.taps, make)

    def __call__(
        self,
        x_BTD: Array,
        layer: Layer,
        ropes: Ropes,
        adapters: LayerAdapters,
        cache: MixerState | None,
        reading: Reading,
    ) -> tuple[Array, Any]:
        """Computes the output, and the inputs of the convolution that later tokens read."""
        b, c, x = jnp.split(keep(self.conv_in_proj(x_BTD, adapters)), 3, axis=-1)
        state = None if cache is None else cache.of(layer.number).at(reading.start_B)
        y, now, then = self.filter(b * x, state, reading)
        out = keep(self.conv_out_proj(c * y, adapters))
        return out, reading.keep(cache, layer, MixerState(now), MixerState(then))
