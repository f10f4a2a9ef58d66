"""What the compiler cannot split over devices, on any mesh: attention kernels, and experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from marft_jax.models.ops.attention import KV
from marft_jax.parallel import mesh as mesh_lib

Kernel = Callable[..., Any]
"""(queries, keys, values, what else there is of each row) to context, all ``[B, heads, T, C]``."""


def split(q_BHTC: Array, kv: KV) -> tuple[Array, Array, Array, Callable[[Kernel], Kernel]] | None:
    """Splits rows and heads over the mesh of the context (``mesh.with_mesh``), if there is one.

    Where ``tensor`` has more places than there are key-value heads, each of these is copied to all
    places that read it.

    Returns:
        Queries, keys and values as a kernel takes them, and what makes each device run a kernel on
        its own rows and heads; None where the mesh does not divide the rows or the query heads.
    """
    (b, h), groups = q_BHTC.shape[:2], kv.v_BGTC.shape[1]
    mesh, rows = jax.sharding.get_abstract_mesh(), mesh_lib.row_axes()
    sizes = dict(mesh.shape)
    parts = math.lcm(groups, sizes.get("tensor", 1))
    if b % math.prod(sizes.get(axis, 1) for axis in rows) or h % parts:
        return None
    k, v = kv.k_BGCT.swapaxes(2, 3), kv.v_BGTC
    if parts > groups:
        k, v = (jnp.repeat(x, parts // groups, axis=1) for x in (k, v))
    heads = P(rows, "tensor")

    def everywhere(kernel: Kernel) -> Kernel:
        if mesh.empty:
            return kernel
        specs = (heads, heads, heads, P(rows))
        return jax.shard_map(kernel, in_specs=specs, out_specs=heads, check_vma=False)

    return q_BHTC, k, v, everywhere


def by_expert(
    run: Callable[..., Array], experts: int, tokens: Any, *parts: tuple[Any, int | None]
) -> Array:
    """Runs rows through experts: each device applies its experts to the rows of its ``data`` place.

    Experts are split over ``fsdp`` and ``tensor``, rows over ``data``. Devices of one ``data``
    place have the same rows and different experts, and their results are summed. Experts, or rows,
    are not split if the mesh of the context does not divide their number.

    Args:
        run: ``run(first, tokens, *arrays)``, where ``first`` is the number of the first expert of
            the device, gives ``[B, ...]``.
        tokens: arrays with the rows first.
        parts: arrays, and which of their axes counts the experts; None for all of an array.
    """
    mesh, split = jax.sharding.get_abstract_mesh(), mesh_lib.LOGICAL_AXES["expert"] or ()
    if mesh.empty or mesh.size == 1:
        return run(0, tokens, *(arrays for arrays, _ in parts))
    split = split if experts % mesh_lib.places(mesh, split) == 0 else ()
    rows = [axis for axis in mesh_lib.row_axes() if axis not in split]
    divided = len(jax.tree.leaves(tokens)[0]) % mesh_lib.places(mesh, rows) == 0
    of_rows, of_experts = tuple(rows) if divided and rows else None, split or None

    def of_device(tokens: Any, *arrays: Any) -> Array:
        place = jax.lax.axis_index(split) if split else 0
        each = experts // mesh_lib.places(mesh, split)
        return run(place * each, tokens, *arrays)[None]

    specs = (P() if axis is None else P(*[None] * axis, of_experts) for _, axis in parts)
    sums = jax.shard_map(
        of_device,
        in_specs=(P(of_rows), *specs),
        out_specs=P(of_experts, of_rows),
        check_vma=False,
    )
    return sums(tokens, *(arrays for arrays, _ in parts)).sum(0)


def of_places(run: Callable[..., Any], shared: int | None = None) -> Any:
    """``run``; under vmap, the rows of several places are more rows.

    Args:
        shared: number of the operand that all places have in common.
    """
    merged = jax.custom_batching.custom_vmap(run)

    @merged.def_vmap
    def rule(size: int, batched: Sequence[Any], *operands: Any) -> tuple[Any, Any]:
        def flat(i: int, operand: Any) -> Any:
            is_batched = jax.tree.leaves(batched[i])
            if i == shared:
                assert not any(is_batched), "places with operands of their own"
                return operand
            wide = operand if all(is_batched) else jnp.broadcast_to(operand, (size, *operand.shape))
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), wide)

        rows = merged(*(flat(i, operand) for i, operand in enumerate(operands)))
        out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), rows)
        return out, jax.tree.map(lambda _: True, out)

    return merged
