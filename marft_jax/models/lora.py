"""Stacked low-rank adapters: one pytree for the whole team, with a leading axis for its adapters.

    {"q": {"a": [N, L, in, R], "b": [N, L, R, out]}, "v": ...}      float32

L are the layers that have the matrix in the same shape. Where other layers have another shape, as
in Gemma 4, their stack is named ``q-2``. A matrix of experts has a pair for each expert,
``"a": [N, L, E, in, R]``. ``unembed`` is the matrix from hidden states to logits, of one layer.

Every token names its owner, which is its adapter. One pair of dense matmuls serves all owners at
once: the ranks of all adapters stand side by side, and the columns of other owners are zeroed
between the two products,

    y += ((x @ A_cat) * mask) @ B_cat * alpha / rank.

There is no gather and no loop over agents, and the product shards like any other matmul.
Source: LoRA, Hu et al. 2021, section 4.1.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from marft_jax.errors import BadInput
from marft_jax.models.ops.products import product, times

ALL_LINEAR = "all-linear"
UNEMBED = "unembed"

Adapters = dict[str, dict[str, Array]]


def stack_of(matrix: str, number: int) -> str:
    """Names the stack of a matrix: the first shape's by the matrix itself."""
    return f"{matrix}-{number + 1}" if number else matrix


def matrix_of(stack: str) -> str:
    """Name of the matrix of a stack."""
    return stack.partition("-")[0]


class Fused(NamedTuple):
    """Adapters of one matrix, ranks side by side: ``[N·R, in]`` and ``[N·R, out]``, after E if any.

    In this layout the gradients need no transpose of the tokens' activations, the largest factor.
    """

    a: Array
    b: Array


class FusedAdapters(NamedTuple):
    """All adapters, laid out for the forward pass.

    Attributes:
        layers: adapted matrices by name, of all layers stacked in front, or a list by layer.
        scale_N: alpha/rank of each adapter.
        unembed: of the matrix to logits.
    """

    layers: dict[str, Fused] | list[dict[str, Fused]]
    scale_N: Array
    unembed: Fused | None = None

    def of(self, layer: int, config: Any, first: int = 0) -> dict[str, Fused]:
        """Adapted matrices of one layer of a decoder with this ``DecoderConfig``.

        Args:
            first: the layer that the stacks begin with.
        """
        if isinstance(self.layers, list):
            return self.layers[layer]
        at = {name: [i for i in config.layers_with(name) if i >= first] for name in self.layers}
        return {
            matrix_of(name): Fused(*(x[at[name].index(layer)] for x in pair))
            for name, pair in self.layers.items()
            if layer in at[name]
        }

    def by_period(self, segment: Any, config: Any) -> dict[str, Fused]:
        """The stacks of a ``Segment`` of layers: in front the periods, then the layers of a period
        that have the matrix."""
        stacks, layers = {}, range(segment.first, segment.end)
        for name, pair in self.layers.items():  # pyright: ignore[reportAttributeAccessIssue]
            there = [i in layers for i in config.layers_with(name)]
            if any(there):
                part = slice(there.index(True), there.index(True) + sum(there))
                shape = segment.periods, sum(there) // segment.periods
                stacks[name] = Fused(*(x[part].reshape(*shape, *x.shape[1:]) for x in pair))
        return stacks


class OwnerMask(NamedTuple):
    """``[..., N·R]``: alpha/rank in the owner's columns, 0 elsewhere."""

    columns: Array


def adapted(config: Any, targets: Sequence[str]) -> list[str]:
    """Names of the stacks of matrices that these targets adapt, in the order of the targets.

    Args:
        config: the ``DecoderConfig`` of the base. Targets that it lacks are left out.
        targets: as in ``named``.
    """
    known = _by_target(config)
    return [name for target in named(config, targets) for name in known.get(target, ())]


