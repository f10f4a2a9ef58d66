"""Attention of whole rows on GPUs of NVIDIA: cuDNN's kernel, on any mesh.

Not through ``jax.nn.dot_product_attention``: it always writes a gradient of the mask, as large as
the mask, in each layer, and under vmap takes no mask that all heads share (jax 0.10.2, H100).
"""

from __future__ import annotations

import functools
import inspect
import logging
from importlib import util
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax._src.cudnn import fused_attention_stablehlo as kernels

from marft_jax.models.ops import per_device
from marft_jax.models.ops.attention import KV, Attention, attention, causal_attention, masks
from marft_jax.models.ops.remat import keep, once

LOGGER = logging.getLogger("marft_jax")

_TRIED = 128  # positions
_NEAR = 0.05  # of the largest number: bfloat16 has steps of 0.8 %, and sums add up


def cudnn_attention(
    until_BT: Array, positions_BT: Array | None = None, window: int = 0
) -> Attention:
    """``causal_attention`` without the scores of a row in memory, in one pass.

    What a query reads is a bias, ``[B, 1, T, T]`` for all heads and layers: it says everything that
    ``masks`` can say, shared prefixes and windows as well. The kernel is causal beside that, and
    leaves out what comes later.

    It is ``causal_attention`` itself for rows of odd length, and where the mesh does not divide the
    rows or the query heads.
    """
    by_kind = masks(until_BT, positions_BT, window)
    biases = jax.tree.map(_bias, by_kind)

    def attend(q_BHTC: Array, kv: KV, slides: bool | Array = False) -> Array:
        split = per_device.split(q_BHTC, kv)
        if split is None or q_BHTC.shape[2] % 2:
            return attention(q_BHTC, kv, by_kind.of(slides))
        *operands, everywhere = split
        return everywhere(_on_one_device)(*operands, biases.of(slides).astype(q_BHTC.dtype))

    return attend


def _bias(mask_BTS: Array) -> Array:
    """``[B, 1, T, S]``, once for all layers: 0 where a key is read, else far below every score, as
    far as float16 can hold."""
    return once(jnp.where(mask_BTS[:, None], 0, -(2.0**15)).astype(jnp.bfloat16))


@jax.custom_vjp
def _on_one_device(q_BHTC: Array, k_BGTC: Array, v_BGTC: Array, bias: Array) -> Array:
    """A derivative of our own, without a gradient of the bias; under vmap, see ``of_places``."""
    return _forward(q_BHTC, k_BGTC, v_BGTC, bias)[0]


def _keep_forward(q: Array, k: Array, v: Array, bias: Array) -> tuple[Array, Any]:
    context, log_total = (keep(x) for x in _forward(q, k, v, bias))
    return context, (q, k, v, bias, log_total, context)


def _pull(forward: Any, d_context: Array) -> tuple[Array, Array, Array, None]:
    return *_backward(*forward, d_context), None


def _attend(q_BHTC: Array, k_BGTC: Array, v_BGTC: Array, bias: Array) -> tuple[Array, Array]:
    """The context, and the logarithm of the sum of each query's exp(scores)."""
    operands = q_BHTC, k_BGTC, v_BGTC, bias, *_none(q_BHTC.dtype)
    run = kernels._dot_product_attention_fwd_p_wrapper.bind
    context, log_total = run(*operands, **_settings(q_BHTC), is_training=True)
    return context, log_total


def _differentiate(
    q_BHTC: Array, k_BGTC: Array, v_BGTC: Array, bias: Array, log_total_BHT: Array,
    context_BHTC: Array, d_BHTC: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
    operands = q_BHTC, k_BGTC, v_BGTC, bias, *_none(q_BHTC.dtype)
    run = kernels._dot_product_attention_bwd_p_wrapper.bind
    d_q, d_k, d_v = run(*operands, log_total_BHT, context_BHTC, d_BHTC, **_settings(q_BHTC))
    return d_q, d_k, d_v


def _none(dtype: Any) -> list[Array]:
    """In place of lengths, offsets and page tables, which rows like ours have not."""
    return [jnp.zeros(0, dtype)] * 6


def _settings(q_BHTC: Array) -> dict[str, Any]:
    has_bias, has_gradient_of_bias = True, False
    named = inspect.signature(kernels._dot_product_attention_fwd).parameters
    return dict(
        scale=q_BHTC.shape[-1] ** -0.5,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(has_bias, has_gradient_of_bias),
        mask_type=kernels.MaskType.CAUSAL,
        layout=kernels.AttentionLayout.BNTH.value,
        sliding_window_length=None,
        **({"score_mod": None} if "score_mod" in named else {}),  # of later versions
    )


_forward, _backward = per_device.of_places(_attend), per_device.of_places(_differentiate)
_on_one_device.defvjp(_keep_forward, _pull)


def takes(width: int, dtype: str) -> bool:
    """True where the kernel is made for such heads; on Hopper and later it may take wider ones."""
    return dtype in ("bfloat16", "float16") and width % 8 == 0 and width <= 128


@functools.cache
def works(heads: int, groups: int, width: int, dtype: str) -> bool:
    """True where the kernel computes attention: where there is a GPU, tried on a small row.

    What it takes depends on the GPU, the type, the width of a head and the versions of cuDNN and
    JAX; nobody knows that better than itself. For a GPU that is not there (``plan``) it is what the
    kernel is made for, where cuDNN is installed.
    """
    if jax.default_backend() != "gpu":
        there = bool(util.find_spec("nvidia") and util.find_spec("nvidia.cudnn"))
        if takes(width, dtype) and not there:
            LOGGER.warning("attention without cuDNN: it is not installed")
        return there and takes(width, dtype)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (1, heads, _TRIED, width), (1, groups, width, _TRIED), (1, groups, _TRIED, width)
    pairs = zip(keys, shapes, strict=True)
    q, k, v = (jax.random.normal(key, shape, dtype) for key, shape in pairs)
    until_BT = jnp.where(jnp.arange(_TRIED) < 50, 49, _TRIED - 1)[None]

    def tried(form: Attention) -> list[Array]:
        def loss(q: Array, kv: KV) -> tuple[Array, Array]:
            context = form(q, kv, False).astype(jnp.float32)
            return jnp.sum(jnp.sin(context)), context

        results = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(q, KV(k, v))
        return [x.astype(jnp.float32) for x in jax.tree.leaves(results)]

    expected = tried(causal_attention(until_BT))
    try:
        pairs = zip(tried(cudnn_attention(until_BT)), expected, strict=True)
        apart = max(float(abs(a - b).max() / abs(b).max()) for a, b in pairs)
    except Exception as error:  # a kernel fails where nobody can foresee it
        LOGGER.info("attention without cuDNN: %s", str(error).partition("\n")[0])
        return False
    if not apart < _NEAR:
        LOGGER.warning("attention without cuDNN: it computes something else (%.2g apart)", apart)
    return apart < _NEAR
