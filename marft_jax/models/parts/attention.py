"""Attention with grouped key-value heads and rotary positions: the mixer of every family so far."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from marft_jax.models.ops.attention import (
    CausalAttention,
    Layer,
    PerLayerKind,
    attention,
    in_window,
)
from marft_jax.models.ops.kv import KV
from marft_jax.models.ops.remat import keep
from marft_jax.models.parts.part import LayerAdapters, Make, Matrix, Names
from marft_jax.models.rope import Rope, RopeScaling, rope_tables, rotate

Attend = Callable[[Array, KV, Any, Layer], tuple[Array, Any]]
"""(queries, new keys and values, cache, layer) to (context, what the layer keeps). The cache is the
layer's own, or the stacked cache of all layers where ``layer`` has a number."""


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Sizes and settings of an attention layer.

    Attributes:
        window: positions that a query reads, its own included; 0 for all.
        query_pre_attn_scalar: scores are divided by its square root; None: by √head_dim.
    """

    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_theta: float = 1e4
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    query_pre_attn_scalar: float | None = None
    window: int = 0

    MATRICES: ClassVar[Mapping[str, Names]] = {
        "q": Names("self_attn.q_proj", "attn_q"),
        "k": Names("self_attn.k_proj", "attn_k"),
        "v": Names("self_attn.v_proj", "attn_v"),
        "o": Names("self_attn.o_proj", "attn_output"),
    }
    MODULES: ClassVar[Mapping[str, Names]] = {
        "q_norm": Names("self_attn.q_norm", "attn_q_norm"),
        "k_norm": Names("self_attn.k_norm", "attn_k_norm"),
    }

    @property
    def heads(self) -> int:
        return self.n_heads

    def matrices(self) -> dict[str, Matrix]:
        def heads(n: int, rotated: bool) -> Matrix:
            width, axes = n * self.head_dim, ("heads", "model")
            return Matrix(self.d_model, width, axes, self.qkv_bias, n if rotated else 0)

        width = self.n_heads * self.head_dim
        return {
            "q": heads(self.n_heads, rotated=True),
            "k": heads(self.n_kv_heads, rotated=True),
            "v": heads(self.n_kv_heads, rotated=False),
            "o": Matrix(width, self.d_model, ("model", "heads"), self.o_bias),
        }

    def build(self, make: Make) -> Attention:
        return Attention(self, make)

    def init_cache(self, slots: int, length: int, dtype: DTypeLike, places: int = 1) -> KV:
        """Zeros. With fewer key-value heads than places, each place holds the head it reads."""
        heads = math.lcm(self.n_kv_heads, places)
        heads = heads if self.n_heads % heads == 0 else self.n_kv_heads
        keys, values = (self.head_dim, length), (length, self.head_dim)
        return KV(*(jnp.zeros((slots, heads, *shape), dtype) for shape in (keys, values)))

    def flops(self, tokens: int, read: float) -> float:
        read = min(read, self.window) if self.window else read
        return 4 * tokens * read * self.n_heads * self.head_dim


class Attention(nnx.Module):
    """softmax(q kᵀ / √C) v, with rotated queries and keys (Vaswani et al. 2017, Su et al. 2021)."""

    def __init__(self, config: AttentionConfig, make: Make):
        self.config = config
        self.q, self.k, self.v, self.o = make.linears(config)
        self.q_norm = make.norm(config.head_dim) if config.qk_norm else None
        self.k_norm = make.norm(config.head_dim) if config.qk_norm else None

    def __call__(
        self,
        x_BTD: Array,
        layer: Layer,
        ropes: PerLayerKind,
        adapters: LayerAdapters,
        cache: Any,
        attend: Attend,
    ) -> tuple[Array, Any]:
        """Computes the output, and the keys and values that ``attend`` keeps."""
        c = self.config
        q = self._heads(self.q(x_BTD, adapters), c.n_heads)
        k = self._heads(self.k(x_BTD, adapters), c.n_kv_heads)
        v = self._heads(self.v(x_BTD, adapters), c.n_kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        rope: Rope = ropes.of(layer.slides)
        scale = (c.head_dim / (c.query_pre_attn_scalar or c.head_dim)) ** 0.5
        q, k = rotate(q, rope, scale), rotate(k, rope).swapaxes(2, 3)
        q, k, v = (keep(x) for x in (q, k, v))
        context_BHTC, kept = attend(q, KV(k, v), cache, layer)
        b, _, t, _ = context_BHTC.shape
        merged = context_BHTC.transpose(0, 2, 1, 3).reshape(b, t, -1)
        return keep(self.o(merged, adapters)), kept

    def _heads(self, x_BTX: Array, heads: int) -> Array:
        b, t, _ = x_BTX.shape
        return x_BTX.reshape(b, t, heads, self.config.head_dim).transpose(0, 2, 1, 3)


def ropes(mixers: Sequence[AttentionConfig], positions_BT: Array) -> PerLayerKind:
    """Rotary tables of full and of sliding layers, computed once for all layers."""
    kinds = [[m for m in mixers if bool(m.window) == slides] or mixers for slides in (False, True)]
    settings = [(m.head_dim, m.rope_theta, m.rope_scaling) for m, *_ in kinds]
    return PerLayerKind(*(rope_tables(*each, positions_BT) for each in dict.fromkeys(settings)))


def attend_rows(form: CausalAttention, until_BT: Array, positions_BT: Array, window: int) -> Attend:
    """Attention within whole rows, which keeps the new keys and values.

    Args:
        form: the platform's form (``ops.attention_choice``).
        until_BT, positions_BT, window: see ``ops.attention.masks``.
    """
    attention = form(until_BT, positions_BT, window)

    def attend(q_BHTC: Array, new: KV, _: Any, layer: Layer) -> tuple[Array, KV]:
        return attention(q_BHTC, new, layer.slides), new

    return attend


def attend_cache(at_BT: Array, positions_BT: Array, read: int, window: int) -> Attend:
    """Attention of new tokens over the cache of their rows and over themselves.

    Args:
        at_BT: where the new keys and values go; those at ``read`` are dropped.
        positions_BT: positions of the queries; a query reads the cache up to its own.
        read: positions of the cache that are read.
        window: positions that layers that slide read; 0 for all.
    """
    places_1R = jnp.arange(read)[None]
    full = places_1R[:, None] <= positions_BT[:, :, None]
    sliding = full & in_window(positions_BT, places_1R, window) if window else None
    masks = PerLayerKind(full, sliding)

    def attend(q_BHTC: Array, new: KV, cache: KV, layer: Layer) -> tuple[Array, KV]:
        cache = cache.append(new, at_BT, layer.number)
        return attention(q_BHTC, cache.of(layer.number), masks.of(layer.slides)), cache

    return attend
