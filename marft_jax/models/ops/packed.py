"""Products with matrices of the frozen base that are packed in 8 or 4 bits (``blocks``)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from marft_jax.models.ops.blocks import unpacked
from marft_jax.models.ops.platforms import chosen

if TYPE_CHECKING:
    from qwix import QArray

Product = Callable[[Array, Array], Array]
"""Rows ``[..., in]`` times the transpose of a matrix ``[out, in]``."""


def _dequantise(x: Array, matrix: QArray) -> Array:
    return unpacked(matrix, x.dtype)


def _each_time(x: Array, matrix: QArray) -> Array:
    """A CPU would unpack all matrices before a loop that uses them, and so hold the whole base as
    if it had not been packed. So the bits are made to depend on ``x``, by what is never true; the
    compiler sees through a barrier."""
    never = (x.ravel()[0] > jnp.inf).astype(matrix.qvalue.dtype)
    return unpacked(dataclasses.replace(matrix, qvalue=matrix.qvalue ^ never), x.dtype)


_for_product = chosen(_dequantise, cpu=_each_time)


def times_packed(product: Product, x: Array, matrix: QArray) -> Array:
    """``product(x, matrix)``. The backward pass unpacks again, and keeps nothing unpacked."""
    return jax.checkpoint(functools.partial(_times, product=product))(x, matrix)


def _unpacked_first(x: Array, matrix: QArray, *, product: Product) -> Array:
    return product(x, _for_product(x, matrix))


def _within_product(x: Array, matrix: QArray, *, product: Product) -> Array:
    """A GPU's compiler unpacks within a product what needs no scale: 8 bits are then read, and not
    8 read, 16 written and 16 read."""
    if matrix.scale.shape[-1] > 1:
        return _unpacked_first(x, matrix, product=product)
    scales = matrix.scale[:, 0].reshape((1,) * (x.ndim - 1) + (-1,))
    y = product(x, matrix.qvalue.astype(x.dtype))
    return (y.astype(jnp.float32) * scales.astype(jnp.float32)).astype(x.dtype)


_times = chosen(_unpacked_first, cuda=_within_product)
