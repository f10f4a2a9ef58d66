"""Products with matrices that stay while the rows change.

Every reference is one line; the other forms are those that a CPU computes faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from marft_jax.models.ops.packed import times_packed
from marft_jax.models.ops.platforms import chosen

if TYPE_CHECKING:
    from qwix import QArray

_FEW_ROWS = 16

Activation = Literal["silu", "gelu_pytorch_tanh"]
"""As config.json spells them."""
_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_pytorch_tanh": jax.nn.gelu}


def product(x: Array, kernel: Array | QArray) -> Array:
    """``x [..., in]`` times the transpose of ``kernel [out, in]``, in the type of ``x``."""
    if not isinstance(kernel, Array):
        return times_packed(product, x, kernel)
    rows = x.reshape(-1, x.shape[-1])
    if x.dtype != jnp.float32:
        y = times(rows, kernel, (1, 1))
    elif len(rows) > _FEW_ROWS:
        y = _dot(rows, kernel, over=(1, 1))
    else:
        y = _few_rows(rows, kernel)
    return y.reshape(*x.shape[:-1], -1)


def _by_transpose(rows: Array, kernel: Array) -> Array:
    return rows @ kernel.T


def _kernel_left(rows: Array, kernel: Array) -> Array:
    """A CPU multiplies few rows fastest with the large matrix on the left: otherwise it rearranges
    all of it first, which pays from 17 rows on. The barriers keep the compiler from turning the
    product round again."""
    columns = jax.lax.optimization_barrier(rows.T)
    return jax.lax.optimization_barrier(kernel @ columns).T


_few_rows = chosen(_by_transpose, cpu=_kernel_left)


def times(x: Array, y: Array, over: tuple[int, int]) -> Array:
    """The product of two matrices over an axis of each, in their type.

    Its gradients are such products too. JAX's own would be float32's where the operands are
    bfloat16, and in part transposes, for which a CPU would lay all rows out anew.
    """
    return _times(x, y, over)


def _forward(x: Array, y: Array, over: tuple[int, int]) -> Array:
    return (_dot if x.dtype == jnp.float32 else _dot_16_bits)(x, y, over=over)


def _backward(
    over: tuple[int, int], forward: tuple[Array, Array], dz: Array
) -> tuple[Array, Array]:
    (x, y), (i, j) = forward, over
    dx = times(dz, y, (1, 1 - j)) if i == 1 else times(y, dz, (1 - j, 1))
    dy = times(dz, x, (0, 1 - i)) if j == 1 else times(x, dz, (1 - i, 0))
    return dx, dy


_times = jax.custom_vjp(_forward, nondiff_argnums=(2,))
_times.defvjp(lambda x, y, over: (times(x, y, over), (x, y)), _backward)


def _dot(x: Array, y: Array, *, over: tuple[int, int], dtype: DTypeLike | None = None) -> Array:
    dimensions = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(x, y, dimensions, preferred_element_type=dtype)


def _dot_through_float32(x: Array, y: Array, *, over: tuple[int, int]) -> Array:
    """A CPU's instructions for bfloat16 (AMX) are reached where the result is float32 and has more
    than one row. The barrier keeps XLA from turning the product into one that it cannot run."""
    rows = 1 - over[0]
    if x.shape[rows] == 1:
        return _dot_through_float32(jnp.concatenate([x, x], axis=rows), y, over=over)[:1]
    z = _dot(x, y, over=over, dtype=jnp.float32)
    return jax.lax.optimization_barrier(z).astype(x.dtype)


_dot_16_bits = chosen(_dot, cpu=_dot_through_float32)


def _as_it_is(y: Array) -> Array:
    return y


before_split = chosen(_as_it_is, tpu=jax.lax.optimization_barrier)
"""A product of few rows, to be split into heads. Without the barrier a TPU's compiler splits the
matrix instead, and may copy it in every step of decoding."""


def gated(gate: Array, up: Array, activation: Activation) -> Array:
    """activation(gate) * up (Shazeer 2020); the backward pass writes nothing but the gradients."""
    return _gated(gate, up, activation)


def _gate(gate: Array, up: Array, activation: Activation) -> Array:
    return _ACTIVATIONS[activation](gate) * up


def _gate_backward(
    activation: Activation, forward: tuple[Array, Array], d_gated: Array
) -> tuple[Array, Array]:
    gate, up = forward
    opened, of_gate = jax.vjp(_ACTIVATIONS[activation], gate)
    return of_gate(d_gated * up)[0], d_gated * opened


def clamped_gate(gate: Array, up: Array, gain: float, limit: float) -> Array:
    """(up + 1) · gate · sigmoid(gain · gate), of a gate up to ``limit`` and of an up within ±
    ``limit`` (gpt-oss)."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(gain * gate)


_gated = jax.custom_vjp(_gate, nondiff_argnums=(2,))
_gated.defvjp(lambda gate, up, act: (gated(gate, up, act), (gate, up)), _gate_backward)
