"""Decoder-only transformer of the Llama, Mistral, Qwen2, Qwen3 and Gemma 3 families.

The module owns parameters, initialisers and dtypes. Everything outside uses it functionally:

    graphdef, base = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    hidden_BTD, kv = forward(graphdef, base, tokens_BT, positions_BT, until_BT, adapters, owners_BT)

``base`` is frozen: it is an argument of its own, never donated, never differentiated. On TPUs its
layers are stacked, one array per matrix, and scanned, so that depth costs no time to compile; on
CPUs and GPUs they are unrolled, one array per layer and matrix, because a scan there copies every
slice before it multiplies. Matrices are ``[out, in]``, as in the files they come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from marft_jax.models.lora import Fused, FusedAdapters, OwnerMask, add_lora
from marft_jax.models.ops.attention import (
    KV,
    Cache,
    CausalAttention,
    Either,
    Layer,
    causal_attention,
)
from marft_jax.models.ops.products import Activation, gated, product
from marft_jax.models.ops.remat import Remat, keep, rematerialised
from marft_jax.models.rope import RopeScaling, rope_tables, rotate

Attend = Callable[[Array, KV, Any, Layer], tuple[Array, Any]]
"""(queries, new keys and values, cache, layer) to context, and the cache with what is kept. The
cache is the layer's own, or that of all layers, stacked, where ``layer`` has a number."""
Lora = dict[str, Fused]
"""Adapters of a layer by matrix."""
Base = nnx.State[Any, Any]
"""Parameters of a ``Decoder``: frozen, and an argument of their own everywhere."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder; ``families.py`` reads it from config.json, ``gguf.py`` from GGUF.

    Attributes:
        window: positions that layers which slide read, the query's own included.
        sliding: of each layer, whether it slides; empty where none does.
        local_rope_theta: rotary base of layers that slide, if it is another than ``rope_theta``.
        query_pre_attn_scalar: scores are divided by its root; None is ``head_dim``.
        post_norms: what attention and MLP write is normalised before it is added.
        norm_offset: scales of norms are stored less 1.
        scale_embeddings: embeddings are multiplied by √d_model, rounded to their type.
        stacked: its layers are one array per matrix, scanned.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    max_position: int
    norm_eps: float = 1e-5
    rope_theta: float = 1e4
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    window: int = 0
    sliding: tuple[bool, ...] = ()
    local_rope_theta: float | None = None
    query_pre_attn_scalar: float | None = None
    activation: Activation = "silu"
    post_norms: bool = False
    norm_offset: bool = False
    scale_embeddings: bool = False
    stacked: bool = False

    @property
    def query_scale(self) -> float:
        """Factor of queries, beside 1 / √head_dim."""
        return (self.head_dim / (self.query_pre_attn_scalar or self.head_dim)) ** 0.5

    def target_shape(self, target: str) -> tuple[int, int]:
        """(in, out) of the matrix ``target``, one of q, k, v, o, gate, up, down."""
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        return {
            "q": (self.d_model, q),
            "k": (self.d_model, kv),
            "v": (self.d_model, kv),
            "o": (q, self.d_model),
            "gate": (self.d_model, self.d_ff),
            "up": (self.d_model, self.d_ff),
            "down": (self.d_ff, self.d_model),
        }[target]


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, computed in float32 (Zhang & Sennrich 2019).

    Args:
        offset: the scale is stored less 1, and rounded with the product only, as Gemma does.
    """

    def __init__(self, width: int, eps: float, dtype: DTypeLike, offset: bool = False):
        self.scale = nnx.Param(jnp.full((width,), 0 if offset else 1, dtype))
        self.eps, self.offset = eps, offset

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
        if self.offset:
            return (x32 * (1 + scale.astype(jnp.float32))).astype(x.dtype)
        return x32.astype(x.dtype) * scale


class Linear(nnx.Module):
    """A matrix of the frozen base, with the owner's low-rank correction where there is one."""

    def __init__(self, d_in: int, d_out: int, *, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs):
        init = jax.nn.initializers.normal(d_in**-0.5)
        self.kernel = nnx.Param(init(rngs.params(), (d_out, d_in), dtype))
        self.bias = nnx.Param(jnp.zeros((d_out,), dtype)) if bias else None

    def __call__(
        self, x: Array, lora: Fused | None = None, owners: OwnerMask | None = None
    ) -> Array:
        y = product(x, self.kernel[...])
        if self.bias is not None:
            y = y + self.bias[...].reshape((1,) * (y.ndim - 1) + (-1,))
        return y if lora is None else add_lora(y, x, lora, owners)


