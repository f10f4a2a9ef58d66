"""The protocol of a layer's parts, and the modules that every part is built of.

A part is a frozen dataclass of sizes. ``matrices()`` is the only list of its matrices: adapters,
sharding, packing, tensors of files, exports and plans derive theirs from this list. ``build`` makes
the module that computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from marft_jax.models.lora import Fused, OwnerMask, add_lora
from marft_jax.models.ops.attention import Layer
from marft_jax.models.ops.products import product
from marft_jax.models.ops.state import CHUNK, MixerState, Snapshot

Axes = tuple[str | None, ...]
"""Logical axes of an array; ``parallel.mesh.LOGICAL_AXES`` maps them to the mesh."""


class Names(NamedTuple):
    """Name of a module of a layer in Hugging Face checkpoints and in GGUF files; or of a parameter
    that belongs to no module, with its ending.

    Attributes:
        hf: as peft names its adapter, too.
        pieces: of a matrix of experts, the modules of one expert in Hugging Face checkpoints, with
            ``{}`` for its number; their rows follow each other in our matrix.
        stacks: names of tensors in GGUF files, each with one piece of all experts.
        parameter: of a matrix of experts, the parameter of transformers' module that holds all of
            them (peft: ``target_parameters``).
    """

    hf: str
    gguf: str
    pieces: tuple[str, ...] = ()
    stacks: tuple[str, ...] = ()
    parameter: str = ""


class Matrix(NamedTuple):
    """A matrix of a part, in files ``[out, in]``, and so in memory, but for experts.

    Attributes:
        axes: logical axes of (out, in).
        bias: the products have a bias.
        rotated_heads: heads whose channels are rotated in pairs; 0 for none.
        target: what ``--lora.targets`` calls it; empty for its own name.
        experts: 0 for one matrix; else as many matrices, and as many pairs in an adapter.
        chosen: of these, those that a token meets.
    """

    d_in: int
    d_out: int
    axes: Axes
    bias: bool = False
    rotated_heads: int = 0
    target: str = ""
    experts: int = 0
    chosen: int = 0

    @property
    def stack(self) -> tuple[int, ...]:
        """Axes of an adapter's factors between its layers and its matrices."""
        return (self.experts,) if self.experts else ()

    @property
    def weights(self) -> int:
        return self.d_in * self.d_out * max(1, self.experts)

    @property
    def active_weights(self) -> int:
        """Weights that a token meets."""
        return self.d_in * self.d_out * max(1, self.chosen)


class Part(Protocol):
    """What both kinds of parts declare.

    Attributes:
        MATRICES: matrices that may have an adapter. A name belongs to one part alone, as it also
            names a target of adapters.
        MODULES: further modules of the part, which are frozen and never packed.
    """

    MATRICES: ClassVar[Mapping[str, Names]]
    MODULES: ClassVar[Mapping[str, Names]]

    def matrices(self) -> dict[str, Matrix]:
        """Every matrix, in the order of ``MATRICES``."""
        ...

    def build(self, make: Make) -> Any:
        """Makes the module that computes."""
        ...


class Mlp(Part, Protocol):
    """Computes each position by itself: the module is ``mlp(x_BTD, layer, adapters) -> y_BTD``.

    Where layers are scanned (``layer`` has a number), parameters with the axis ``expert`` have one
    more leading axis: all layers at this position of the period.

    Attributes:
        normalises: the part has norms of its own for its input, which is the residual stream.
    """

    normalises: ClassVar[bool]


class Reading(NamedTuple):
    """How the tokens of a pass read earlier tokens.

    Attributes:
        attend: how attention reads keys and values (``parts.attention.Attend``).
        until_BT: index in the pass of the last token that may read this token.
        real_BT: false for padding, which leaves a recurrent state as it is; None where no state is
            kept.
        start_B: position of the first token of rows that begin with a cached prefix.
        before_BN: see ``ops.state.tokens_before``, in a pass over rows of several sequences.
    """

    attend: Callable[..., Any]
    until_BT: Array
    real_BT: Array | None = None
    start_B: Array | None = None
    before_BN: Array | None = None

    @property
    def snapshot_B(self) -> Array | None:
        """Index where the last chunk of each prompt begins; None where no prompts are read."""
        if self.real_BT is None or self.real_BT.shape[1] == 1:
            return None
        return (self.real_BT.sum(1) - 1) // CHUNK * CHUNK

    def keep(
        self, cache: MixerState | None, layer: Layer, now: MixerState, then: MixerState
    ) -> MixerState:
        """What a layer keeps: the state ``now``, with the state ``then``, that of ``snapshot_B``,
        as its snapshot."""
        if self.snapshot_B is not None:
            start_B = 0 if self.start_B is None else self.start_B
            now = now._replace(snapshot=Snapshot(*then[:2], self.snapshot_B + start_B))
        return now if cache is None else cache.put(now, layer.number)


