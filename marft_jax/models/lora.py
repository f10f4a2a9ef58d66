"""Stacked low-rank adapters: one pytree for the whole team, with a leading axis for its adapters.

    {"q": {"a": [N, L, in, R], "b": [N, L, R, out]}, "v": ...}      float32

Every token names its owner, which is its adapter. One pair of dense matmuls serves all owners at
once: the ranks of all adapters stand side by side, and the columns of other owners are zeroed
between the two products,

    y += ((x @ A_cat) * mask) @ B_cat * alpha / rank.

There is no gather and no loop over agents, and the product shards like any other matmul.
Source: LoRA, Hu et al. 2021, section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from marft_jax.errors import BadInput
from marft_jax.models.ops.products import from_ranks, product

Adapters = dict[str, dict[str, Array]]


class Fused(NamedTuple):
    """Adapters of one matrix, ranks side by side: ``[N·R, in]`` and ``[N·R, out]``.

    In this layout the gradients need no transpose of the tokens' activations, the largest factor.
    """

    a: Array
    b: Array


class FusedAdapters(NamedTuple):
    """All adapters, laid out for the forward pass.

    Attributes:
        layers: adapted matrices by name, of all layers stacked in front, or a list by layer.
        scale_N: alpha/rank of each adapter.
    """

    layers: dict[str, Fused] | list[dict[str, Fused]]
    scale_N: Array

    def of(self, layer: int) -> dict[str, Fused]:
        """Adapted matrices of one layer."""
        if isinstance(self.layers, list):
            return self.layers[layer]
        return {target: Fused(x.a[layer], x.b[layer]) for target, x in self.layers.items()}


class OwnerMask(NamedTuple):
    """``[..., N·R]``: alpha/rank in the owner's columns, 0 elsewhere."""

    columns: Array


def check_targets(config: Any, targets: Sequence[str]) -> None:
    """Checks that the base has every matrix that is to have an adapter.

    Args:
        config: the ``DecoderConfig`` of the base.

    Raises:
        BadInput: it lacks one.
    """
    known = config.matrices()
    if not set(targets) <= set(known):
        raise BadInput(
            f"--lora.targets: expected distinct ones of {', '.join(known)}, got {targets!s:.80}"
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
        targets: names of matrices (``config.matrices()``).
    """
    tree: Adapters = {}
    matrices = config.matrices()
    for target in targets:
        layers, (d_in, d_out, *_) = len(matrices[target]), matrices[target][0]
        draw = jax.nn.initializers.normal(d_in**-0.5)
        shape = (layers, d_in, rank)
        folded = jax.random.fold_in(key, list(matrices).index(target))
        keys_N = jax.vmap(jax.random.fold_in, (None, 0))(folded, jnp.asarray(adapters))
        a = jax.vmap(lambda key, draw=draw, shape=shape: draw(key, shape))(keys_N)
        tree[target] = {"a": a, "b": jnp.zeros((len(adapters), layers, rank, d_out))}
    return tree


def shape_of(adapters: Adapters) -> tuple[int, int]:
    """(number of adapters, rank)."""
    n, _, _, r = next(iter(adapters.values()))["a"].shape
    return n, r


def fuse(adapters: Adapters, alpha: float, dtype: DTypeLike) -> FusedAdapters:
    """Lays adapters out for the forward pass: layers in front, all ranks side by side."""
    n, r = shape_of(adapters)
    layers = next(iter(adapters.values()))["a"].shape[1]
    fused = {
        target: Fused(
            ab["a"].transpose(1, 0, 3, 2).reshape(layers, n * r, -1).astype(dtype),
            ab["b"].transpose(1, 0, 2, 3).reshape(layers, n * r, -1).astype(dtype),
        )
        for target, ab in adapters.items()
    }
    return FusedAdapters(fused, jnp.full(n, alpha / r, dtype))


def by_layer(fused: FusedAdapters, layers: int) -> FusedAdapters:
    """Splits the adapters into arrays of each layer."""
    return fused._replace(layers=[fused.of(i) for i in range(layers)])


def owner_mask(owners: Any, fused: FusedAdapters) -> OwnerMask:
    """Columns of each token's owner, scaled by alpha/rank.

    Args:
        owners: ``int32 [...]``, the adapter of each token; -1 for the bare base.
    """
    scale_N, any_matrix = fused.scale_N, next(iter(fused.of(0).values()))
    n = len(scale_N)
    rank = len(any_matrix.a) // n
    mine = jax.nn.one_hot(owners, n, dtype=scale_N.dtype)
    mine *= scale_N.reshape((1,) * owners.ndim + (n,))
    return OwnerMask(jnp.repeat(mine, rank, axis=-1))


def add_lora(y: Array, x: Array, lora: Fused, owners: OwnerMask | None) -> Array:
    """y + ((x A_cat) * mask) B_cat, for ``x [..., in]`` and ``y [..., out]``."""
    assert owners is not None, "adapters without owners"
    with jax.named_scope("lora"):
        return y + from_ranks(product(x, lora.a) * owners.columns, lora.b)
