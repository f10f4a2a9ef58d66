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
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from marft_jax.models.lora import (
    UNEMBED,
    Fused,
    FusedAdapters,
    OwnerMask,
    add_lora,
    matrix_of,
    owner_mask,
    stack_of,
)
from marft_jax.models.ops.attention import (
    CausalAttention,
    Layer,
    causal_attention,
    soft_cap,
)
from marft_jax.models.ops.products import product
from marft_jax.models.ops.remat import Remat, rematerialised
from marft_jax.models.ops.state import CHUNK, tokens_before
from marft_jax.models.parts.attention import (
    AttentionConfig,
    Ropes,
    attend_rows,
    ring_of,
    ropes,
    rotations,
)
from marft_jax.models.parts.layer_output import LayerInputs
from marft_jax.models.parts.part import (
    LayerAdapters,
    Make,
    Matrix,
    Mixer,
    Mlp,
    Output,
    Part,
    Reading,
    RMSNorm,
)

Base = nnx.State[Any, Any]
"""Parameters of a ``Decoder``: frozen, and an argument of their own everywhere."""
Files = Literal["plain", "fused", "fused_mlp", "stacked", "rows"]
"""One matrix for q, k and v (Phi) and one for gate and up (also Granite 4); or one tensor of all
experts of a layer, ``[in, out]`` each (gpt-oss) or ``[out, in]`` (Gemma 4)."""
Cache = list[Any] | tuple[Any, ...]
"""Caches of the layers: a list, one for each layer that has its own; or a tuple, one for each place
in the period, with its layers stacked in front."""


class LayerConfig(NamedTuple):
    """The parts of a layer."""

    mixer: Mixer
    mlp: Mlp
    output: Output | None = None

    @property
    def parts(self) -> list[Part]:
        return [part for part in self if part is not None]

    def matrices(self) -> dict[str, Matrix]:
        """Every matrix of all parts, by name."""
        return {name: own for part in self.parts for name, own in part.matrices().items()}


