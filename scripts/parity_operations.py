"""Operations as this platform computes them, beside their references."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marft_jax.models.ops import blocks, platforms
from marft_jax.models.ops.attention import KV, causal_attention
from marft_jax.models.ops.attention_choice import attention_on
from marft_jax.models.ops.experts import Stack
from marft_jax.models.ops.products import product
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.settings import config as config_lib


@functools.cache
def mesh() -> jax.sharding.Mesh:
    return mesh_lib.make_mesh(config_lib.Mesh())


def apart(x: Any, y: Any) -> float:
    """|x - y| / |y| of the worst pair of arrays."""
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    whole = ((np.asarray(a, float), np.asarray(b, float)) for a, b in pairs)
    norm = np.linalg.norm
    return max(float(norm(a - b) / max(norm(b), 1e-30)) for a, b in whole)


def operation(reference: platforms.Operation) -> float:
    """An operation as this platform computes it, against its reference on a CPU."""
    arrays, constants = operands()[reference.__name__]
    forms = {
        name: functools.partial(form, **constants)
        for name, form in platforms.FORMS[reference].items()
    }
    plain = functools.partial(reference, **constants)
    here = jax.jit(functools.partial(jax.lax.platform_dependent, default=plain, **forms))
    with jax.default_matmul_precision("highest"):
        found = here(*arrays)
        with jax.default_device(jax.devices("cpu")[0]):
            expected = jax.jit(plain)(*arrays)
    return apart(found, expected)


def operands() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arrays and constants for every operation that has a form for some platform, by its name."""

    def some(*shape: int, dtype: Any = np.float32) -> np.ndarray:
        return np.random.default_rng(len(shape)).normal(size=shape).astype(dtype)

    cache, new = (some(3, 2, 8, 16), some(3, 2, 16, 8)), (some(3, 2, 8, 1), some(3, 2, 1, 8))
    where = (np.arange(3), slice(None), slice(None), 5)
    rows, kernel = some(5, 512), some(96, 512)
    sizes = np.asarray([33, 0, 7], np.int32)  # rows of each expert
    return {
        "_sum": ((some(8, 4096),), {}),
        "_by_transpose": ((rows, kernel), {}),
        "_dot": ((rows.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)), {"over": (1, 1)}),
        "_unpacked_first": ((rows, blocks.pack(jnp.asarray(kernel), "int8")), {"product": product}),
        "_dequantise": ((rows, blocks.pack(jnp.asarray(kernel), "nf4")), {}),
        "_by_head": ((*cache, *new, np.asarray([[0], [15], [16]])), {}),  # one past the end
        "_put": ((cache[0].astype(jnp.bfloat16), some(3, 2, 8, dtype=jnp.bfloat16)),
                 {"where": where}),
        "_each_expert": ((some(40, 64), Stack(some(3, 24, 64), np.int32(0)), sizes), {"over": 2}),
        "_as_it_is": ((some(5, 1, 24),), {}),
        "_outer_of_each_expert": ((some(40, 24), some(40, 64), sizes), {}),
    }  # fmt: skip


def rows_attended(dtype: Any) -> float:
    """Whole-row attention of this platform and its gradients, against the reference's."""
    b, rng = 2 * mesh_lib.row_shards(mesh()), np.random.default_rng(2)
    shapes = (b, 4, 256, 64), (b, 2, 64, 256), (b, 2, 256, 64), (b, 4, 256, 64)
    q, k, v, weights = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    ends = np.arange(100, 100 + b)[:, None]  # of the first of two sequences
    until_BT = np.where(np.arange(256) < ends, ends - 1, 255).astype(np.int32)
    split = mesh_lib.rows(mesh())
    arrays = mesh_lib.put((q, KV(k, v), weights, until_BT), split)

    def run(attention: Any) -> Any:
        def loss(q: Any, kv: KV, weights: Any, until: Any) -> tuple[Any, Any]:
            context = attention(until)(q, kv)
            return jnp.sum(context.astype(jnp.float32) * weights.astype(jnp.float32)), context

        both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, context), gradients = jax.jit(mesh_lib.with_mesh(mesh(), both))(*arrays)
        return context, gradients

    with jax.default_matmul_precision("highest"):
        return apart(run(attention_here(dtype)), run(causal_attention))


def attention_here(dtype: Any) -> Any:
    return attention_on(jax.default_backend(), 4, 2, 64, jnp.dtype(dtype).name)
