"""Decoder-only transformer made of parts; ``families.py`` has the families.

A layer is a mixer and an mlp (``parts/``), each between norms. The module owns parameters,
initialisers and dtypes. Everything outside uses it functionally:

    graphdef, base = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    hidden_BTD, kv = forward(graphdef, base, tokens_BT, positions_BT, until_BT, adapters, owners_BT)

``base`` is frozen: it is an argument of its own, never donated, never differentiated. On TPUs its
layers are stacked and scanned, so that depth costs no time to compile: the scan runs one period of
the layers per step, and a matrix of a place in the period is one array for all periods. On CPUs and
GPUs the layers are unrolled, one array per layer and matrix, because a scan there copies every
slice before the product. Matrices are ``[out, in]``, as in the files they come from.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from marft_jax.models.decoder_config import (
    VOCABULARY,
    Cache,
    DecoderConfig,
    LayerConfig,
    Segment,
)
from marft_jax.models.lora import FusedAdapters, OwnerMask
from marft_jax.models.ops.attention import CausalAttention, Layer, causal_attention
from marft_jax.models.ops.remat import Remat, rematerialised
from marft_jax.models.ops.state import tokens_before
from marft_jax.models.parts.attention import Ropes, attend_rows, ropes
from marft_jax.models.parts.layer_output import LayerInputs
from marft_jax.models.parts.part import LayerAdapters, Make, Matrix, Reading, RMSNorm
from marft_jax.models.vocabulary import Vocabulary

Base = nnx.State[Any, Any]
"""Parameters of a ``Decoder``: frozen, and an argument of their own everywhere."""


class Block(nnx.Module):
    """A mixer and an mlp, each with a norm before it, behind it, or both."""

    def __init__(self, layer: LayerConfig, c: DecoderConfig, make: Make):
        def norm(there: bool) -> RMSNorm | None:
            return make.norm(c.d_model) if there else None

        self.attn_norm = norm(c.pre_norms)
        self.mlp_norm = norm(c.pre_norms and not layer.mlp.normalises)
        self.attn_post_norm, self.mlp_post_norm = norm(c.post_norms), norm(c.post_norms)
        self.mixer, self.mlp = layer.mixer.build(make), layer.mlp.build(make)
        self.output = None if layer.output is None else layer.output.build(make)
        self.multiplier = c.residual_multiplier

    def __call__(
        self,
        layer: Layer,
        x_BTD: Array,
        ropes: Ropes,
        adapters: LayerAdapters,
        cache: Any,
        input_BTP: Array | None,
        reading: Reading,
    ) -> tuple[Array, Any]:
        """Computes the block's output, and what the mixer keeps."""
        with jax.named_scope("attention"):
            h = _normalised(x_BTD, self.attn_norm)
            out, kept = self.mixer(h, layer, ropes, adapters, cache, reading)
            x_BTD = self._add(x_BTD, _normalised(out, self.attn_post_norm))
        with jax.named_scope("mlp"):
            out = self.mlp(_normalised(x_BTD, self.mlp_norm), layer, adapters)
            x_BTD = self._add(x_BTD, _normalised(out, self.mlp_post_norm))
        if self.output is not None:
            with jax.named_scope("output"):
                x_BTD = self.output(x_BTD, input_BTP, adapters)
        return x_BTD, kept

    def _add(self, x_BTD: Array, out_BTD: Array) -> Array:
        return x_BTD + (out_BTD if self.multiplier == 1 else out_BTD * self.multiplier)


def _normalised(x: Array, norm: RMSNorm | None) -> Array:
    return x if norm is None else norm(x)


