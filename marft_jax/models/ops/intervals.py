"""Attention of rows on TPUs whose sequences share prefixes: a kernel for intervals, on any mesh.

A key is read by the queries from its own place to ``until`` (``attention.reading``), less those
beyond the window. Splash can say "of one sequence", not "up to there". Forward and backward as in
Dao et al. 2022, FlashAttention, in blocks of queries and keys; blocks that nobody reads are neither
computed nor fetched. The backward passes stand with their keys first, so that a query's numbers are
rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from marft_jax.models.ops import per_device
from marft_jax.models.ops.attention import KV, Attention, causal_attention, scaled
from marft_jax.models.ops.remat import keep

_LANES, _BLOCK, _FAR = 128, 512, -1e30
_INTERPRETED: Any = False  # in tests


def interval_attention(
    until_BT: Array, positions_BT: Array | None = None, window: int = 0
) -> Attention:
    """``causal_attention`` in blocks, so that neither pass ever holds the scores of a row.

    It is ``causal_attention`` itself for rows that are not a multiple of 128 tokens long, and
    where the mesh does not divide the rows or the query heads.
    """
    otherwise = causal_attention(until_BT, positions_BT, window)
    both = [until_BT, until_BT if positions_BT is None else positions_BT]
    places_B2T = jnp.stack(both, axis=1).astype(jnp.int32)

    def attend(q_BHTC: Array, kv: KV, slides: bool | Array = False) -> Array:
        split = per_device.split(scaled(q_BHTC), kv)
        if split is None or q_BHTC.shape[2] % _LANES:
            return otherwise(q_BHTC, kv, slides)
        *operands, everywhere = split
        full, sliding = (everywhere(_on_one_device(n)) for n in (0, window))
        if isinstance(slides, bool) or not window:
            return (sliding if slides is True else full)(*operands, places_B2T)
        return jax.lax.cond(slides, sliding, full, *operands, places_B2T)

    return attend


@functools.cache
def _on_one_device(window: int) -> Any:
    forward, backward = (
        per_device.of_places(functools.partial(run, window=window)) for run in (_forward, _backward)
    )

    @jax.custom_vjp
    def attend(q_BHTC: Array, k_BGTC: Array, v_BGTC: Array, places_B2T: Array) -> Array:
        return forward(q_BHTC, k_BGTC, v_BGTC, places_B2T)[0]

    def keep_forward(*operands: Array) -> tuple[Array, Any]:
        context, log_total = (keep(x) for x in forward(*operands))
        return context, (*operands, log_total, context)

    attend.defvjp(keep_forward, lambda kept, d_BHTC: (*backward(*kept, d_BHTC), None))
    return attend


class _Grid(NamedTuple):
    """Sizes: queries per key-value head, a block of places, and how many of these a row has."""

    times: int
    block: int
    blocks: int
    window: int


def _grid(q_BHTC: Array, k_BGTC: Array, window: int) -> _Grid:
    t = q_BHTC.shape[2]
    block = max(n for n in range(_LANES, _BLOCK + 1, _LANES) if t % n == 0)
    return _Grid(q_BHTC.shape[1] // k_BGTC.shape[1], block, t // block, window)


def _reads(last: Any, g: _Grid, b: Any, i: Any, j: Any) -> Any:
    """True where some query of block i reads some key of block j."""
    return (j <= i) & (last[b, j] >= i * g.block)


def _mask(shape: tuple[int, ...], queries_first: bool, g: _Grid, i: Any, j: Any, until: Array,
          places: Sequence[Any]) -> Array:  # fmt: skip
    axis = 0 if queries_first else 1
    q = jax.lax.broadcasted_iota(jnp.int32, shape, axis) + i * g.block
    k = jax.lax.broadcasted_iota(jnp.int32, shape, 1 - axis) + j * g.block
    mask = (k <= q) & (q <= until)
    return mask & (places[0][0] - places[1][0] < g.window) if places else mask


def _product(x: Array, y: Array, over: tuple[int, int]) -> Array:
    dims = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)


def _forward_kernel(last: Any, q: Any, k: Any, v: Any, until: Any, *refs: Any, g: _Grid) -> None:
    *places, out, log_total, top, total, context = refs
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _():
        top[...] = jnp.full_like(top, _FAR)
        total[...] = jnp.zeros_like(total)
        context[...] = jnp.zeros_like(context)

    @pl.when(_reads(last, g, b, i, j))
    def _():
        scores = _product(q[0, 0], k[0, 0], (1, 1))
        scores = jnp.where(_mask(scores.shape, True, g, i, j, until[0], places), scores, _FAR)
        new = jnp.maximum(top[:, :1], scores.max(1, keepdims=True))
        weights, kept = jnp.exp(scores - new), jnp.exp(top[:, :1] - new)
        total[...] = jnp.broadcast_to(
            kept * total[:, :1] + weights.sum(1, keepdims=True), total.shape
        )
        context[...] = kept * context[...] + _product(weights.astype(v.dtype), v[0, 0], (1, 0))
        top[...] = jnp.broadcast_to(new, top.shape)

    @pl.when(j == g.blocks - 1)
    def _():
        out[0, 0] = (context[...] / total[:, :1]).astype(out.dtype)
        log_total[0, 0] = top[...] + jnp.log(total[...])


def _weights(
    q: Any, k: Any, until: Any, places: Sequence[Any], log_total: Any, g: _Grid, i: Any, j: Any
) -> Array:
    """P', of keys by queries."""
    scores = _product(k[0, 0], q[0, 0], (1, 1))
    mask = _mask(scores.shape, False, g, i, j, until[0], places)
    return jnp.where(mask, jnp.exp(scores - log_total[0, 0]), 0.0)


