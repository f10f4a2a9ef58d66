"""Shape of a decoder: the parts of each layer, and which layers are alike."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from marft_jax.models.lora import UNEMBED, matrix_of, stack_of
from marft_jax.models.ops.state import CHUNK
from marft_jax.models.parts.attention import AttentionConfig, ring_of, rotations
from marft_jax.models.parts.part import Matrix, Mixer, Mlp, Output, Part

Files = Literal["plain", "fused", "fused_mlp", "stacked", "rows"]
"""One matrix for q, k and v (Phi) and one for gate and up (also Granite 4); or one tensor of all
experts of a layer, ``[in, out]`` each (gpt-oss) or ``[out, in]`` (Gemma 4)."""
Cache = list[Any] | tuple[Any, ...]
"""Caches of the layers: a list, one for each layer that has its own; or a tuple, one for each place
in the period, with its layers stacked in front."""
VOCABULARY = ("vocabulary", "model")
"""Axes of the matrices between tokens and hidden states."""
_SHORT_PERIOD = 6  # layers: that many take long enough to compile


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
        return {name: matrix for part in self.parts for name, matrix in part.matrices().items()}


class Segment(NamedTuple):
    """Layers that are scanned where layers are stacked: ``periods`` times ``period`` layers.

    Attributes:
        sources: the earlier layer whose cache each place reads; empty where all have their own.
    """

    first: int
    period: int
    periods: int
    sources: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.first + self.period * self.periods

    @property
    def places(self) -> list[range]:
        """The layers at each place in the period."""
        return [range(self.first + j, self.end, self.period) for j in range(self.period)]


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder; ``families.py`` reads it from config.json, the extra ``gguf`` from GGUF.

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
        spelling: names of modules in files, usual and of the family, where they differ.
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
                matrix._replace(target=matrix.target or name) if stack != name else matrix
                for matrix in (self.layers[i].matrices()[name] for i in layers)
            ]
            for stack, layers in self._layers_of.items()
            for name in [matrix_of(stack)]
        }

    def adaptable(self) -> dict[str, list[Matrix]]:
        """``matrices``, and the one to logits."""
        unembed = Matrix(self.d_model, self.vocab_size, VOCABULARY)
        return self.matrices() | {UNEMBED: [unembed]}

    def layers_with(self, stack: str) -> list[int]:
        """Numbers of the layers whose matrix is in this stack; of the one to logits 0."""
        return self._layers_of.get(stack, [0] if stack == UNEMBED else [])

    @functools.cached_property
    def _layers_of(self) -> dict[str, list[int]]:
        """Numbers of the layers of each stack: of matrices of a name and of equal shapes, so that
        the adapters of a stack are one array. Every trace asks for each layer and stack."""
        layers_of: dict[str, list[int]] = {}
        shapes: dict[str, list[tuple[int, int]]] = {}
        for i, layer in enumerate(self.layers):
            for name, matrix in layer.matrices().items():
                known = shapes.setdefault(name, [])
                if (shape := matrix[:2]) not in known:
                    known.append(shape)
                layers_of.setdefault(stack_of(name, known.index(shape)), []).append(i)
        return layers_of

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The layers with caches of their own, then those that read the caches of these, and so on:
        each with the smallest period p such that layer i + p has the matrices of layer i. Where it
        is short, layer i + p has the kind of attention of layer i, too: rings and whole caches are
        apart."""
        segments: list[Segment] = []
        for _, group in itertools.groupby(self.layers, lambda layer: layer.mixer.source is None):
            first, layers = segments[-1].end if segments else 0, list(group)
            sliding = self.sliding[first : first + len(layers)]
            matrices = [(layer.matrices(), layer.mixer.source) for layer in layers]
            with_kinds = _period(list(zip(matrices, sliding, strict=True)))
            p = with_kinds if with_kinds <= _SHORT_PERIOD else _period(matrices)
            sources = (layer.mixer.source for layer in layers[:p])
            read = tuple(source for source in sources if source is not None)
            segments.append(Segment(first, p, len(layers) // p, read))
        return tuple(segments)

    @property
    def kept(self) -> list[range]:
        """The layers of each place, where they have caches of their own."""
        with_caches = [segment for segment in self.segments if not segment.sources]
        return [place for segment in with_caches for place in segment.places]

    @property
    def repeats(self) -> bool:
        """True where stacked layers take less time to compile, or there is one layer."""
        return sum(segment.period for segment in self.segments) < max(2, self.n_layers)

    @functools.cached_property
    def caches(self) -> tuple[int, ...]:
        """Number of the cache that each layer reads; layers may share one (``Mixer.source``)."""
        caches: list[int] = []
        for layer in self.layers:
            source = layer.mixer.source
            caches.append(len({*caches}) if source is None else caches[source])
        return tuple(caches)

    def init_cache(self, slots: int, length: int, dtype: DTypeLike, places: int = 1) -> Cache:
        """Empty cache; arguments as of ``Mixer.init_cache``."""
        mixers = [x.mixer for x in self.layers if x.mixer.source is None]
        layers = [mixer.init_cache(slots, length, dtype, places) for mixer in mixers]
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