class Embed(nnx.Module):
    """Table of token embeddings."""

    def __init__(self, c: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        init = jax.nn.initializers.normal(0.02)
        table = init(rngs.params(), (c.vocab_size, c.d_model), dtype)
        self.embedding = nnx.Param(table, axes=VOCABULARY)


class Decoder(nnx.Module):
    """Token ids to final hidden states, and hidden states to vocabulary logits.

    Args:
        attention: form of the attention within whole rows.
        remat: what the backward pass recomputes.
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
        make = Make(c.norm_eps, c.norm_offset, dtype, rngs)
        blocks = [Block(layer, c, make) for layer in c.layers]
        places = [place for segment in c.segments for place in segment.places]
        stacked = (_stack([blocks[i] for i in place], tuple(place)) for place in places)
        self.layers = nnx.List(stacked if c.stacked else blocks)
        sizes = c.vocab_size, c.d_model, c.n_layers, c.layer_input
        self.layer_inputs = LayerInputs(*sizes, make) if c.layer_input else None
        self.final_norm: RMSNorm = make.norm(c.d_model)
        vocabulary = Matrix(c.d_model, c.vocab_size, VOCABULARY)
        self.lm_head = None if c.tie_embeddings else make.linear("lm_head", vocabulary)

    def hidden(
        self,
        tokens_BT: Array,
        positions_BT: Array,
        reading: Reading,
        cache: Cache | None,
        lora: FusedAdapters | None,
        owners: OwnerMask | None,
    ) -> tuple[Array, Cache]:
        """Computes the hidden states after the last norm, and what the mixers keep.

        Args:
            cache: what the mixers read and write; None in a pass over whole rows.
        """
        x_BTD = self.embed.embedding[...][tokens_BT]
        if self.config.embedding_multiplier != 1:
            x_BTD = x_BTD * jnp.asarray(self.config.embedding_multiplier, x_BTD.dtype)
        inputs = None if self.layer_inputs is None else self.layer_inputs(tokens_BT, x_BTD)
        rope = ropes(self.config.attentions, positions_BT)

        def run(
            graphdef: Any, kind: Any, number: Any, traced: Any, weights: Sequence[Base], *args: Any
        ) -> tuple[Array, Any]:
            kinds = (x if y is None else y for x, y in zip(kind, traced, strict=True))
            return nnx.merge(graphdef, *weights)(Layer(number, *kinds), *args, reading)

        stacked = self.config.stacked
        # a kind stays static: between rotary tables of unlike shapes no program can choose
        run = rematerialised(run, self.remat, (0, 1), scanned=stacked)
        through = self._scanned if stacked else self._unrolled
        x_BTD, kept = through(run, x_BTD, rope, lora, owners, cache, inputs)
        return self.final_norm(x_BTD), kept

    def _unrolled(
        self, run: Any, x_BTD: Array, rope: Ropes, lora: Any, owners: Any, cache: Any, inputs: Any
    ) -> tuple[Array, list[Any]]:
        kept: dict[int, Any] = {}
        # the first block of each kind is traced and differentiated for all blocks of its kind
        run = jax.jit(run, static_argnums=(0, 1))
        for i, block in enumerate(self.layers):
            with jax.named_scope(f"layer_{i}"):
                graphdef, *weights = nnx.split(block)
                adapters = LayerAdapters(lora.of(i, self.config) if lora else {}, owners)
                at = self.config.caches[i]
                earlier = kept.get(at, None if cache is None else cache[at])
                kind = self.config.sliding[i], self.config.ropes[i]
                args = weights, x_BTD, rope, adapters, earlier, inputs and inputs[i]
                x_BTD, kept[at] = run(graphdef, kind, None, (None, None), *args)
        return x_BTD, [*kept.values()]

    def _scanned(
        self, run: Any, x_BTD: Array, rope: Ropes, lora: Any, owners: Any, cache: Any, inputs: Any
    ) -> tuple[Array, Any]:
        """Scans each segment.

        The cache is passed from step to step, so that it is written in place. Experts are not
        sliced (``ops.experts``).
        """
        c, kept, blocks = self.config, (), iter(self.layers)
        where = {layer: (n, i) for n, place in enumerate(c.kept) for i, layer in enumerate(place)}
        for segment in c.segments:
            period = list(itertools.islice(blocks, segment.period))
            scan = functools.partial(
                self._scan, segment, period, run, rope=rope, lora=lora, owners=owners, inputs=inputs
            )
            if segment.sources:
                places = [where[layer] for layer in segment.sources]
                x_BTD, _ = scan(x_BTD, None, [(kept[n].turned(), i) for n, i in places])
            else:
                x_BTD, new = scan(x_BTD, cache and cache[len(kept) :][: segment.period])
                kept += new
        return x_BTD, kept

    def _scan(
        self,
        segment: Segment,
        blocks: Sequence[Block],
        run: Any,
        x_BTD: Array,
        cache: Any,
        earlier: Sequence[Any] = (),
        *,
        rope: Ropes,
        lora: Any,
        owners: Any,
        inputs: Any,
    ) -> tuple[Array, Any]:
        """Runs one period of layers per step of the scan.

        Args:
            cache: of each place.
            earlier: what the layers of each place read instead: stacked, with turned keys, and the
                number of the layer.
        """
        c, (first, p, periods, _) = self.config, segment
        parts = (nnx.split(block, _of_experts, ...) for block in blocks)
        graphdefs, experts, weights = zip(*parts, strict=True)
        kinds = [
            ([c.sliding[i] for i in place], [c.ropes[i] for i in place]) for place in segment.places
        ]
        # traced where the layers of a place are of several kinds
        traced = [[jnp.asarray(x) if len({*x}) > 1 else None for x in both] for both in kinds]

        def step(carried: Any, each: Any) -> tuple[Any, Any]:
            (x_BTD, cache), (i, traced, weights, adapters, given) = carried, each
            kept = ()
            for j in range(p):
                of_layer = lora._replace(layers=adapters).of(first + j, c, first) if lora else {}
                reads = cache and cache[j]
                if earlier:
                    stack, layer = earlier[j]
                    reads = jax.tree.map(lambda x, layer=layer: x[layer], stack).turned()
                inputs = x_BTD, rope, LayerAdapters(of_layer, owners), reads, given and given[j]
                kind = tuple(x[0] for x in kinds[j])
                both = experts[j], weights[j]
                x_BTD, new = run(graphdefs[j], kind, i, traced[j], both, *inputs)
                kept += (new,)
            return ((x_BTD, None), kept) if cache is None else ((x_BTD, kept), None)

        with jax.named_scope("layers"):
            adapters = lora.by_period(segment, c) if lora else {}
            given = inputs and [jnp.stack([inputs[i] for i in place]) for place in segment.places]
            each = jnp.arange(periods), traced, weights, adapters, given
            (x_BTD, cache), new = jax.lax.scan(step, (x_BTD, cache), each)
        return x_BTD, new if cache is None else cache

    @property
    def vocabulary(self) -> Vocabulary:
        """From hidden states to logits."""
        matrix = (self.embed.embedding if self.lm_head is None else self.lm_head.kernel)[...]
        config = self.config
        return Vocabulary(matrix, config.logits_divisor, config.logits_cap, config.gaps)


def _of_experts(path: Any, leaf: Any) -> bool:
    return "expert" in leaf.axes


def _stack(blocks: list[Block], layers: tuple[int, ...]) -> Block:
    """Stacks blocks into a block whose arrays have a leading axis for the layers; each knows the
    numbers of these."""
    graphdefs, states = zip(*map(nnx.split, blocks), strict=True)
    stacked = nnx.merge(graphdefs[0], jax.tree.map(lambda *layers: jnp.stack(layers), *states))
    for _, leaf in nnx.to_flat_state(nnx.state(stacked)):
        leaf.set_metadata(layers=layers)
    return stacked


def forward(
    graphdef: Any,
    base: Base,
    tokens_BT: Array,
    positions_BT: Array,
    until_BT: Array,
    lora: FusedAdapters | None = None,
    owners: OwnerMask | None = None,
    real_BT: Array | None = None,
) -> tuple[Array, Cache]:
    """Runs whole rows through the decoder, causally.

    Args:
        graphdef, base: ``nnx.split`` of a ``Decoder``.
        positions_BT: position of each token within its sequence.
        until_BT: index in the row of the last token that may read this one.
        lora, owners: adapters (``lora.fuse``) and each token's owner (``lora.owner_mask``).
        real_BT: false for the padding behind the only sequence of each row; None where nobody
            reads the states that recurrent mixers keep.

    Returns:
        hidden_BTD after the last norm, and what each layer's mixer keeps.
    """
    decoder: Decoder = nnx.merge(graphdef, base)
    attend = attend_rows(decoder.attention, until_BT, positions_BT, decoder.config.window)
    before_BN = None
    if real_BT is not None:  # padding goes on with the state as it is
        until_BT = jnp.full_like(until_BT, until_BT.shape[1] - 1)
    elif decoder.config.recurrent:
        before_BN = tokens_before(until_BT)
    reading = Reading(attend, until_BT, real_BT, before_BN=before_BN)
    return decoder.hidden(tokens_BT, positions_BT, reading, None, lora, owners)


def project(graphdef: Any, base: Base, hidden: Array) -> Array:
    """Logits of every row of the vocabulary, with or without a token; ``[..., D] -> float32
    [..., V]``."""
    return logits(hidden, dataclasses.replace(vocabulary(graphdef, base), gaps=()))


def vocabulary(graphdef: Any, base: Base) -> Vocabulary:
    """From hidden states to logits."""
    decoder: Decoder = nnx.merge(graphdef, base)
    return decoder.vocabulary


def logits(hidden: Array, vocabulary: Vocabulary) -> Array:
    """Logits of the policy, whose vocabulary are the tokens; ``[..., D] -> float32 [..., V]``."""
    with jax.named_scope("vocabulary"):
        return vocabulary.finish(vocabulary.products(hidden))
