"""Gated delta net: the mixer of Qwen3.5's layers without attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from marft_jax.models.ops.attention import Layer
from marft_jax.models.ops.delta import CHUNK, Writes, branched, chunked, recurrent
from marft_jax.models.ops.remat import keep
from marft_jax.models.ops.state import MixerState
from marft_jax.models.parts.attention import Ropes
from marft_jax.models.parts.part import LayerAdapters, Make, Matrix, Names, Reading, RMSNorm
from marft_jax.models.parts.short_conv import Filter


@dataclasses.dataclass(frozen=True)
class DeltaNetConfig:
    """Sizes of a gated delta net.

    Attributes:
        n_key_heads: heads of queries and keys, each for as many heads of values.
        taps: tokens that the convolution of queries, keys and values reads.
    """

    d_model: int
    n_key_heads: int
    n_value_heads: int
    key_channels: int
    value_channels: int
    taps: int

    MATRICES: ClassVar[Mapping[str, Names]] = {
        "in_proj_qkv": Names("linear_attn.in_proj_qkv", "attn_qkv"),
        "in_proj_z": Names("linear_attn.in_proj_z", "attn_gate"),
        "in_proj_b": Names("linear_attn.in_proj_b", "ssm_beta"),
        "in_proj_a": Names("linear_attn.in_proj_a", "ssm_alpha"),
        "out_proj": Names("linear_attn.out_proj", "ssm_out"),
    }
    MODULES: ClassVar[Mapping[str, Names]] = {
        "filter": Names("linear_attn.conv1d", "ssm_conv1d"),
        "norm": Names("linear_attn.norm", "ssm_norm"),
        "log_rate": Names("linear_attn.A_log", "ssm_a"),
        "step_bias": Names("linear_attn.dt_bias", "ssm_dt.bias"),
    }
    recurrent: ClassVar[bool] = True
    source: ClassVar[None] = None

    @property
    def heads(self) -> int:
        return self.n_value_heads

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of queries, keys and values."""
        keys = self.n_key_heads * self.key_channels
        return keys, keys, self.n_value_heads * self.value_channels

    def matrices(self) -> dict[str, Matrix]:
        def into(width: int) -> Matrix:
            return Matrix(self.d_model, width, ("heads", "model"))

        *_, values = self.widths
        return {
            "in_proj_qkv": into(sum(self.widths)),
            "in_proj_z": into(values),
            "in_proj_b": into(self.n_value_heads),
            "in_proj_a": into(self.n_value_heads),
            "out_proj": Matrix(values, self.d_model, ("model", "heads")),
        }

    def build(self, make: Make) -> DeltaNet:
        return DeltaNet(self, make)

    def init_cache(self, slots: int, length: int, dtype: DTypeLike, places: int = 1) -> MixerState:
        channels = self.key_channels, self.value_channels
        return MixerState(
            jnp.zeros((slots, self.taps - 1, sum(self.widths)), dtype),
            jnp.zeros((slots, self.n_value_heads, *channels), jnp.float32),
        )

    def flops(self, tokens: int, read: float) -> float:
        keys, values = self.key_channels, self.value_channels
        of_head = 6 * keys * values + 4 * CHUNK * (keys + values)
        return tokens * (self.n_value_heads * of_head + 2 * self.taps * sum(self.widths))


class DeltaNet(nnx.Module):
    """out(norm(o) * silu(z(x))), where o reads the state of a gated delta rule (``ops.delta``).

    Queries, keys and values are silu(convolution(qkv(x))), β = sigmoid(b(x)), and
    log α = -exp(log_rate) · softplus(a(x) + step_bias).
    Source: Yang et al. 2024, Gated Delta Networks.
    """

    def __init__(self, config: DeltaNetConfig, make: Make):
        self.config = config
        linears = make.linears(config)
        self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a, self.out_proj = linears
        self.filter = Filter(sum(config.widths), config.taps, make)
        self.norm = RMSNorm(config.value_channels, make.norm_eps, make.dtype)
        zeros = jnp.zeros((config.n_value_heads,), jnp.float32)
        self.log_rate, self.step_bias = (nnx.Param(zeros, axes=(None,)) for _ in range(2))

    def __call__(
        self,
        x_BTD: Array,
        layer: Layer,
        ropes: Ropes,
        adapters: LayerAdapters,
        cache: MixerState | None,
        reading: Reading,
    ) -> tuple[Array, Any]:
        """Computes the output, and the state after the last token that is not padding."""
        state = None if cache is None else cache.of(layer.number).at(reading.start_B)
        mixed, now, then = self.filter(keep(self.in_proj_qkv(x_BTD, adapters)), state, reading)
        tokens = self._writes(jax.nn.silu(mixed), x_BTD, adapters, reading)
        memory = before = None if state is None else state.memory
        with jax.named_scope("delta_rule"):
            if memory is not None and x_BTD.shape[1] == 1:
                one = jax.tree.map(lambda x: x[:, :, 0], tokens)
                out, memory = recurrent(one, memory)
                out = out[:, :, None]
            elif reading.before_BN is not None:
                out = branched(tokens, reading.until_BT, reading.before_BN)
            else:
                out, memory, before = chunked(tokens, memory, reading.snapshot_B)
        out_BTHC = keep(out.swapaxes(1, 2).astype(x_BTD.dtype))
        gate = keep(self.in_proj_z(x_BTD, adapters)).reshape(out_BTHC.shape)
        out_BTHC = self.norm(out_BTHC) * jax.nn.silu(gate.astype(jnp.float32))
        merged = out_BTHC.astype(x_BTD.dtype).reshape(*x_BTD.shape[:2], -1)
        kept = reading.keep(cache, layer, MixerState(now, memory), MixerState(then, before))
        return keep(self.out_proj(merged, adapters)), kept

    def _writes(
        self, mixed_BTX: Array, x_BTD: Array, adapters: LayerAdapters, reading: Reading
    ) -> Writes:
        """Queries, keys, values, decays and corrections of all tokens, those of padding 0."""
        c, (keys, *_) = self.config, self.config.widths
        mixed_BTX = mixed_BTX.astype(jnp.float32)
        q, k, v = jnp.split(mixed_BTX, (keys, 2 * keys), axis=-1)

        def heads(x: Array, channels: int) -> Array:
            x = x.reshape(*x.shape[:2], -1, channels).swapaxes(1, 2)
            return jnp.repeat(x, c.n_value_heads // x.shape[1], axis=1)

        def of_heads(x_BTH: Array) -> Array:
            real = reading.real_BT
            x_BTH = x_BTH if real is None else jnp.where(real[..., None], x_BTH, 0)
            return x_BTH.swapaxes(1, 2)

        q, k = (_unit(heads(x, c.key_channels)) for x in (q, k))
        a = self.in_proj_a(x_BTD, adapters).astype(jnp.float32)
        b = self.in_proj_b(x_BTD, adapters).astype(jnp.float32)
        step = jax.nn.softplus(a + self.step_bias[...][None, None])
        log_decay = -jnp.exp(self.log_rate[...])[None, None] * step
        return Writes(
            q * c.key_channels**-0.5,
            k,
            heads(v, c.value_channels),
            of_heads(log_decay),
            of_heads(jax.nn.sigmoid(b)),
        )


def _unit(x: Array) -> Array:
    """x / √(|x|² + 1e-6)."""
    return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)
