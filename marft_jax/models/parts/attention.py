"""Attention with grouped key-value heads and rotary positions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from marft_jax.models.ops.attention import (
    CausalAttention,
    Layer,
    PerLayerKind,
    Scores,
    attention,
    in_window,
)
from marft_jax.models.ops.kv import KV, Ring
from marft_jax.models.ops.products import before_split
from marft_jax.models.ops.remat import keep
from marft_jax.models.parts.part import (
    LayerAdapters,
    Make,
    Matrix,
    Names,
    Reading,
    RMSNorm,
    over_rms,
)
from marft_jax.models.rope import Rope, RopeScaling, rope_tables, rotate
from marft_jax.parallel.ladder import round_up

Attend = Callable[..., tuple[Array, Any]]
"""(queries, new keys and values, cache, layer, a rule for scores if any) to (context, what the
layer keeps). The cache is the layer's own, or the stacked cache of all layers where ``layer`` has a
number. Where there are no new keys and values (None) the cache is read as it is."""


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Sizes and settings of an attention layer.

    Attributes:
        window: positions that a query reads, its own included; 0 for all.
        query_pre_attn_scalar: scores are divided by its square root; None: by √head_dim.
        rotary_channels: the first channels of a head, which are rotated; 0 for all.
        wide_norm: with ``qk_norm``, all heads are normalised together.
        cap: soft cap of scores; 0 for none.
        sinks: the softmax of each head has a further score, without a value.
        gated: the context is multiplied by sigmoid(g), where q gives each head its query and g.
        v_norm: values are divided by their root mean square, head by head.
        keys_as_values: values are the keys before their norm and their rotation.
        source: number of the earlier layer whose keys and values are read; None for own ones.
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
    rotary_channels: int = 0
    wide_norm: bool = False
    cap: float = 0.0
    sinks: bool = False
    gated: bool = False
    v_norm: bool = False
    keys_as_values: bool = False
    source: int | None = None

    MATRICES: ClassVar[Mapping[str, Names]] = {
        "q": Names("self_attn.q_proj", "attn_q"),
        "k": Names("self_attn.k_proj", "attn_k"),
        "v": Names("self_attn.v_proj", "attn_v"),
        "o": Names("self_attn.o_proj", "attn_output"),
    }
    recurrent: ClassVar[bool] = False
    MODULES: ClassVar[Mapping[str, Names]] = {
        "q_norm": Names("self_attn.q_norm", "attn_q_norm"),
        "k_norm": Names("self_attn.k_norm", "attn_k_norm"),
        "sinks": Names("self_attn.sinks", "attn_sinks.weight"),
    }

    @property
    def heads(self) -> int:
        return self.n_heads

    @property
    def plain(self) -> bool:
        """True where scores have no rule (``ops.attention.Scores``)."""
        return not (self.cap or self.sinks)

    @property
    def rotation(self) -> tuple[int, float, RopeScaling | None]:
        """Rotated channels, theta and scaling: what a rotary table depends on."""
        return self.rotary_channels or self.head_dim, self.rope_theta, self.rope_scaling

    def matrices(self) -> dict[str, Matrix]:
        def heads(n: int, rotated: bool, times: int = 1) -> Matrix:
            width, axes = n * self.head_dim * times, ("heads", "model")
            return Matrix(self.d_model, width, axes, self.qkv_bias, n if rotated else 0)

        width, has_keys = self.n_heads * self.head_dim, self.source is None
        matrices = {"q": heads(self.n_heads, rotated=True, times=1 + self.gated)}
        if has_keys:
            matrices["k"] = heads(self.n_kv_heads, rotated=True)
        if has_keys and not self.keys_as_values:
            matrices["v"] = heads(self.n_kv_heads, rotated=False)
        return matrices | {"o": Matrix(width, self.d_model, ("model", "heads"), self.o_bias)}

    def build(self, make: Make) -> Attention:
        return Attention(self, make)

    def init_cache(self, slots: int, length: int, dtype: DTypeLike, places: int = 1) -> KV:
        """Zeros. With fewer key-value heads than places, each place holds the head it reads. A
        layer with a window keeps the last positions alone, where that is less."""
        heads = math.lcm(self.n_kv_heads, places)
        heads = heads if self.n_heads % heads == 0 else self.n_kv_heads
        ring = ring_of(self.window, length)
        length = ring or length
        keys, values = (self.head_dim, length), (length, self.head_dim)
        zeros = (jnp.zeros((slots, heads, *shape), dtype) for shape in (keys, values))
        return (Ring if ring else KV)(*zeros)

    def flops(self, tokens: int, read: float) -> float:
        read = min(read, self.window) if self.window else read
        return 4 * tokens * read * self.n_heads * self.head_dim


class Attention(nnx.Module):
    """softmax(q kᵀ / √C) v, with rotated queries and keys (Vaswani et al. 2017, Su et al. 2021)."""

    def __init__(self, config: AttentionConfig, make: Make):
        self.config, self.eps = config, make.norm_eps
        linears = dict(zip(config.matrices(), make.linears(config), strict=True))
        self.q, self.k, self.v, self.o = (linears.get(name) for name in config.MATRICES)
        widths = [n if config.wide_norm else 1 for n in (config.n_heads, config.n_kv_heads)]
        norms = [make.norm(n * config.head_dim) if config.qk_norm else None for n in widths]
        self.q_norm, self.k_norm = norms[0], norms[1] if "k" in linears else None
        sinks = jnp.zeros((config.n_heads,), make.dtype)
        self.sinks = nnx.Param(sinks, axes=("heads",)) if config.sinks else None

    def __call__(
        self,
        x_BTD: Array,
        layer: Layer,
        ropes: Ropes,
        adapters: LayerAdapters,
        cache: Any,
        reading: Reading,
    ) -> tuple[Array, Any]:
        """Computes the output, and the keys and values that ``reading.attend`` keeps."""
        c = self.config
        assert self.q is not None and self.o is not None
        rope = rope_of(ropes, layer.rope)
        new = self._keys_and_values(x_BTD, rope, adapters)
        q = self._heads(self.q(x_BTD, adapters), c.n_heads, self.q_norm)
        q, gate = jnp.split(q, 2, axis=-1) if c.gated else (q, None)
        scale = (c.head_dim / (c.query_pre_attn_scalar or c.head_dim)) ** 0.5
        scale = scale if rope.query_scale is None else scale * rope.query_scale
        q = keep(rotate(self._each_normalised(q, self.q_norm), rope, scale))
        sinks_H = None if self.sinks is None else self.sinks[...]
        rule = () if c.plain else (Scores(c.cap, sinks_H),)
        with jax.named_scope("scores"):
            context_BHTC, kept = reading.attend(q, new, cache, layer, *rule)
        if gate is not None:
            context_BHTC = context_BHTC * jax.nn.sigmoid(gate)
        b, _, t, _ = context_BHTC.shape
        merged = context_BHTC.transpose(0, 2, 1, 3).reshape(b, t, -1)
        return keep(self.o(merged, adapters)), kept

    def _keys_and_values(self, x_BTD: Array, rope: Rope, adapters: LayerAdapters) -> KV | None:
        """Keys and values of these tokens; None where those of an earlier layer are read."""
        c = self.config
        if self.k is None:
            return None
        k = self.k(x_BTD, adapters)
        v = k if self.v is None else self.v(x_BTD, adapters)
        k, v = self._heads(k, c.n_kv_heads, self.k_norm), self._heads(v, c.n_kv_heads)
        v = over_rms(v, self.eps).astype(v.dtype) if c.v_norm else v
        k = rotate(self._each_normalised(k, self.k_norm), rope).swapaxes(2, 3)
        return KV(keep(k), keep(v))

    def _heads(self, x_BTX: Array, heads: int, norm: RMSNorm | None = None) -> Array:
        """Splits into heads, ``[B, heads, T, C]``; ``wide_norm`` normalises all first."""
        b, t, _ = x_BTX.shape
        x_BTX = norm(x_BTX) if norm is not None and self.config.wide_norm else x_BTX
        x_BTX = before_split(x_BTX) if t == 1 else x_BTX
        return x_BTX.reshape(b, t, heads, -1).transpose(0, 2, 1, 3)

    def _each_normalised(self, x_BHTC: Array, norm: RMSNorm | None) -> Array:
        """Each head normalised by itself, where the layer has such a norm."""
        return x_BHTC if norm is None or self.config.wide_norm else norm(x_BHTC)


def ring_of(window: int, length: int) -> int:
    """Positions of a ring for a window; 0 where all ``length`` positions are no more, or there is
    no window. It has room for a quarter more, so that prompts may start from what was not long
    ago."""
    size = round_up(window + max(64, window // 4), 64)
    return size if window and size < length else 0


Ropes = Sequence[Rope]
"""The rotary tables of all layers."""


def ropes(mixers: Sequence[AttentionConfig], positions_BT: Array) -> Ropes:
    """Rotary tables, computed once for all layers."""
    return [rope_tables(*rotation, positions_BT) for rotation in rotations(mixers)]


def rotations(mixers: Sequence[AttentionConfig]) -> list[tuple[int, float, RopeScaling | None]]:
    """Every ``rotation`` among the layers."""
    return [*dict.fromkeys(mixer.rotation for mixer in mixers)]


def rope_of(ropes: Ropes, number: int | Array) -> Rope:
    """A layer's table; ``number`` is ``Layer.rope``."""
    if isinstance(number, int):
        return ropes[number]
    return jax.tree.map(lambda *tables: jax.lax.select_n(number, *tables), *ropes)