class Segment(NamedTuple):
    """Layers that are scanned where layers are stacked: ``periods`` times ``period`` layers."""

    first: int
    period: int
    periods: int

    @property
    def end(self) -> int:
        return self.first + self.period * self.periods

    @property
    def places(self) -> list[range]:
        """The layers at each place in the period."""
        return [range(self.first + j, self.end, self.period) for j in range(self.period)]


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder; ``families.py`` reads it from config.json, ``gguf_config.py`` from GGUF.

    Attributes:
        layers: the parts of each layer.
        pre_norms: the inputs of mixer and mlp are normalised.
        post_norms: the outputs of mixer and mlp are normalised before they are added.
        norm_offset: see ``RMSNorm``.
        embedding_multiplier: factor of embeddings, rounded to their type.
        residual_multiplier: factor of the outputs of mixer and mlp where they are added.
        logits_divisor, logits_cap: see ``Vocabulary``.
        layer_input: channels of each token's input to each layer (``LayerInputs``); 0 for none.
        files: how checkpoints hold matrices (``weights.layout``).
        stacked: the layers of each place in the period are one array per matrix, scanned.
        spelling: names of modules in files, usual name and own name, where the family has its own.
        gaps: ids without a token, as ranges (first, end); the policy never draws them.
    """

    vocab_size: int
    d_model: int
    layers: tuple[LayerConfig, ...]
    max_position: int
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    norm_offset: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    logits_cap: float = 0.0
    layer_input: int = 0
    files: Files = "plain"
    stacked: bool = False
    spelling: tuple[tuple[str, str], ...] = ()
    gaps: tuple[tuple[int, int], ...] = ()

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def heads(self) -> int:
        """Heads that the mesh's axis ``tensor`` must divide."""
        return math.gcd(*(layer.mixer.heads for layer in self.layers))

    @property
    def attentions(self) -> list[AttentionConfig]:
        """The layers' mixers that are attention."""
        return [x.mixer for x in self.layers if isinstance(x.mixer, AttentionConfig)]

    @property
    def window(self) -> int:
        """Positions that layers that slide read; 0 where none does."""
        return max((mixer.window for mixer in self.attentions), default=0)

    @property
    def sliding(self) -> tuple[bool, ...]:
        """True for each layer that reads through a window."""
        mixers = (layer.mixer for layer in self.layers)
        return tuple(isinstance(m, AttentionConfig) and m.window > 0 for m in mixers)

    @functools.cached_property
    def ropes(self) -> tuple[int, ...]:
        """Number of each layer's rotary table among ``parts.attention.ropes``."""
        known = rotations(self.attentions)
        mixers = (layer.mixer for layer in self.layers)
        return tuple(
            known.index(m.rotation) if isinstance(m, AttentionConfig) else 0 for m in mixers
        )

    @property
    def recurrent(self) -> bool:
        """True where the mixer of a layer has a recurrent state."""
        return any(layer.mixer.recurrent for layer in self.layers)

    @property
    def branches(self) -> int:
        """A sequence may go on from the prefix of another in its row after so many tokens, or a
        multiple of them."""
        return CHUNK if self.recurrent else 1

    def matrices(self) -> dict[str, list[Matrix]]:
        """Every matrix that may have an adapter, by its stack, of each layer that has it."""
        return {
            stack: [
                own._replace(target=own.target or name) if stack != name else own
                for own in (self.layers[i].matrices()[name] for i in layers)
            ]
            for stack, layers in self._layers_of.items()
            for name in [matrix_of(stack)]
        }

    def adaptable(self) -> dict[str, list[Matrix]]:
        """``matrices``, and the one to logits."""
        unembed = Matrix(self.d_model, self.vocab_size, _VOCABULARY)
        return self.matrices() | {UNEMBED: [unembed]}

    def layers_with(self, stack: str) -> list[int]:
        """Numbers of the layers whose matrix is in this stack; of the one to logits 0."""
        return self._layers_of.get(stack, [0] if stack == UNEMBED else [])

    @functools.cached_property
    def _layers_of(self) -> dict[str, list[int]]:
        """Numbers of the layers of each stack: of matrices of a name and of equal shapes, so that
        the adapters of a stack are one array. Every trace asks for each layer and stack."""
        found: dict[str, list[int]] = {}
        shapes: dict[str, list[tuple[int, int]]] = {}
        for i, layer in enumerate(self.layers):
            for name, own in layer.matrices().items():
                known = shapes.setdefault(name, [])
                if (shape := own[:2]) not in known:
                    known.append(shape)
                found.setdefault(stack_of(name, known.index(shape)), []).append(i)
        return found

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The layers with caches of their own, then those that read the caches of these, and so on:
        each with the smallest period p such that layer i + p has the matrices of layer i. Where it
        is short, layer i + p has the kind of attention of layer i, too: rings and whole caches are
        apart."""
        found: list[Segment] = []
        for _, own in itertools.groupby(self.layers, lambda layer: layer.mixer.source is None):
            first, layers = found[-1].end if found else 0, list(own)
            sliding = self.sliding[first : first + len(layers)]
            matrices = [(layer.matrices(), layer.mixer.source) for layer in layers]
            with_kinds = _period(list(zip(matrices, sliding, strict=True)))
            # layers that read another's cache read one of their kind
            p = with_kinds if with_kinds <= _SHORT_PERIOD else _period(matrices)
            found.append(Segment(first, p, len(layers) // p))
        return tuple(found)

    @property
    def kept(self) -> list[range]:
        """The layers of each place, where they have caches of their own."""
        own = (x for x in self.segments if self.layers[x.first].mixer.source is None)
        return [place for segment in own for place in segment.places]

    @property
    def repeats(self) -> bool:
        """True where stacked layers take less time to compile, or there is one layer."""
        return sum(segment.period for segment in self.segments) < max(2, self.n_layers)

    @functools.cached_property
    def caches(self) -> tuple[int, ...]:
        """Number of the cache that each layer reads; layers may share one (``Mixer.source``)."""
        found: list[int] = []
        for layer in self.layers:
            source = layer.mixer.source
            found.append(len({*found}) if source is None else found[source])
        return tuple(found)

    def init_cache(self, slots: int, length: int, dtype: DTypeLike, places: int = 1) -> Cache:
        """Empty cache; arguments as of ``Mixer.init_cache``."""
        own = [x.mixer for x in self.layers if x.mixer.source is None]
        layers = [mixer.init_cache(slots, length, dtype, places) for mixer in own]
        if not self.stacked:
            return layers

        def of_place(place: range) -> Any:
            """Where the layers of a place differ, all keep what one of them needs."""
            most = max((layers[self.caches[i]] for i in place), key=_size)
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (len(place), *x.shape)), most)

        return tuple(map(of_place, self.kept))

    def slack(self, length: int) -> int | None:
        """How many of its last positions a row of a cache may lose and still be read on from, as
        rings hold more than a window; None: any number."""
        sizes = {(ring_of(m.window, length), m.window) for m in self.attentions}
        return min((size - window for size, window in sizes if size), default=None)


def _period(layers: Sequence[Any]) -> int:
    """Smallest divisor p of their number such that layer i + p is like layer i."""
    n = len(layers)
    divisors = (p for p in range(1, n + 1) if n % p == 0)
    return next(p for p in divisors if layers[p:] == layers[: n - p])


def _size(cache: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(cache))


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


_VOCABULARY = ("vocabulary", "model")
_SHORT_PERIOD = 6  # layers: that many take long enough to compile
_NEVER = -1e30


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["matrix_VD", "never", "lora", "owners"],
    meta_fields=["divisor", "cap", "gaps"],
)
@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Matrix from hidden states to logits: cap · tanh(W h / divisor / cap).

    Attributes:
        cap: 0 for none.
        gaps: see ``DecoderConfig``; their logits are so low that their probability is exactly 0.
        never: further tokens like these, ``bool [..., V]``; None for none.
        lora, owners: adapters of the matrix, and the owner of each hidden state.
    """

    matrix_VD: Array
    divisor: float = 1.0
    cap: float = 0.0
    gaps: tuple[tuple[int, int], ...] = ()
    never: Array | None = None
    lora: Fused | None = None
    owners: OwnerMask | None = None

    def adapted(self, lora: FusedAdapters | None, owners: Array) -> Vocabulary:
        """The vocabulary of the policies that own hidden states ``[...]``; see ``owner_mask``."""
        if lora is None or lora.unembed is None:
            return self
        return dataclasses.replace(self, lora=lora.unembed, owners=owner_mask(owners, lora))

    def products(self, hidden: Array) -> Array:
        """``[..., D] -> float32 [..., V]``."""
        products = product(hidden, self.matrix_VD)
        if self.lora is not None:
            none = jnp.zeros((), hidden.dtype)
            products += _isolated(add_lora(none, hidden, self.lora, self.owners))
        return products.astype(jnp.float32)

    def finish(self, products: Array) -> Array:
        """Logits of these products."""
        divided = products if self.divisor == 1 else products / self.divisor
        logits = soft_cap(divided, self.cap)
        if self.never is not None:
            logits = jnp.where(self.never, _NEVER, logits)
        if not self.gaps:
            return logits
        ids_V = np.arange(logits.shape[-1]).reshape((1,) * (logits.ndim - 1) + (-1,))
        without_V = np.any([(first <= ids_V) & (ids_V < end) for first, end in self.gaps], axis=0)
        return jnp.where(without_V, _NEVER, logits)  # not -inf: 0 · inf is no entropy