class Mixer(Part, Protocol):
    """Mixes the positions of a sequence.

    The module is ``mixer(x_BTD, layer, ropes, adapters, cache, reading) -> (y_BTD, kept)``, with a
    ``Reading``. The ``cache`` is what ``init_cache`` made; None in a pass over whole rows. Where
    layers are scanned (``layer`` has a number), it has one more leading axis: all layers at this
    position of the period. ``kept`` replaces it.

    Attributes:
        recurrent: a token reads a state, which belongs to one position. Such layers cannot start
            in the middle of what another sequence left, as attention can.
    """

    recurrent: ClassVar[bool]

    @property
    def source(self) -> int | None:
        """Number of the earlier layer whose cache the mixer reads and leaves as it is; None where
        the mixer has its own."""
        ...

    @property
    def heads(self) -> int:
        """Heads that the mesh's axis ``tensor`` must divide."""
        ...

    def init_cache(self, slots: int, length: int, dtype: DTypeLike, places: int) -> LayerCache:
        """Empty cache of a layer.

        Args:
            places: devices along the mesh's axis ``tensor``.
        """
        ...

    def flops(self, tokens: int, read: float) -> float:
        """Forward FLOPs beside the products with matrices.

        Args:
            read: earlier positions that a token reads on average.
        """
        ...


class Output(Part, Protocol):
    """Changes the output of a layer: the module is ``output(x_BTD, input_BTP, adapters) -> y_BTD``.
    The input is the layer's own of ``parts.layer_output.LayerInputs``, or None."""


class LayerCache(Protocol):
    """A pytree of what a mixer keeps of earlier tokens; every array has the slots first, behind the
    layers where these are stacked."""

    def cut(self, length: int) -> Self:
        """First ``length`` positions, where the cache has positions."""
        ...

    def whole(self, length: int) -> LayerCache:
        """First ``length`` positions, each in its place, for prompts that go on from them."""
        ...

    def like(self, cache: Self) -> Self:
        """What a forward pass kept, laid out like ``cache``."""
        ...

    def resumable(self) -> Self:
        """An empty cache with room for what later prompts start from."""
        ...

    def insert(self, new: Any, at_B: Array, lengths_B: Array) -> Self:
        """Writes rows that begin at position 0; rows past the end are dropped.

        Args:
            new: of whole rows, each position in its place.
            lengths_B: tokens of each row.
        """
        ...

    def placed(self, mesh: Mesh) -> Self:
        """Abstract arrays with their places on the mesh."""
        ...


class LayerAdapters(NamedTuple):
    """Adapters of a layer by matrix, and the owner of each token."""

    matrices: Mapping[str, Fused]
    owners: OwnerMask | None


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, computed in float32 (Zhang & Sennrich 2019).

    Args:
        offset: the scale is stored less this number, and the product is rounded once, as Gemma
            does; None: it is stored as it is, and x / rms(x) is rounded before the product.
    """

    def __init__(self, width: int, eps: float, dtype: DTypeLike, offset: float | None = None):
        self.scale = nnx.Param(jnp.full((width,), 1 - (offset or 0), dtype), axes=(None,))
        self.eps, self.offset = eps, offset

    def __call__(self, x: Array) -> Array:
        x32 = over_rms(x, self.eps)
        scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
        if self.offset is not None:
            return (x32 * (self.offset + scale.astype(jnp.float32))).astype(x.dtype)
        return x32.astype(x.dtype) * scale


def over_rms(x: Array, eps: float) -> Array:
    """x / √(mean(x²) + eps) over the last axis, in float32."""
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)


class Linear(nnx.Module):
    """A matrix of the frozen base, and the low-rank correction of each token's owner."""

    def __init__(self, name: str, matrix: Matrix, dtype: DTypeLike, rngs: nnx.Rngs):
        self.name = name
        init, [out, _] = jax.nn.initializers.normal(matrix.d_in**-0.5), matrix.axes
        kernel = init(rngs.params(), (matrix.d_out, matrix.d_in), dtype)
        self.kernel = nnx.Param(kernel, axes=matrix.axes)
        axes = (None if out == "model" else out,)  # vectors of the model's width are replicated
        bias = jnp.zeros((matrix.d_out,), dtype)
        self.bias = nnx.Param(bias, axes=axes) if matrix.bias else None

    def __call__(self, x: Array, adapters: LayerAdapters) -> Array:
        y = product(x, self.kernel[...])
        if self.bias is not None:
            y = y + self.bias[...].reshape((1,) * (y.ndim - 1) + (-1,))
        lora = adapters.matrices.get(self.name)
        return y if lora is None else add_lora(y, x, lora, adapters.owners)


class Make(NamedTuple):
    """Makes the modules of a part in the decoder's type, with the decoder's norms."""

    norm_eps: float
    norm_offset: float | None
    dtype: DTypeLike
    rngs: nnx.Rngs

    def norm(self, width: int) -> RMSNorm:
        return RMSNorm(width, self.norm_eps, self.dtype, self.norm_offset)

    def linear(self, name: str, matrix: Matrix) -> Linear:
        return Linear(name, matrix, self.dtype, self.rngs)

    def linears(self, part: Part) -> list[Linear]:
        """Modules of all matrices of a part, in their order."""
        return [self.linear(name, matrix) for name, matrix in part.matrices().items()]