def named(config: Any, targets: Sequence[str]) -> list[str]:
    """Names these targets, each once.

    Args:
        config: the ``DecoderConfig`` of the base.
        targets: names of matrices; ``experts`` for the matrices of routed experts; ``all-linear``
            for all others but ``unembed``, as in peft.
    """
    usual = [target for target in _by_target(config) if target not in ("experts", UNEMBED)]
    each = (usual if target == ALL_LINEAR else [target] for target in targets)
    return list(dict.fromkeys(itertools.chain(*each)))


def _by_target(config: Any) -> dict[str, list[str]]:
    by_target: dict[str, list[str]] = {}
    for name, [matrix, *_] in config.adaptable().items():
        by_target.setdefault(matrix.target or name, []).append(name)
    return by_target


def check_targets(configs: Sequence[Any], targets: Sequence[str]) -> None:
    """Checks that each target is a matrix of a base, and that each base has one of them.

    Args:
        configs: the ``DecoderConfig`` of each base.

    Raises:
        BadInput: it is not so.
    """
    known = dict.fromkeys(itertools.chain(*map(_by_target, configs)))
    each = "" if len(configs) == 1 else " and at least one of each base"
    if not {*targets} <= {*known, ALL_LINEAR} or not all(adapted(c, targets) for c in configs):
        raise BadInput(
            f"--lora.targets: expected {ALL_LINEAR}, or distinct ones of {', '.join(known)}{each}, "
            f"got {targets!s:.80}"
        )


def check_rank(config: Any, targets: Sequence[str], rank: int) -> None:
    """Raises ``BadInput`` for a rank above that of every matrix that has an adapter."""
    pairs = (x for name in adapted(config, targets) for x in config.adaptable()[name])
    if rank > (most := max((min(x.d_in, x.d_out) for x in pairs), default=rank)):
        raise BadInput(
            f"--lora.rank: expected at most {most}, the rank of the base's matrices, got {rank}"
        )


def counts(config: Any, targets: Sequence[str]) -> str:
    """Says how many matrices of each kind of part have an adapter, as in ``attention 2 of 4``."""
    names, kinds = adapted(config, targets), dict[str, list[bool]]()
    for layer in config.layers:
        for part in layer.parts:
            has_adapter = kinds.setdefault(type(part).__name__.removesuffix("Config").lower(), [])
            has_adapter += [name in names for name in part.matrices()]
    return ", ".join(
        f"{kind} {sum(has_adapter)} of {len(has_adapter)}" for kind, has_adapter in kinds.items()
    )


def init(
    key: Array, config: Any, *, adapters: Sequence[int], rank: int, targets: Sequence[str]
) -> Adapters:
    """Draws fresh adapters: A is normal with variance 1/in, B is zero, so the team starts as the
    base.

    Args:
        key: A of adapter n is drawn from ``fold_in(key, n)``, whatever other adapters there are.
        config: the ``DecoderConfig`` of the base.
        adapters: the numbers n of the adapters.
        targets: as in ``adapted``.
    """
    tree: Adapters = {}
    matrices = config.adaptable()
    for target in adapted(config, targets):
        [matrix, *_] = having = matrices[target]
        draw = jax.nn.initializers.normal(matrix.d_in**-0.5)
        stack = (len(having), *matrix.stack)
        shape = (*stack, matrix.d_in, rank)
        folded = jax.random.fold_in(key, list(matrices).index(target))
        keys_N = jax.vmap(jax.random.fold_in, (None, 0))(folded, jnp.asarray(adapters))
        a = jax.vmap(lambda key, draw=draw, shape=shape: draw(key, shape))(keys_N)
        tree[target] = {"a": a, "b": jnp.zeros((len(adapters), *stack, rank, matrix.d_out))}
    return tree