@jax.custom_vjp
def _isolated(x: Array) -> Array:
    """The same; a gradient that is not finite goes no further. All adapters share the products, in
    which 0 · NaN of one token would be NaN of all."""
    return x


_isolated.defvjp(lambda x: (x, None), lambda _, d: (jnp.where(jnp.isfinite(d), d, 0),))


class Embed(nnx.Module):
    """Table of token embeddings."""

    def __init__(self, c: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        init = jax.nn.initializers.normal(0.02)
        table = init(rngs.params(), (c.vocab_size, c.d_model), dtype)
        self.embedding = nnx.Param(table, axes=_VOCABULARY)


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
        vocabulary = Matrix(c.d_model, c.vocab_size, _VOCABULARY)
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
        own = None if self.layer_inputs is None else self.layer_inputs(tokens_BT, x_BTD)
        rope = ropes(self.config.attentions, positions_BT)

        def run(
            graphdef: Any, kind: Any, number: Any, traced: Any, weights: Sequence[Base], *args: Any
        ) -> tuple[Array, Any]:
            found = (x if y is None else y for x, y in zip(kind, traced, strict=True))
            return nnx.merge(graphdef, *weights)(Layer(number, *found), *args, reading)

        stacked = self.config.stacked
        # a kind stays static: between rotary tables of unlike shapes no program can choose
        run = rematerialised(run, self.remat, (0, 1), scanned=stacked)
        through = self._scanned if stacked else self._unrolled
        x_BTD, kept = through(run, x_BTD, rope, lora, owners, cache, own)
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
                own = kept.get(at, None if cache is None else cache[at])
                kind = self.config.sliding[i], self.config.ropes[i]
                args = weights, x_BTD, rope, adapters, own, inputs and inputs[i]
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
        where = {layer: (n, i) for n, own in enumerate(c.kept) for i, layer in enumerate(own)}
        for segment in c.segments:
            own = list(itertools.islice(blocks, segment.period))
            scan = functools.partial(
                self._scan, segment, own, run, rope=rope, lora=lora, owners=owners, inputs=inputs
            )
            sources = [c.layers[segment.first + j].mixer.source for j in range(segment.period)]
            read = [layer for layer in sources if layer is not None]
            if not read:
                given = cache and cache[len(kept) :][: segment.period]
                x_BTD, new = scan(x_BTD, given)
                kept += new
                continue
            places = [where[layer] for layer in read]
            earlier = [(kept[n].turned(), i) for n, i in places]
            x_BTD, _ = scan(x_BTD, None, earlier)
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
            earlier: what the layers of each place read instead, of one layer.
        """
        c, (first, p, periods) = self.config, segment
        parts = (nnx.split(block, _of_experts, ...) for block in blocks)
        graphdefs, experts, weights = zip(*parts, strict=True)
        kinds = [
            ([c.sliding[i] for i in place], [c.ropes[i] for i in place]) for place in segment.places
        ]
        # traced where the layers of a place are of several kinds
        traced = [[jnp.asarray(x) if len({*x}) > 1 else None for x in own] for own in kinds]

        def step(carried: Any, each: Any) -> tuple[Any, Any]:
            (x_BTD, cache), (i, traced, weights, adapters, given) = carried, each
            kept = ()
            for j in range(p):
                own = lora._replace(layers=adapters).of(first + j, c, first) if lora else {}
                reads = cache and cache[j]
                if earlier:
                    stack, layer = earlier[j]
                    reads = jax.tree.map(lambda x, layer=layer: x[layer], stack).turned()
                inputs = x_BTD, rope, LayerAdapters(own, owners), reads, given and given[j]
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
