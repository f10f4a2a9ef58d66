"""Attention of whole rows on GPUs of NVIDIA: cuDNN's kernel, on any mesh."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from marft_jax.models.ops import per_device
from marft_jax.models.ops.attention import (
    KV,
    Attention,
    attention,
    causal_attention,
    masks,
)

LOGGER = logging.getLogger("marft_jax")

_HOW = "cudnn"
_TRIED = 128  # positions
_NEAR = 0.05  # of the largest number: bfloat16 has steps of 0.8 %, and sums add up


def cudnn_attention(
    until_BT: Array, positions_BT: Array | None = None, window: int = 0
) -> Attention:
    """``causal_attention`` without the scores of a row in memory, in either pass.

    What a query reads is a bias, ``[B, 1, T, T]`` for all heads and layers: it says everything that
    ``masks`` can say, shared prefixes and windows as well. The kernel is causal beside that, and
    leaves out what comes later.

    It is ``causal_attention`` itself for rows of odd length, and where the mesh does not divide the
    rows or the query heads.
    """
    either = masks(until_BT, positions_BT, window)

    def attend(q_BHTC: Array, kv: KV, slides: bool | Array = False) -> Array:
        mask_BTS, split = either.of(slides), per_device.split(q_BHTC, kv)
        if split is None or q_BHTC.shape[2] % 2:
            return attention(q_BHTC, kv, mask_BTS)
        *operands, everywhere = split
        return everywhere(_on_one_device)(*operands, mask_BTS)

    return attend


@jax.custom_vjp
def _on_one_device(q_BHTC: Array, k_BGTC: Array, v_BGTC: Array, mask_BTS: Array) -> Array:
    """A derivative of our own only because a kernel with a rule for vmap has none: ``_of_places``.
    What the backward kernel reads is computed again."""
    return _forward(q_BHTC, k_BGTC, v_BGTC, mask_BTS)


def _of_places(kernel: Callable[..., Any]) -> Any:
    """The kernel; under vmap, rows of several places are more rows. The kernel's own rule takes a
    bias for every head only."""
    run = jax.custom_batching.custom_vmap(kernel)

    @run.def_vmap
    def rule(size: int, batched: Sequence[bool], *operands: Array) -> tuple[Any, Any]:
        wide = [
            x if own else jnp.broadcast_to(x, (size, *x.shape))
            for x, own in zip(operands, batched, strict=True)
        ]
        rows = run(*(x.reshape(-1, *x.shape[2:]) for x in wide))
        out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), rows)
        return out, jax.tree.map(lambda _: True, out)

    return run


def _attend(q_BHTC: Array, k_BGTC: Array, v_BGTC: Array, mask_BTS: Array) -> Array:
    q, k, v = (x.swapaxes(1, 2) for x in (q_BHTC, k_BGTC, v_BGTC))
    context = jax.nn.dot_product_attention(
        q, k, v, mask=mask_BTS[:, None], is_causal=True, implementation=_HOW
    )
    return context.swapaxes(1, 2)


def _differentiate(
    q_BHTC: Array, k_BGTC: Array, v_BGTC: Array, mask_BTS: Array, d_BHTC: Array
) -> tuple[Array, Array, Array]:
    _, pull = jax.vjp(lambda q, k, v: _attend(q, k, v, mask_BTS), q_BHTC, k_BGTC, v_BGTC)
    return pull(d_BHTC)


_forward, _backward = _of_places(_attend), _of_places(_differentiate)
_on_one_device.defvjp(
    lambda *operands: (_forward(*operands), operands),
    lambda operands, d_BHTC: (*_backward(*operands, d_BHTC), None),
)


@functools.cache
def works(heads: int, groups: int, width: int, dtype: str) -> bool:
    """True where the kernel runs on this machine and computes attention, tried on a small row.

    What it takes depends on the GPU, the type, the width of a head and the versions of cuDNN and
    JAX; nobody knows that better than itself.
    """
    if jax.default_backend() != "gpu":
        return False
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (1, heads, _TRIED, width), (1, groups, width, _TRIED), (1, groups, _TRIED, width)
    pairs = zip(keys, shapes, strict=True)
    q, k, v = (jax.random.normal(key, shape, dtype) for key, shape in pairs)
    until_BT = jnp.where(jnp.arange(_TRIED) < 50, 49, _TRIED - 1)[None]

    def tried(form: Attention) -> list[Array]:
        def loss(q: Array, kv: KV) -> tuple[Array, Array]:
            context = form(q, kv, False).astype(jnp.float32)
            return jnp.sum(jnp.sin(context)), context

        found = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(q, KV(k, v))
        return [x.astype(jnp.float32) for x in jax.tree.leaves(found)]

    expected = tried(causal_attention(until_BT))
    try:
        pairs = zip(tried(cudnn_attention(until_BT)), expected, strict=True)
        apart = max(float(abs(a - b).max() / abs(b).max()) for a, b in pairs)
    except Exception as error:  # whatever it does not like
        LOGGER.info("attention without cuDNN: %s", str(error).partition("\n")[0])
        return False
    if not apart < _NEAR:
        LOGGER.warning("attention without cuDNN: it computes something else (%.2g apart)", apart)
        return False
    return True
