"""Products of few rows with a matrix in 4 bits, on GPUs of NVIDIA: unpacked where it is multiplied.

XLA fuses no form of it: whatever was tried (a table, a polynomial or a choice of values, scales in
the type of the rows, its fusion of dequantisation by subchannels) writes the matrix in bfloat16 and
reads it again. This kernel, in Pallas for Triton, reads 4.5 bits a value and keeps the rest.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from marft_jax.models.ops.blocks import pack, unpacked
from marft_jax.models.ops.platforms import is_close

if TYPE_CHECKING:
    from qwix import QArray

_MOST_ROWS, _COLUMNS, _PART = 128, 32, 64  # a step of the kernel takes 32 x 64 values
_INTERPRETED = False  # in tests
# Dettmers et al. 2023, appendix E
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


def takes(x: Array, matrix: QArray) -> bool:
    """True for few rows of 16 bits, on one device: no compiler splits a kernel over several."""
    out, width = matrix.qvalue.shape
    alone = jax.sharding.get_abstract_mesh().size == 1
    fits = out % _COLUMNS == 0 and width % _PART == 0 and x.size // width <= _MOST_ROWS
    return alone and fits and x.dtype.itemsize == 2 and works(matrix.qvalue.dtype == jnp.uint4)


@functools.cache
def works(is_nf4: bool) -> bool:
    """True where the kernel computes the product: where there is a GPU, tried on a small matrix."""
    if jax.default_backend() != "gpu":
        return True
    with ThreadPoolExecutor(1) as elsewhere:  # here a program may be being traced
        return elsewhere.submit(_tried, "nf4" if is_nf4 else "int4").result()


def _tried(kind: str) -> bool:
    rows, columns = jax.random.normal(jax.random.key(0), (2, 64, 256))
    x, matrix = rows.astype(jnp.bfloat16), pack(columns, kind)

    def apart() -> float:
        expected = x.astype(jnp.float32) @ unpacked(matrix, jnp.float32).T
        return float(jnp.abs(times_four_bits(x, matrix) - expected).max())

    # of sums up to about 60, in steps of 0.25
    return is_close("4 bits without a kernel", apart, 0.5)


@jax.custom_vjp
def times_four_bits(x: Array, matrix: QArray) -> Array:
    """``x [..., in]`` times the transpose of ``matrix [out, in]``, for rows that it ``takes``."""
    out, width = matrix.qvalue.shape
    few = x.reshape(-1, width)
    rows = max(16, pl.next_power_of_2(len(few)))
    few = jnp.pad(few, ((0, rows - len(few)), (0, 0)))
    pairs = matrix.qvalue.reshape(out, width // 2, 2)
    whole, half = (rows, width // 2), (_COLUMNS, width // 2)
    y = pl.pallas_call(
        functools.partial(_kernel, is_nf4=matrix.qvalue.dtype == jnp.uint4),
        out_shape=jax.ShapeDtypeStruct((rows, out), x.dtype),
        grid=(out // _COLUMNS,),
        in_specs=[
            *[pl.BlockSpec(whole, lambda i: (0, 0))] * 2,
            pl.BlockSpec(half, lambda i: (i, 0)),
            pl.BlockSpec((_COLUMNS, matrix.scale.shape[1]), lambda i: (i, 0)),
        ],
        out_specs=pl.BlockSpec((rows, _COLUMNS), lambda i: (0, i)),
        interpret=_INTERPRETED,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
    )(few[:, ::2], few[:, 1::2], jax.lax.bitcast_convert_type(pairs, jnp.uint8), matrix.scale)
    return y[: x.size // width].reshape(*x.shape[:-1], out)


def _kernel(even: Any, odd: Any, packed: Any, scales: Any, y: Any, *, is_nf4: bool) -> None:
    """A byte holds two neighbours of a row: the first, which meets even places, in its low bits."""
    columns, width = packed.shape
    value = _nf4 if is_nf4 else _int4
    blocks = scales.shape[1] * _PART // (2 * width)  # of a step

    def step(i: Array, total: Array) -> Array:
        at = pl.ds(i * _PART // 2, _PART // 2)
        bits = packed[:, at].astype(jnp.int32)
        scale = scales[:, pl.ds(i * blocks, blocks)].astype(jnp.float32)
        shape = (columns, blocks, _PART // 2 // blocks)
        scale = jnp.broadcast_to(scale[:, :, None], shape).reshape(bits.shape)
        for x, four in ((even, bits & 15), (odd, bits >> 4)):
            matrix = (value(four) * scale).astype(x.dtype)
            total += jnp.dot(x[:, at], matrix.T, preferred_element_type=jnp.float32)
        return total

    total = jnp.zeros((y.shape[0], columns), jnp.float32)
    y[...] = jax.lax.fori_loop(0, 2 * width // _PART, step, total).astype(y.dtype)


def _int4(bits: Array) -> Array:
    return ((bits ^ 8) - 8).astype(jnp.float32)


def _nf4(bits: Array) -> Array:
    values = [jnp.full(bits.shape, value, jnp.float32) for value in _NF4]
    for i in range(4):
        is_set = (bits >> i) & 1 == 1
        pairs = zip(values[1::2], values[::2], strict=True)
        values = [jnp.where(is_set, a, b) for a, b in pairs]
    return values[0]


def _differentiate(matrix: QArray, d: Array) -> tuple[Array, None]:
    import qwix

    return jnp.einsum("...o,oi->...i", d, qwix.dequantize(matrix).astype(d.dtype)), None


times_four_bits.defvjp(lambda x, matrix: (times_four_bits(x, matrix), matrix), _differentiate)
