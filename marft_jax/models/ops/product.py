"""Products with a matrix that stays while the rows change."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

_FEW_ROWS = 16


def product(x, kernel):
    """``x [..., in]`` times the transpose of ``kernel [out, in]``, in their type."""
    rows = x.reshape(-1, x.shape[-1])
    if x.dtype != jnp.float32:
        y = _product_of_halves(rows, kernel)
    elif len(rows) > _FEW_ROWS:
        y = times(rows, kernel, (1, 1))
    else:
        y = _product_of_few(rows, kernel)
    return y.reshape(*x.shape[:-1], -1)


def times(x, y, over: tuple[int, int]):
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