def attend_rows(form: CausalAttention, until_BT: Array, positions_BT: Array, window: int) -> Attend:
    """Attention within whole rows, which keeps the new keys and values.

    Args:
        form: the platform's form (``ops.attention_choice``).
        until_BT, positions_BT, window: see ``ops.attention.masks``.
    """
    attention = form(until_BT, positions_BT, window)

    def attend(
        q_BHTC: Array, new: KV | None, earlier: Any, layer: Layer, *rule: Scores
    ) -> tuple[Array, KV]:
        kv = earlier if new is None else new
        return attention(q_BHTC, kv, layer.slides, *rule), kv

    return attend


def attend_cache(at_BT: Array, positions_BT: Array, read: int, window: int) -> Attend:
    """Attention of new tokens over the cache of their rows and over themselves. Over a ring it is
    of one token of each row.

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

    def attend(
        q_BHTC: Array, new: KV | None, cache: KV, layer: Layer, *rule: Scores
    ) -> tuple[Array, KV]:
        at, mask_BTS = at_BT, masks.of(layer.slides)
        if isinstance(cache, Ring):
            assert at_BT.shape[1] == 1
            at, mask_BTS = cache.places(at_BT, read), cache.in_window(positions_BT, window)
        if new is None:  # the cache of one earlier layer
            return attention(q_BHTC, cache, mask_BTS, *rule), cache
        cache = cache.append(new, at, layer.number)
        return attention(q_BHTC, cache.of(layer.number), mask_BTS, *rule), cache

    return attend