class Block(nnx.Module):
    """Attention and gated MLP, each with a norm before it, or one on either side."""

    def __init__(self, c: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        def linear(target: str, bias: bool = False) -> Linear:
            return Linear(*c.target_shape(target), bias=bias, dtype=dtype, rngs=rngs)

        def norm(width: int) -> RMSNorm:
            return RMSNorm(width, c.norm_eps, dtype, c.norm_offset)

        self.config = c
        self.attn_norm = norm(c.d_model)
        self.q, self.k, self.v = (linear(t, c.qkv_bias) for t in ("q", "k", "v"))
        self.o = linear("o", c.o_bias)
        self.q_norm = norm(c.head_dim) if c.qk_norm else None
        self.k_norm = norm(c.head_dim) if c.qk_norm else None
        self.attn_post_norm = norm(c.d_model) if c.post_norms else None
        self.mlp_norm = norm(c.d_model)
        self.mlp_post_norm = norm(c.d_model) if c.post_norms else None
        self.gate, self.up, self.down = (linear(t) for t in ("gate", "up", "down"))

    def __call__(
        self,
        layer: Layer,
        x_BTD: Array,
        rope: Either,
        lora: Lora,
        owners: OwnerMask | None,
        cache: Any,
        attend: Attend,
    ) -> tuple[Array, Any]:
        """Computes the block's output, and what ``attend`` keeps of keys and values."""
        with jax.named_scope("attention"):
            h = self.attn_norm(x_BTD)
            q = self._heads(self.q(h, lora.get("q"), owners), self.config.n_heads)
            k = self._heads(self.k(h, lora.get("k"), owners), self.config.n_kv_heads)
            v = self._heads(self.v(h, lora.get("v"), owners), self.config.n_kv_heads)
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm(q), self.k_norm(k)
            angles = rope.of(layer.slides)
            q, k = rotate(q, angles, self.config.query_scale), rotate(k, angles).swapaxes(2, 3)
            q, k, v = (keep(x) for x in (q, k, v))
            context_BHTC, kept = attend(q, KV(k, v), cache, layer)
            b, _, t, _ = context_BHTC.shape
            merged = context_BHTC.transpose(0, 2, 1, 3).reshape(b, t, -1)
            out = keep(self.o(merged, lora.get("o"), owners))
            x_BTD = x_BTD + (out if self.attn_post_norm is None else self.attn_post_norm(out))
        with jax.named_scope("mlp"):
            h = self.mlp_norm(x_BTD)
            gate = keep(self.gate(h, lora.get("gate"), owners))
            up = keep(self.up(h, lora.get("up"), owners))
            opened = gated(gate, up, self.config.activation)
            out = self.down(opened, lora.get("down"), owners)
            return x_BTD + (out if self.mlp_post_norm is None else self.mlp_post_norm(out)), kept

    def _heads(self, x_BTX: Array, heads: int) -> Array:
        b, t, _ = x_BTX.shape
        return x_BTX.reshape(b, t, heads, self.config.head_dim).transpose(0, 2, 1, 3)


class Embed(nnx.Module):
    """Token table."""

    def __init__(self, c: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        init = jax.nn.initializers.normal(0.02)
        self.embedding = nnx.Param(init(rngs.params(), (c.vocab_size, c.d_model), dtype))


class Decoder(nnx.Module):
    """Token ids to final hidden states, and hidden states to vocabulary logits.

    Args:
        attention: of whole rows.
        remat: what the backward pass computes again.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        attention: CausalAttention = causal_attention,
        remat: Remat = "none",
    ):
        c = self.config = config
        self.attention = attention
        self.remat: Remat = remat
        self.embed = Embed(c, dtype=dtype, rngs=rngs)
        blocks = [Block(c, dtype=dtype, rngs=rngs) for _ in range(c.n_layers)]
        self.layers = _stack(blocks) if c.stacked else nnx.List(blocks)
        self.final_norm = RMSNorm(c.d_model, c.norm_eps, dtype, c.norm_offset)
        self.lm_head = (
            None
            if c.tie_embeddings
            else Linear(c.d_model, c.vocab_size, bias=False, dtype=dtype, rngs=rngs)
        )

    def hidden(
        self,
        tokens_BT: Array,
        positions_BT: Array,
        attend: Attend,
        cache: Cache | None,
        lora: FusedAdapters | None,
        owners: OwnerMask | None,
    ) -> tuple[Array, Cache]:
        """Final normed hidden states, and what ``attend`` kept.

        Args:
            cache: what ``attend`` reads and writes; without one, it keeps what is new.
        """
        x_BTD = self.embed.embedding[...][tokens_BT]
        if self.config.scale_embeddings:
            x_BTD = x_BTD * jnp.asarray(self.config.d_model**0.5, x_BTD.dtype)
        rope = ropes(self.config, positions_BT)

        def run(graphdef: Any, layer: Layer, weights: Base, *args: Any) -> tuple[Array, Any]:
            return nnx.merge(graphdef, weights)(layer, *args, attend)

        stacked = self.config.stacked
        run = rematerialised(run, self.remat, 0 if stacked else (0, 1), scanned=stacked)
        through = self._scanned if stacked else self._unrolled
        x_BTD, kept = through(run, x_BTD, rope, lora, owners, cache)
        return self.final_norm(x_BTD), kept

    def _unrolled(
        self, run: Any, x_BTD: Array, rope: Either, lora: Any, owners: Any, cache: Any
    ) -> tuple[Array, list[KV]]:
        assert isinstance(self.layers, nnx.List)
        kept = list[KV]()
        # the first block, and the first that slides, are traced and differentiated for all
        run = jax.jit(run, static_argnums=(0, 1))
        for i, block in enumerate(self.layers):
            with jax.named_scope(f"layer_{i}"):
                graphdef, weights = nnx.split(block)
                adapters = lora.of(i) if lora else {}
                own = None if cache is None else cache[i]
                layer = Layer(slides=bool(self.config.sliding) and self.config.sliding[i])
                x_BTD, kv = run(graphdef, layer, weights, x_BTD, rope, adapters, owners, own)
                kept.append(kv)
        return x_BTD, kept

    def _scanned(
        self, run: Any, x_BTD: Array, rope: Either, lora: Any, owners: Any, cache: Any
    ) -> tuple[Array, KV]:
        """Passes the cache from layer to layer, so that it is written in place."""
        graphdef, weights = nnx.split(self.layers)
        sliding = self.config.sliding or (False,)
        slides_L = jnp.asarray(sliding) if len(set(sliding)) == 2 else None

        def block(carried: Any, each: Any) -> tuple[Any, Any]:
            (x_BTD, cache), (i, slides, weights, adapters) = carried, each
            layer = Layer(i, sliding[0] if slides is None else slides)
            x_BTD, kept = run(graphdef, layer, weights, x_BTD, rope, adapters, owners, cache)
            return ((x_BTD, None), kept) if cache is None else ((x_BTD, kept), None)

        with jax.named_scope("layers"):
            adapters = lora.layers if lora else {}
            each = jnp.arange(self.config.n_layers), slides_L, weights, adapters
            (x_BTD, cache), new = jax.lax.scan(block, (x_BTD, cache), each)
        return x_BTD, new if cache is None else cache

    @property
    def vocabulary(self) -> Array:
        """Matrix ``[V, D]`` from hidden states to logits."""
        return (self.embed.embedding if self.lm_head is None else self.lm_head.kernel)[...]


def _stack(blocks: list[Block]) -> Block:
    """Stacks blocks into a block whose arrays have a leading axis for the layers."""
    graphdefs, states = zip(*map(nnx.split, blocks), strict=True)
    return nnx.merge(graphdefs[0], jax.tree.map(lambda *layers: jnp.stack(layers), *states))


def ropes(config: DecoderConfig, positions_BT: Array) -> Either:
    """``rope_tables`` of layers of either kind; those that slide have no scaling of their own."""
    c = config
    full = rope_tables(c.head_dim, c.rope_theta, c.rope_scaling, positions_BT)
    if c.local_rope_theta is None:
        return Either(full)
    return Either(full, rope_tables(c.head_dim, c.local_rope_theta, None, positions_BT))


def forward(
    graphdef: Any,
    base: Base,
    tokens_BT: Array,
    positions_BT: Array,
    until_BT: Array,
    lora: FusedAdapters | None = None,
    owners: OwnerMask | None = None,
) -> tuple[Array, Cache]:
    """Runs whole rows through the decoder, causally.

    Args:
        graphdef, base: ``nnx.split`` of a ``Decoder``.
        positions_BT: position of each token within its sequence.
        until_BT: position in the row of the last token that may read this one.
        lora, owners: adapters (``lora.fuse``) and each token's owner (``lora.owner_mask``).

    Returns:
        hidden_BTD after the last norm, and the ``KV`` of every layer.
    """
    decoder: Decoder = nnx.merge(graphdef, base)
    attention = decoder.attention(until_BT, positions_BT, decoder.config.window)

    def attend(q_BHTC: Array, new: KV, _: Any, layer: Layer) -> tuple[Array, KV]:
        return attention(q_BHTC, new, layer.slides), new

    return decoder.hidden(tokens_BT, positions_BT, attend, None, lora, owners)


def project(graphdef: Any, base: Base, hidden: Array) -> Array:
    """Vocabulary logits of hidden states, ``[..., D] -> float32 [..., V]``."""
    return logits(hidden, vocabulary(graphdef, base))


def vocabulary(graphdef: Any, base: Base) -> Array:
    """Matrix ``[V, D]`` from hidden states to logits."""
    decoder: Decoder = nnx.merge(graphdef, base)
    return decoder.vocabulary


def logits(hidden: Array, vocabulary_VD: Array) -> Array:
    """``[..., D] -> float32 [..., V]``."""
    with jax.named_scope("vocabulary"):
        return product(hidden, vocabulary_VD).astype(jnp.float32)
