"""Base model: from wherever it lies to arrays on the devices.

Tensors stream from the file to the devices one at a time, into the stack of their layers where
layers are stacked, so that there never is a second copy of the model.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from marft_jax.errors import BadInput
from marft_jax.models.decoder import Base, Decoder
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.models.ops import blocks
from marft_jax.models.ops.attention import CausalAttention, causal_attention
from marft_jax.models.ops.attention_choice import attention_on
from marft_jax.models.ops.remat import Remat
from marft_jax.models.parts.part import Axes
from marft_jax.models.tokenizers.tokenizer import Tokenizer
from marft_jax.models.weights.sources import Shapes, Tensors, open_source
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.settings.config import Model as ModelSettings

Place = Callable[[Axes, np.ndarray], jax.Array]
Report = Callable[[int, int], None]


class BaseModel(NamedTuple):
    """A frozen language model, ready to run.

    Attributes:
        graphdef, params: ``nnx.split`` of the ``Decoder``; ``params`` lie on the devices.
        source: as the user named it.
        digest: identifies its content; equal for equal files, wherever they lie.
    """

    config: DecoderConfig
    graphdef: Any
    params: Base
    tokenizer: Tokenizer
    source: str
    digest: str


def load_base(
    model: ModelSettings,
    place: Place,
    platform: str | None = None,
    report: Report = lambda done, total: None,
    check: Callable[[DecoderConfig], None] = lambda config: None,
) -> BaseModel:
    """Opens the model that ``--model.base`` names and puts its tensors on the devices.

    Args:
        place: ``place(axes, array)`` puts one tensor with these logical axes on the devices.
        platform: the platform of the devices, such as cpu; by default the one that JAX prefers.
        report: gets the bytes placed so far and in all, counted as if unquantised.
        check: raises BadInput where the run cannot use this model, before weights are read.

    Raises:
        BadInput: nothing there, an unsupported model, or files that are not intact.
    """
    source = open_source(model.base)
    given, tokenizer = source.config(), source.tokenizer()
    check(given)
    tokenizer.think(model.thinking)
    tokenizer.calls = model.calls
    tokenizer.fit(given.vocab_size)
    platform = platform or jax.default_backend()
    given = dataclasses.replace(given, gaps=tokenizer.gaps(given.vocab_size))
    config, graphdef, abstract = decoder_on(platform, given, model)
    tensors = source.tensors(given, shapes_of(abstract), model.quantize)
    params = fill(abstract, tensors, place, report)
    return BaseModel(config, graphdef, params, tokenizer, model.base, source.digest())


def decoder_on(
    platform: str, config: DecoderConfig, model: ModelSettings
) -> tuple[DecoderConfig, Any, Base]:
    """Makes the abstract decoder of a platform: its config, and its ``nnx.split``.

    Raises:
        BadInput: a matrix that cannot be quantised as asked, or layers that cannot be stacked.
    """
    stacked = config.repeats and platform == "tpu"
    if model.layers != "auto":
        stacked = model.layers == "stacked"
    if stacked and not config.repeats:
        raise BadInput(
            "--model.layers stacked: expected layers whose matrices repeat after some layers, got "
            "a model whose layers differ; use --model.layers auto"
        )
    config = dataclasses.replace(config, stacked=stacked)
    heads = {(mixer.n_heads, mixer.n_kv_heads, mixer.head_dim) for mixer in config.attentions}
    plain = all(mixer.plain for mixer in config.attentions)
    forms = {attention_on(platform, *shape, model.dtype, plain) for shape in heads}
    [attention] = forms if len(forms) == 1 else [causal_attention]  # takes any heads
    dtype = jnp.dtype(model.dtype)
    graphdef, abstract = abstract_decoder(config, dtype, attention, model.remat)
    if model.quantize != "none":
        abstract = nnx.map_state(functools.partial(_packed_shape, model.quantize), abstract)
    return config, graphdef, abstract


def _packed_shape(kind: str, keys: tuple[Any, ...], leaf: Any) -> Any:
    """Shapes of a matrix of a block once it is packed; other parameters stay as they are."""
    if keys[0] != "layers" or keys[-1] != "kernel":
        return leaf
    if not blocks.fits(width := leaf.shape[-1], kind):
        raise BadInput(
            f"--model.quantize {kind}: expected matrices whose rows are a multiple of "
            f"{blocks.BLOCK} long, got {width} ({keys[-2]}); int8 takes any"
        )
    return leaf.replace(jax.eval_shape(functools.partial(blocks.pack, kind=kind), leaf.get_value()))


def abstract_decoder(
    config: DecoderConfig,
    dtype: Any,
    attention: CausalAttention = causal_attention,
    remat: Remat = "none",
) -> tuple[Any, Base]:
    """``nnx.split`` of a ``Decoder`` that has shapes and types but no values."""

    def build() -> Decoder:
        key = jax.random.key(0)  # shapes need only one; nnx.Rngs takes 9 ms per key while tracing
        rngs: Any = types.SimpleNamespace(params=lambda: key)
        return Decoder(config, dtype=dtype, rngs=rngs, attention=attention, remat=remat)

    graphdef, state = nnx.split(nnx.eval_shape(build))
    return graphdef, state


class _Parameter(NamedTuple):
    """Place of a tensor in an array that may be a stack of tensors.

    Attributes:
        keys: of the array.
        index: its index along the axes of the array that count tensors, None along the others.
        shape: in the file.
        turned: its array has ``[in, out]``, where the file has ``[out, in]``.
    """

    keys: tuple[Any, ...]
    index: tuple[int | None, ...]
    shape: tuple[int, ...]
    turned: bool

    def in_array(self, tensor: Any) -> Any:
        """The tensor of the file as its array has it, and the other way round."""
        return tensor.T if self.turned else tensor


_STACKS = ("expert", "piece")


def _parameters(state: Base) -> dict[str, _Parameter]:
    """Path and place of every tensor, stacked or not.

    A path is as in ``layers/3/mixer/q/kernel``, or of a piece of an expert's matrix as in
    ``layers/3/mlp/experts_down/7/0/kernel``.
    """
    parameters, flat = {}, list[Any](nnx.to_flat_state(state))
    for keys, leaf in flat:
        first, *rest = keys
        layers = leaf.ndim - len(leaf.axes)
        counted = [True] * layers + [axis in _STACKS for axis in leaf.axes]
        sizes = [size for size, counts in zip(leaf.shape, counted, strict=True) if counts]
        shape = tuple(n for n, counts in zip(leaf.shape, counted, strict=True) if not counts)
        turned = "expert" in leaf.axes
        for numbers in np.ndindex(*sizes):
            names = [leaf.layers[numbers[0]], *rest[1:-1]] if layers else rest[:-1]
            path = (first, *names, *reversed(numbers[layers:]), *rest[-1:])
            left = iter(numbers)
            index = tuple(next(left) if counts else None for counts in counted)
            parameters["/".join(map(str, path))] = _Parameter(
                keys, index, shape[::-1] if turned else shape, turned
            )
    return parameters


def shapes_of(state: Base) -> Shapes:
    """Path and shape of every tensor."""
    return {path: parameter.shape for path, parameter in _parameters(state).items()}


def reader(state: Base) -> Callable[[str], jax.Array]:
    """Reads the tensor at a path, unpacked; of a stack, a copy."""
    places, flat = _parameters(state), dict(nnx.to_flat_state(state))
    dtype = jax.tree.leaves(state)[0].dtype

    def tensor(path: str) -> jax.Array:
        place = places[path]
        at = tuple(slice(None) if i is None else i for i in place.index)
        array: Any = jax.tree.map(lambda x: x[at], flat[place.keys].get_value())
        return place.in_array(blocks.unpacked(array, dtype))

    return tensor


def fill(
    abstract: Base, tensors: Tensors, place: Place, report: Report = lambda done, total: None
) -> Base:
    """An abstract state with its values, each placed as it arrives; readers of files have checked
    that there is one of the right shape for every parameter."""
    flat = dict(nnx.to_flat_state(abstract))
    parameters, arrays = _parameters(abstract), dict[tuple[Any, ...], Any]()
    width = jax.tree.leaves(abstract)[0].dtype.itemsize
    done, total = 0, width * sum(math.prod(parameter.shape) for parameter in parameters.values())
    report(done, total)
    for path, array in tensors:
        keys, index, *_ = parameter = parameters[path]
        empty = flat[keys].get_value()
        final = _in_final_type(empty, parameter.in_array(array))
        axes = tuple(axis for axis in flat[keys].axes if axis not in _STACKS)
        placed = jax.tree.map(functools.partial(place, axes), final)
        if any(i is not None for i in index):
            if keys not in arrays:
                arrays[keys] = _empty_stack(flat[keys], placed)
            placed = _put(arrays[keys], placed, index)
        arrays[keys] = placed
        done += width * math.prod(parameter.shape)
        report(done, total)
    in_order = {
        keys: leaf.replace(
            jax.tree.map(functools.partial(mesh_lib.in_order, leaf.axes), arrays.pop(keys))
        )
        for keys, leaf in flat.items()
    }
    return nnx.from_flat_state(in_order)


def _in_final_type(abstract: Any, array: Any) -> Any:
    """Converts a tensor on the host, and packs it where its file does not."""
    if isinstance(abstract, jax.ShapeDtypeStruct):
        return array.astype(abstract.dtype)
    if not isinstance(array, np.ndarray):
        return array
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return jax.tree.map(np.asarray, _pack(array, abstract.qtype))


_pack = jax.jit(blocks.pack, static_argnums=1)


def _empty_stack(abstract: Any, tensor: Any) -> Any:
    """Allocates a stack of tensors on the mesh of this tensor."""

    def allocate(x: Any, one: jax.Array) -> jax.Array:
        where = one.sharding
        if isinstance(where, NamedSharding):
            mesh: Any = where.mesh
            where = mesh_lib.base_sharding(mesh, abstract.axes, x.shape)
        zeros = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=where)
        return zeros(x.shape, one.dtype)

    return jax.tree.map(allocate, abstract.get_value(), tensor)


def _put(stack: Any, tensor: Any, index: tuple[int | None, ...]) -> Any:
    """Puts a tensor into a stack; None in ``index`` for axes that do not count tensors."""
    start, axes = [i or 0 for i in index], tuple(i for i, n in enumerate(index) if n is not None)

    def put(all: jax.Array, one: jax.Array) -> jax.Array:
        where = all.sharding if isinstance(all.sharding, NamedSharding) else None
        return _put_at(all, one, start, axes, where)

    return jax.tree.map(put, stack, tensor)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=(3, 4))
def _put_at(
    all: jax.Array, one: jax.Array, start: Any, axes: Sequence[int], where: NamedSharding | None
) -> jax.Array:
    """Writes a tensor into the part of the stack that each device holds. Where the stack is split
    along ``axes``, an update by the compiler would write the whole stack again."""
    one = jnp.expand_dims(one, axes)
    split = (*where.spec, *[None] * all.ndim)[: all.ndim] if where else ()
    over = [i for i in axes if split and split[i]]
    if where is None or not over:
        return jax.lax.dynamic_update_slice(all, one, start)

    def put(all: jax.Array, one: jax.Array, start: Any) -> jax.Array:
        at, mine = list(start), True
        for i in over:
            at[i] -= jax.lax.axis_index(split[i]) * all.shape[i]
            mine &= (at[i] >= 0) & (at[i] < all.shape[i])
        before = jax.lax.dynamic_slice(all, at, one.shape)
        return jax.lax.dynamic_update_slice(all, jnp.where(mine, one, before), at)

    of_one = P(*(None if i in axes else axis for i, axis in enumerate(split)))
    specs, whole = (where.spec, of_one, P()), where.spec
    mapped = jax.shard_map(put, mesh=where.mesh, in_specs=specs, out_specs=whole, check_vma=False)
    return mapped(all, one, start)


def copy_base(params: Base, place: Callable[[Axes, jax.Array], jax.Array]) -> Base:
    """Copies the parameters to other devices."""
    return nnx.map_state(
        lambda _, leaf: jax.tree.map(functools.partial(place, leaf.axes), leaf), params
    )
