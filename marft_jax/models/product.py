"""Products with a matrix that stays while the rows change."""

from __future__ import annotations

import jax

_FEW_ROWS = 128


def product(x, kernel):
    """``x [..., in]`` times the transpose of ``kernel [out, in]``.

    A CPU multiplies few rows fastest with the large matrix on the left: otherwise it rearranges all
    of it first. The barriers keep the compiler from turning the product round again.
    """
    rows = x.size // x.shape[-1]
    if rows > _FEW_ROWS:
        return jax.lax.dot_general(x, kernel, (((x.ndim - 1,), (1,)), ((), ())))
    columns = jax.lax.optimization_barrier(x.reshape(rows, -1).T)
    y = jax.lax.optimization_barrier(kernel @ columns)
    return y.T.reshape(*x.shape[:-1], -1)
