"""Matrices of the frozen base in 8 or 4 bits: packed when they are loaded, unpacked where they
are multiplied (``packed``).

In 8 bits a row has one scale; in 4 bits each block of 32 of its values has one, as in GGUF's Q4_0.
Blocks in 8 bits too would be a little closer, and a TPU's update would need as much more scratch
memory as they save (Qwen2.5-7B on v5e:4x4: 4.3 instead of 2.7 GB per chip).
Source: NF4 is that of QLoRA, Dettmers et al. 2023, section 3; the arrays are qwix's.
"""

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