def _queries_kernel(last: Any, q: Any, k: Any, v: Any, until: Any, *refs: Any, g: _Grid) -> None:
    *places, d, log_total, lost, dq, sum_q = refs
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _():
        sum_q[...] = jnp.zeros_like(sum_q)

    @pl.when(_reads(last, g, b, i, j))
    def _():
        weights = _weights(q, k, until, places, log_total, g, i, j)
        d_scores = weights * (_product(v[0, 0], d[0, 0], (1, 1)) - lost[0, 0])
        sum_q[...] += _product(d_scores.astype(k.dtype), k[0, 0], (0, 0))

    @pl.when(j == g.blocks - 1)
    def _():
        dq[0, 0] = sum_q[...].astype(dq.dtype)


def _keys_kernel(last: Any, q: Any, k: Any, v: Any, until: Any, *refs: Any, g: _Grid) -> None:
    *places, d, log_total, lost, dk, dv, sum_k, sum_v = refs
    b, j, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    i = jax.lax.rem(step, g.blocks)

    @pl.when(step == 0)
    def _():
        sum_k[...], sum_v[...] = jnp.zeros_like(sum_k), jnp.zeros_like(sum_v)

    @pl.when(_reads(last, g, b, i, j))
    def _():
        weights = _weights(q, k, until, places, log_total, g, i, j)
        d_scores = weights * (_product(v[0, 0], d[0, 0], (1, 1)) - lost[0, 0])
        sum_v[...] += _product(weights.astype(d.dtype), d[0, 0], (1, 0))
        sum_k[...] += _product(d_scores.astype(q.dtype), q[0, 0], (1, 0))

    @pl.when(step == g.times * g.blocks - 1)
    def _():
        dk[0, 0], dv[0, 0] = sum_k[...].astype(dk.dtype), sum_v[...].astype(dv.dtype)


