"""Attention of whole rows on TPUs: JAX's splash kernel, on any mesh."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec as P

from marft_jax.models.ops.attention import KV, Attention, causal_attention, scaled
from marft_jax.parallel import mesh as mesh_lib

_LANES = 128
_BLOCK = 896  # the most: every bucket from 512 on has blocks of 512 to 896; more compile for longer


def splash_attention(until_BT: Array) -> Attention:
    """``causal_attention`` in blocks, so that neither pass ever holds the scores of a row.

    The compiler cannot split a kernel over devices. Where the context has a mesh
    (``mesh.within``), each device takes its own rows and heads; where ``tensor`` has more places
    than there are key-value heads, each of these is copied to all places that read it.

    Sequences of a row may not share their prefix (``attention.shares_prefixes``).

    It is ``causal_attention`` itself for rows that are not a multiple of 128 tokens long, and
    where the mesh does not divide the rows or the query heads.
    """
    return functools.partial(_attend, until_BT=until_BT)


def _attend(q_BHTC: Array, kv: KV, until_BT: Array) -> Array:
    b, h, t, _ = q_BHTC.shape
    groups = kv.v_BGTC.shape[1]
    mesh, rows = jax.sharding.get_abstract_mesh(), mesh_lib.row_axes()
    sizes = dict(mesh.shape)
    shards = math.prod(sizes.get(axis, 1) for axis in rows)
    split = math.lcm(groups, sizes.get("tensor", 1))
    if t % _LANES or b % shards or h % split:
        return causal_attention(until_BT)(q_BHTC, kv)
    k, v = kv.k_BGCT.swapaxes(2, 3), kv.v_BGTC
    if split > groups:
        k, v = (jnp.repeat(x, split // groups, axis=1) for x in (k, v))
    run = _on_one_device
    if not mesh.empty:
        heads = P(rows, "tensor")
        places = (heads, heads, heads, P(rows))
        run = jax.shard_map(run, in_specs=places, out_specs=heads, check_vma=False)
    return run(scaled(q_BHTC), k, v, until_BT)


def _on_one_device(q_BHTC: Array, k_BGTC: Array, v_BGTC: Array, until_BT: Array) -> Any:
    _, h, t, _ = q_BHTC.shape
    block = max(n for n in range(_LANES, _BLOCK + 1, _LANES) if t % n == 0)
    kernel = kernels.make_splash_mha_single_device(
        masks.MultiHeadMask([masks.CausalMask((t, t))] * h),
        block_sizes=kernels.BlockSizes(
            block_q=block, block_kv=block,
            block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block,
        ),
    )  # fmt: skip
    segments = kernels.SegmentIds(until_BT, until_BT)  # each sequence has its own end
    return jax.vmap(kernel)(q_BHTC, k_BGTC, v_BGTC, segments)
