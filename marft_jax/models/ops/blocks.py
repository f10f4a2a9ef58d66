"""A matrix packed in 8 or 4 bits, and unpacked. The arrays are qwix's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

if TYPE_CHECKING:
    from qwix import QArray

BLOCK = 32
_SCALE = jnp.float16


def fits(width: int, kind: str) -> bool:
    """True where rows of that width can be packed: 4 bits need whole blocks."""
    return kind == "int8" or width % BLOCK == 0


def pack(matrix: Array, kind: str) -> QArray:
    """``matrix [..., out, in]`` in ``int8``, ``int4`` or ``nf4``, symmetric about 0."""
    import qwix

    last = matrix.ndim - 1
    return qwix.quantize(
        matrix.astype(jnp.float32),
        kind if kind == "nf4" else jnp.dtype(kind),
        channelwise_axes=tuple(range(last)),
        tiled_axes={} if kind == "int8" else {last: BLOCK},
        scale_dtype=_SCALE,
    )


def unpacked(matrix: Array | QArray, dtype: DTypeLike) -> Array:
    """The matrix as the product sees it."""
    if isinstance(matrix, Array):
        return matrix
    import qwix

    return qwix.dequantize(matrix.astype(jnp.float32)).astype(dtype)
