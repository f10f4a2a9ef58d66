"""Products of rows that are sorted by expert: each row meets the matrix of its own expert.

The reference multiplies every row with every expert and keeps each row's own product. A CPU goes
over the experts that have rows, those that a step of decoding chose, and over blocks of their rows.
On TPUs the kernel of the ragged product visits only the tiles that have rows.
Packed experts and gradients take blocks there too, because the kernel would need a transposed copy
for gradients. On CPUs and GPUs XLA computes a ragged product as the reference does: 60 to 100 times
the work with 64 experts of which 8 are chosen. For many rows a GPU multiplies all blocks at once,
with a copy of each block's expert.

A scan over layers leaves matrices of experts in one stack for all layers, because a ragged product
or a loop that takes a slice of the stack copies it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from marft_jax.models.ops.blocks import unpacked
from marft_jax.models.ops.per_device import of_places
from marft_jax.models.ops.platforms import chosen
from marft_jax.models.ops.products import times

if TYPE_CHECKING:
    from qwix import QArray

_BLOCKS = ((2, 1), (16, 16))  # up to 2 rows per expert go one by one, up to 16 in blocks of 16
_BLOCK, _CPU_BLOCK, _TPU_BLOCK = 32, 128, 128
_GPU_FEW, _GPU_BLOCK = 16, 128  # rows per expert up to which a GPU takes XLA's ragged product


class Routes(NamedTuple):
    """Order in which the K copies of each of T tokens are sorted by expert.

    Attributes:
        order_M: the copy (token · K + choice) at each sorted place; M = T · K.
        place_M: the sorted place of each copy.
        sizes_E: number of copies of each expert; copies of other experts come last.
    """

    order_M: Array
    place_M: Array
    sizes_E: Array

    def known(self, x: Array) -> Array:
        """Zeroes the copies of experts that are not in ``sizes_E``, and their gradients."""
        return jnp.where((jnp.arange(len(x)) < self.sizes_E.sum())[:, None], x, 0)


def sort_by_expert(experts_TK: Array, first: int | Array, experts: int) -> Routes:
    """Sorts tokens by their chosen experts; within an expert they keep their order.

    Args:
        first, experts: first expert of this device, and the number of its experts.
    """
    chosen_M = experts_TK.ravel() - first
    chosen_M = jnp.where((chosen_M >= 0) & (chosen_M < experts), chosen_M, experts)
    order_M = jnp.argsort(chosen_M, stable=True)
    sizes_E = jnp.zeros(experts, jnp.int32).at[chosen_M].add(1)  # drops those past the end
    return Routes(order_M, jnp.argsort(order_M), sizes_E)


class Stack(NamedTuple):
    """Matrices of E experts within a stack.

    Attributes:
        matrices: ``[..., E, in, out]``, packed or not.
        first: number of the matrix of the first expert, counted over all axes before the last two.
    """

    matrices: Array | QArray
    first: int | Array

    @property
    def experts(self) -> int:
        return self.matrices.shape[-3]

    @property
    def in_a_row(self) -> Any:
        """All matrices of the stack, ``[n, in, out]``."""
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[-2:]), self.matrices)

    def of(self, expert: Array, dtype: Any) -> Array:
        """The matrix of an expert, unpacked."""
        at = self.first + expert
        pick = functools.partial(jax.lax.dynamic_index_in_dim, index=at, keepdims=False)
        return unpacked(jax.tree.map(pick, self.in_a_row), dtype)

    def all(self, dtype: Any) -> Array:
        """The matrices of all E experts, unpacked: a copy, where the stack has more."""

        def part(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, self.first, self.experts)

        return unpacked(jax.tree.map(part, self.in_a_row), dtype)


def take_copies(x: Array, at_M: Array, back_M: Array, copies: int) -> Array:
    """``x[at // copies]``: rows of which there are so many copies, in another order.

    The gradient is taken in the order ``back_M``, the inverse, and not scattered.
    """
    return _take(x, at_M, back_M, copies)


def _take_forward(x: Array, at_M: Array, back_M: Array, copies: int) -> Array:
    return x[at_M // copies]


def _take_backward(copies: int, back_M: Array, d: Array) -> tuple[Array, None, None]:
    return d[back_M].reshape(-1, copies, d.shape[-1]).sum(1), None, None


_take = jax.custom_vjp(_take_forward, nondiff_argnums=(3,))
_take.defvjp(
    lambda x, at_M, back_M, copies: (take_copies(x, at_M, back_M, copies), back_M), _take_backward
)


def grouped(
    x: Array, matrices: Array | QArray, sizes_E: Array, over: int, first: int | Array = 0
) -> Array:
    """Each row times the matrix of its expert.

    Args:
        x: rows sorted by expert, ``[M, in]``.
        matrices: one per expert, ``[E, in, out]``, or ``[E, out, in]`` where ``over`` is 2; packed
            matrices, and those within a larger stack, have no gradient.
        sizes_E: rows of each expert.
        over: contracted axis of ``matrices``, counted within the last three: 1 or 2.
        first: as of ``Stack``.
    """
    return _grouped(x, Stack(matrices, first), sizes_E, over)


def _forward(x: Array, stack: Stack, sizes_E: Array, over: int) -> Array:
    return _times(x, stack, sizes_E, over=over)


def _backward(over: int, forward: Any, dy: Array) -> tuple[Array, Any, None]:
    x, stack, sizes_E = forward
    dx = _grouped(dy, stack, sizes_E, 3 - over)
    if not isinstance(stack.matrices, Array) or stack.matrices.ndim > 3:
        return dx, None, None
    pair = (dy, x) if over == 2 else (x, dy)
    outer = _outer(*pair, sizes_E).astype(stack.matrices.dtype)
    return dx, stack._replace(matrices=outer, first=None), None


_grouped = jax.custom_vjp(_forward, nondiff_argnums=(3,))
_grouped.defvjp(
    lambda x, stack, sizes_E, over: (_forward(x, stack, sizes_E, over), (x, stack, sizes_E)),
    _backward,
)


def of_rows(sizes_G: Array, rows: int) -> Array:
    """Group of each of so many sorted rows."""
    return jnp.searchsorted(jnp.cumsum(sizes_G), jnp.arange(rows), side="right")


def _each_expert(x: Array, stack: Stack, sizes_E: Array, *, over: int) -> Array:
    expert_M, out = of_rows(sizes_E, len(x)), stack.matrices.shape[-over]

    def add(e: Array, y: Array) -> Array:
        product = times(x, stack.of(e, x.dtype), (1, over - 1))
        return jnp.where((expert_M == e)[:, None], product, y)

    return jax.lax.fori_loop(0, len(sizes_E), add, jnp.zeros((len(x), out), x.dtype))


def _outer_of_each_expert(y: Array, x: Array, sizes_E: Array) -> Array:
    expert_M = of_rows(sizes_E, len(x))

    def of(e: Array) -> Array:
        return times(jnp.where((expert_M == e)[:, None], y, 0), x, (0, 0)).astype(jnp.float32)

    return jax.lax.map(of, jnp.arange(len(sizes_E)))


def _dimensions(contracted: tuple[int, int], groups: list[int]) -> Any:
    over = ((contracted[0],), (contracted[1],)), ((), ())
    return jax.lax.RaggedDotDimensionNumbers(over, [0], groups)


def _rows_ragged(x: Array, stack: Stack, sizes_G: Array, *, over: int) -> Array:
    matrices, places = stack.all(x.dtype), len(sizes_G) // stack.experts
    every = jnp.tile(matrices, (places, 1, 1)) if places > 1 else matrices
    return jax.lax.ragged_dot_general(x, every, sizes_G, _dimensions((1, over), [0]))


def _rows_on_tpu(x: Array, stack: Stack, sizes_G: Array, *, over: int) -> Array:
    """In the ragged product all matrices of the stack take part; most of them have no rows."""
    packed, places = not isinstance(stack.matrices, Array), len(sizes_G) // stack.experts
    if packed or over == 2 or places > 1:
        return _rows_in_blocks(x, stack, sizes_G, over=over)
    none = jnp.zeros(len(stack.in_a_row), sizes_G.dtype)
    sizes = jax.lax.dynamic_update_slice_in_dim(none, sizes_G, stack.first, 0)
    return jax.lax.ragged_dot_general(x, stack.in_a_row, sizes, _dimensions((1, over), [0]))


def _outer_ragged(y: Array, x: Array, sizes_G: Array) -> Array:
    return jax.lax.ragged_dot_general(
        y, x, sizes_G, _dimensions((0, 0), []), preferred_element_type=jnp.float32
    )


class _Blocks(NamedTuple):
    """Blocks of rows: the group of each, its first row, and how many blocks there are."""

    size: int
    group: Array
    first: Array
    count: Array


def _size_of_blocks(rows: int, groups: int, most: int = _BLOCK) -> int:
    return next((size for few, size in _BLOCKS if rows <= few * groups), most)


def _blocks_of(sizes_G: Array, rows: int, size: int) -> _Blocks:
    groups = len(sizes_G)
    blocks_G, start_G = -(-sizes_G // size), jnp.cumsum(sizes_G) - sizes_G
    end_G, most = jnp.cumsum(blocks_G), rows // size + min(groups, rows)
    i = jnp.arange(most)
    group = jnp.minimum(jnp.searchsorted(end_G, i, side="right"), groups - 1)
    first = start_G[group] + (i - (end_G - blocks_G)[group]) * size
    return _Blocks(size, group, first, end_G[-1])


def _rows_in_blocks(x: Array, stack: Stack, sizes_G: Array, *, over: int) -> Array:
    rows, out = len(x), stack.matrices.shape[-over]
    b = _blocks_of(sizes_G, rows, _size_of_blocks(rows, len(sizes_G), _TPU_BLOCK))
    padded = jnp.pad(x, ((0, b.size), (0, 0)))

    def write(i: Array, y: Array) -> Array:
        """Also writes rows past the end of its group, which the next group's blocks overwrite."""
        rows_of_block = jax.lax.dynamic_slice_in_dim(padded, b.first[i], b.size)
        new = times(rows_of_block, stack.of(b.group[i] % stack.experts, x.dtype), (1, over - 1))
        return jax.lax.dynamic_update_slice_in_dim(y, new, b.first[i], 0)

    return jax.lax.fori_loop(0, b.count, write, jnp.zeros((rows + b.size, out), x.dtype))[:rows]


def _rows_by_expert(x: Array, stack: Stack, sizes_G: Array, *, over: int) -> Array:
    """Reads each matrix once: a CPU copies what it picks from a stack. Whole large blocks come
    first, as more rows at a time cost less each, then the rest in small ones."""
    rows, out = len(x), stack.matrices.shape[-over]
    small = _size_of_blocks(rows, len(sizes_G))
    large = _CPU_BLOCK if small == _BLOCK and rows >= _CPU_BLOCK else small
    padded, end_G = jnp.pad(x, ((0, small), (0, 0))), jnp.cumsum(sizes_G)
    with_rows = jnp.argsort(sizes_G == 0, stable=True)

    def of_group(i: Array, y: Array) -> Array:
        group = with_rows[i]
        matrix, end = stack.of(group % stack.experts, x.dtype), end_G[group]

        def block(size: int, carried: tuple[Array, Array]) -> tuple[Array, Array]:
            """Also writes rows past the end of its group, which the next group overwrites."""
            at, y = carried
            rows_of_block = jax.lax.dynamic_slice_in_dim(padded, at, size)
            new = times(rows_of_block, matrix, (1, over - 1))
            return at + size, jax.lax.dynamic_update_slice_in_dim(y, new, at, 0)

        done = end - sizes_G[group], y
        for size, left in {large: large, small: 1}.items():  # one loop where both are as large
            done = jax.lax.while_loop(
                lambda c, left=left: c[0] + left <= end, functools.partial(block, size), done
            )
        return done[1]

    zeros = jnp.zeros((rows + small, out), x.dtype)
    return jax.lax.fori_loop(0, (sizes_G > 0).sum(), of_group, zeros)[:rows]


def _outer_in_blocks(y: Array, x: Array, sizes_G: Array) -> Array:
    b = _blocks_of(sizes_G, len(x), _size_of_blocks(len(x), len(sizes_G)))
    end_G = jnp.cumsum(sizes_G)
    y, x = (jnp.pad(each, ((0, b.size), (0, 0))) for each in (y, x))

    def add(i: Array, sums: Array) -> Array:
        left, right = (jax.lax.dynamic_slice_in_dim(each, b.first[i], b.size) for each in (y, x))
        inside = b.first[i] + jnp.arange(b.size) < end_G[b.group[i]]
        more = times(jnp.where(inside[:, None], left, 0), right, (0, 0)).astype(jnp.float32)
        return sums.at[b.group[i]].add(more)

    zeros = jnp.zeros((len(sizes_G), y.shape[1], x.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, b.count, add, zeros)


def _block_rows(x: Array, b: _Blocks, sizes_G: Array) -> Array:
    """Rows of each block, ``[blocks, size, width]``; 0 past the end of its group."""
    row = b.first[:, None] + jnp.arange(b.size)[None]
    inside = (row < jnp.cumsum(sizes_G)[b.group, None]) & (jnp.arange(len(row)) < b.count)[:, None]
    return jnp.where(inside[..., None], x[jnp.minimum(row, len(x) - 1)], 0)


def _rows_at_once(x: Array, stack: Stack, sizes_G: Array, *, over: int) -> Array:
    rows, groups = len(x), len(sizes_G)
    if rows <= _GPU_FEW * groups:
        return _rows_ragged(x, stack, sizes_G, over=over)
    b = _blocks_of(sizes_G, rows, _GPU_BLOCK)
    at = stack.first + b.group % stack.experts
    matrices = jax.tree.map(lambda each: each[at], stack.in_a_row)
    dimensions = ((2,), (over,)), ((0,), (0,))
    y = jax.lax.dot_general(_block_rows(x, b, sizes_G), unpacked(matrices, x.dtype), dimensions)
    group_M, start_G = of_rows(sizes_G, rows), jnp.cumsum(sizes_G) - sizes_G
    blocks_G, row_M = -(-sizes_G // b.size), jnp.arange(rows) - start_G[group_M]
    at_M = (jnp.cumsum(blocks_G) - blocks_G)[group_M] * b.size + row_M
    return y.reshape(-1, y.shape[-1])[at_M]


def _outer_at_once(y: Array, x: Array, sizes_G: Array) -> Array:
    if len(x) <= _GPU_FEW * len(sizes_G):
        return _outer_ragged(y, x, sizes_G)
    b = _blocks_of(sizes_G, len(x), _GPU_BLOCK)
    left, right = (_block_rows(each, b, sizes_G) for each in (y, x))
    dimensions = ((1,), (1,)), ((0,), (0,))
    sums = jax.lax.dot_general(left, right, dimensions, preferred_element_type=jnp.float32)
    return jax.ops.segment_sum(sums, b.group, len(sizes_G))


def _rows_of_places(run: Callable[..., Array]) -> Callable[..., Array]:
    """``run``; under vmap group g has expert g modulo the experts. (JAX has no such rule for its
    ragged products.)"""
    forms = {over: of_places(functools.partial(run, over=over), 1) for over in (1, 2)}
    return lambda x, stack, sizes_E, *, over: forms[over](x, stack, sizes_E)


_times = chosen(
    _each_expert,
    cpu=_rows_of_places(_rows_by_expert),
    cuda=_rows_of_places(_rows_at_once),
    tpu=_rows_of_places(_rows_on_tpu),
)
_outer = chosen(
    _outer_of_each_expert,
    cpu=of_places(_outer_in_blocks),
    cuda=of_places(_outer_at_once),
    tpu=of_places(_outer_ragged),
)
"""``yᵀ x`` of the rows of each expert, ``[E, out, in]``, in float32."""
