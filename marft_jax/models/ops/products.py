"""Products with matrices that stay while the rows change.

The reference of all is ``x @ kernel.T`` or ``x @ b``; what differs is how a CPU takes it fastest.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

_FEW_ROWS = 16


def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """``x [..., in]`` times the transpose of ``kernel [out, in]``, in their type."""
    rows = x.reshape(-1, x.shape[-1])
    if x.dtype != jnp.float32:
        y = _product_of_halves(rows, kernel)
    elif len(rows) > _FEW_ROWS:
        y = times(rows, kernel, (1, 1))
    else:
        y = jax.lax.platform_dependent(rows, kernel, cpu=_product_of_few, default=_plain)
    return y.reshape(*x.shape[:-1], -1)


def _plain(rows: jax.Array, kernel: jax.Array) -> jax.Array:
    return rows @ kernel.T


def times(x: jax.Array, y: jax.Array, over: tuple[int, int]) -> jax.Array:
    """The product of two matrices over an axis of each, in their type.

    A CPU's instructions for bfloat16 (AMX) are reached where the result is float32 and has more
    than one row. The barrier keeps XLA from turning the product into one that it cannot run.
    """
    dot = functools.partial(
        jax.lax.dot_general, dimension_numbers=(((over[0],), (over[1],)), ((), ()))
    )

    def on_cpu(x, y):
        rows = 1 - over[0]
        if x.shape[rows] == 1:
            return on_cpu(jnp.concatenate([x, x], axis=rows), y)[:1]
        z = jax.lax.optimization_barrier(dot(x, y, preferred_element_type=jnp.float32))
        return z.astype(x.dtype)

    if x.dtype == jnp.float32:
        return dot(x, y)
    return jax.lax.platform_dependent(x, y, cpu=on_cpu, default=dot)


@jax.custom_vjp
def _product_of_halves(x, kernel):
    """``times``, whose backward pass multiplies halves too: JAX's own would take float32's."""
    return times(x, kernel, (1, 1))


def _backward(forward, dy):
    x, kernel = forward
    return times(dy, kernel, (1, 0)), times(dy, x, (0, 0))


_product_of_halves.defvjp(lambda x, kernel: (_product_of_halves(x, kernel), (x, kernel)), _backward)


def _product_of_few(x, kernel):
    """A CPU multiplies few rows fastest with the large matrix on the left: otherwise it rearranges
    all of it first, which 17 rows and more are worth. The barriers keep the compiler from turning
    the product round again."""
    columns = jax.lax.optimization_barrier(x.T)
    return jax.lax.optimization_barrier(kernel @ columns).T


@jax.custom_vjp
def from_ranks(x: jax.Array, b: jax.Array) -> jax.Array:
    """``x b``.

    JAX's own gradient of ``b`` is the transpose of (dy' x), and a CPU would lay all of dy out anew
    for it; here it is x' dy.
    """
    return times(x.reshape(-1, x.shape[-1]), b, (1, 0)).reshape(*x.shape[:-1], -1)


def _from_ranks_backward(forward, dy):
    x, b = forward
    ranks, d_rows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    return times(d_rows, b, (1, 1)).reshape(x.shape), times(ranks, d_rows, (0, 0))


from_ranks.defvjp(lambda x, b: (from_ranks(x, b), (x, b)), _from_ranks_backward)


@jax.custom_vjp
def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up (Shazeer 2020); the backward pass writes nothing but the two gradients."""
    return jax.nn.silu(gate) * up


def _gated_backward(forward, d_gated):
    gate, up = forward
    open_ = jax.nn.sigmoid(gate)
    return d_gated * up * open_ * (1 + gate * (1 - open_)), d_gated * gate * open_


gated.defvjp(lambda gate, up: (gated(gate, up), (gate, up)), _gated_backward)