def empty(config: Any, *, adapters: int, rank: int, targets: Sequence[str]) -> Adapters:
    """A stack with room for this many adapters, all zeros; targets as in ``adapted``."""
    draw = functools.partial(
        init, config=config, adapters=range(adapters), rank=rank, targets=targets
    )
    shapes = jax.eval_shape(draw, jax.random.key(0))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def padded(
    factors: Mapping[str, Mapping[str, Any]], stack: Adapters
) -> dict[str, dict[str, np.ndarray]]:
    """One adapter, without the axis N, with zeros up to the rank and the matrices of a stack."""

    def one(name: str, kind: str, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        whole = np.zeros(shape, dtype)
        if name in factors:
            factor = np.asarray(factors[name][kind])
            whole[tuple(map(slice, factor.shape))] = factor
        return whole

    return {
        name: {kind: one(name, kind, x.shape[1:], x.dtype) for kind, x in pair.items()}
        for name, pair in stack.items()
    }


def shape_of(adapters: Adapters) -> tuple[int, int]:
    """(number of adapters, rank)."""
    n, *_, r = next(iter(adapters.values()))["a"].shape
    return n, r


def scale_of(adapters: Adapters, alpha: float) -> float:
    """alpha/rank of adapters that all have the rank of their stack."""
    return alpha / shape_of(adapters)[1]


def fuse(adapters: Adapters, scale: Array | float, dtype: DTypeLike) -> FusedAdapters:
    """Lays adapters out for the forward pass: layers in front, all ranks side by side.

    Args:
        scale: alpha/rank of each adapter, ``[N]``, or of all. In a stack of a larger rank an
            adapter ends with zeros, in A and in B, and then these have no gradient.
    """
    n, r = shape_of(adapters)

    def side_by_side(x: Array) -> Array:
        """``[N, ..., R, width]`` as ``[..., N·R, width]``."""
        x = jnp.moveaxis(x, 0, -3)
        return x.reshape(*x.shape[:-3], n * r, -1).astype(dtype)

    fused = {
        target: Fused(side_by_side(ab["a"].swapaxes(-1, -2)), side_by_side(ab["b"]))
        for target, ab in adapters.items()
    }
    unembed = fused.pop(UNEMBED, None)
    unembed = unembed and Fused(*(x[0] for x in unembed))
    return FusedAdapters(fused, jnp.broadcast_to(jnp.asarray(scale, dtype), n), unembed)


def replaced(fused: FusedAdapters, new: FusedAdapters, n: Array | int) -> FusedAdapters:
    """The adapters with ``new``, an adapter of the same rank, in place of the n-th."""
    [factor, *_] = jax.tree.leaves(new[::2])
    at = n * factor.shape[-2]

    def put(whole: Array, x: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(whole, x, at, axis=-2)

    layers, unembed = jax.tree.map(put, fused[::2], new[::2])
    return FusedAdapters(layers, fused.scale_N.at[n].set(new.scale_N[0]), unembed)


def owner_mask(owners: Any, fused: FusedAdapters) -> OwnerMask:
    """Columns of each token's owner, scaled by alpha/rank.

    Args:
        owners: ``int32 [...]``, the adapter of each token; -1 for the bare base.
    """
    scale_N, [any_factor, *_] = fused.scale_N, jax.tree.leaves((fused.layers, fused.unembed))
    n = len(scale_N)
    rank = any_factor.shape[-2] // n
    mine = jax.nn.one_hot(owners, n, dtype=scale_N.dtype)
    mine *= scale_N.reshape((1,) * owners.ndim + (n,))
    return OwnerMask(jnp.repeat(mine, rank, axis=-1))


def add_lora(y: Array, x: Array, lora: Fused, owners: OwnerMask | None) -> Array:
    """y + ((x A_cat) * mask) B_cat, for ``x [..., in]`` and ``y [..., out]``."""
    assert owners is not None, "adapters without owners"
    with jax.named_scope("lora"):
        ranks = product(x, lora.a) * owners.columns
        added = times(ranks.reshape(-1, ranks.shape[-1]), lora.b, (1, 0))
        return y + added.reshape(*ranks.shape[:-1], -1)
