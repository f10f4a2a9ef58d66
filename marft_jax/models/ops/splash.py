"""Attention of whole rows on TPUs: JAX's splash kernel, on any mesh."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from marft_jax.models.ops import per_device
from marft_jax.models.ops.attention import KV, Attention, causal_attention, scaled

_LANES = 128
_BLOCK = 896  # the most: every bucket from 512 on has blocks of 512 to 896; more compile for longer


def splash_attention(
    until_BT: Array, positions_BT: Array | None = None, window: int = 0
) -> Attention:
    """``causal_attention`` in blocks, so that neither pass ever holds the scores of a row.

    Sequences of a row may not share their prefix (``intervals`` is for those that do): then places
    in the row are as far apart as positions in the sequence, and windows are a mask of the kernel.

    It is ``causal_attention`` itself for rows that are not a multiple of 128 tokens long, and
    where the mesh does not divide the rows or the query heads.
    """
    otherwise = causal_attention(until_BT, positions_BT, window)

    def attend(q_BHTC: Array, kv: KV, slides: bool | Array = False) -> Array:
        context = _attend(q_BHTC, kv, until_BT, window, slides)
        return otherwise(q_BHTC, kv, slides) if context is None else context

    return attend


def _attend(
    q_BHTC: Array, kv: KV, until_BT: Array, window: int, slides: bool | Array
) -> Array | None:
    """None for rows that the kernel cannot take."""
    split = per_device.split(scaled(q_BHTC), kv)
    if split is None or q_BHTC.shape[2] % _LANES:
        return None
    *operands, everywhere = split
    forms = [functools.partial(_on_one_device, window=n) for n in (0, window)]
    full, sliding = map(everywhere, forms)
    if isinstance(slides, bool) or not window:
        return (sliding if slides is True else full)(*operands, until_BT)
    return jax.lax.cond(slides, sliding, full, *operands, until_BT)


def _on_one_device(
    q_BHTC: Array, k_BGTC: Array, v_BGTC: Array, until_BT: Array, *, window: int
) -> Any:
    _, h, t, _ = q_BHTC.shape
    block = max(n for n in range(_LANES, _BLOCK + 1, _LANES) if t % n == 0)
    mask = masks.LocalMask((t, t), (window - 1, 0), 0) if window else masks.CausalMask((t, t))
    kernel = kernels.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * h),
        block_sizes=kernels.BlockSizes(
            block_q=block, block_kv=block,
            block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block,
        ),
    )  # fmt: skip
    segments = kernels.SegmentIds(until_BT, until_BT)  # each sequence has its own end
    return jax.vmap(kernel)(q_BHTC, k_BGTC, v_BGTC, segments)