def _call(
    kernel: Any, g: _Grid, grid: Any, at: Any, operands: list[Array], rows: Array,
    extra: list[Array], out: list[Any], scratch: list[tuple[int, int]],
) -> list[Array]:  # fmt: skip
    """Runs a kernel.

    Args:
        at: of a step of the grid: row, head, block of queries, block of keys.
        out: arrays like the results; a block of them is at the first three numbers of a step.
    """
    first = not extra  # queries first
    until_BT, positions_BT = rows[:, 0], rows[:, 1]
    last = until_BT.reshape(len(until_BT), g.blocks, g.block).max(-1)

    def place(shape: tuple[int, ...], of: Any) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *step: of(*at(*step[:4])))

    def numbers(x_BT: Array, of: str, is_column: bool) -> tuple[Array, pl.BlockSpec]:
        def where(b: Any, _: Any, i: Any, j: Any) -> Any:
            n = i if of == "q" else j
            return (b, n, 0) if is_column else (b, 0, n)

        shape = (1, g.block, 1) if is_column else (1, 1, g.block)
        return (x_BT[:, :, None] if is_column else x_BT[:, None]), place(shape, where)

    whole = (1, 1, g.block, operands[0].shape[-1])
    of_q = place(whole, lambda b, h, i, j: (b, h, i, 0))
    of_k = place(whole, lambda b, h, i, j: (b, jax.lax.div(h, g.times), j, 0))
    inputs = [*zip(operands, (of_q, of_k, of_k), strict=True), numbers(until_BT, "k", not first)]
    if g.window:
        inputs += [numbers(positions_BT, "q", first), numbers(positions_BT, "k", not first)]
    line = place((1, 1, 1, g.block), lambda b, h, i, j: (b, h, 0, i))
    inputs += [(x, of_q) if x.ndim == 4 else (x[:, :, None], line) for x in extra]
    arrays, specs = zip(*inputs, strict=True)
    return pl.pallas_call(
        functools.partial(kernel, g=g),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=specs,
            out_specs=[
                pl.BlockSpec((1, 1, g.block, x.shape[-1]), lambda *step: (*step[:3], 0))
                for x in out
            ],
            scratch_shapes=[pltpu.VMEM(size, jnp.float32) for size in scratch],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        interpret=_INTERPRETED,
    )(last, *arrays)


def _forward(q: Array, k: Array, v: Array, rows: Array, *, window: int) -> tuple[Array, Array]:
    """The context, and the logarithm of the sum of each query's exp(scores)."""
    g, (b, h, t, c) = _grid(q, k, window), q.shape
    wide = jax.ShapeDtypeStruct((b, h, t, _LANES), jnp.float32)
    context, log_total = _call(
        _forward_kernel, g, (b, h, g.blocks, g.blocks),
        lambda b, h, i, j: (b, h, i, jnp.minimum(i, j)),
        [q, k, v], rows, [], [q, wide], [(g.block, _LANES), (g.block, _LANES), (g.block, c)],
    )  # fmt: skip
    return context, log_total[..., 0]


def _backward(
    q: Array, k: Array, v: Array, rows: Array, log_total: Array, context: Array, d: Array,
    *, window: int,
) -> tuple[Array, Array, Array]:  # fmt: skip
    g, (b, h, _, c) = _grid(q, k, window), q.shape
    lost = jnp.sum(d.astype(jnp.float32) * context, -1)
    extra = [d, log_total, lost]
    [dq] = _call(
        _queries_kernel, g, (b, h, g.blocks, g.blocks),
        lambda b, h, i, j: (b, h, i, jnp.minimum(i, j)), [q, k, v], rows, extra,
        [q], [(g.block, c)],
    )  # fmt: skip

    def at(b: Any, group: Any, j: Any, step: Any) -> Any:
        head = group * g.times + jax.lax.div(step, g.blocks)
        return b, head, jnp.maximum(jax.lax.rem(step, g.blocks), j), j

    dk, dv = _call(
        _keys_kernel, g, (b, k.shape[1], g.blocks, g.times * g.blocks), at, [q, k, v], rows,
        extra, [k, k], [(g.block, c)] * 2,
    )  # fmt: skip
    return dq, dk, dv
