"""Gated delta rule: a matrix of every head that each token decays and corrects.

    S_t = α_t S_(t-1) + k_t u_tᵀ     u_t = β_t (v_t - α_t S_(t-1)ᵀ k_t)     o_t = S_tᵀ q_t

``recurrent`` is this for one token. ``chunked`` computes the same for whole rows with products of
matrices: within a chunk u solves (I + A) u = r, where A has no loop over tokens.
Source: Yang et al. 2024, Gated Delta Networks (section 3, and the chunks of DeltaNet).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from marft_jax.models.ops.state import CHUNK

_EXACT = jax.lax.Precision.HIGHEST  # errors of a state stay in it for thousands of tokens


class Writes(NamedTuple):
    """What every token reads and writes, float32 ``[B, H, T, channels]`` and ``[B, H, T]``.

    Attributes:
        q, k, v: queries, keys of length 1, and values; of one token without the axis T.
        log_decay: log α, at most 0.
        beta: share of its error that a token corrects.
    """

    q: Array
    k: Array
    v: Array
    log_decay: Array
    beta: Array


def recurrent(token: Writes, state_BHCC: Array) -> tuple[Array, Array]:
    """Output ``[B, H, channels]`` of one token, and the state after it."""
    q, k, v, log_decay, beta = token
    decay = jnp.exp(log_decay)[..., None]
    both = jnp.stack([q, k], axis=2)
    by_q, by_k = jnp.moveaxis(_product("bhnc,bhcv->bhnv", both, state_BHCC), 2, 0)
    u = beta[..., None] * (v - decay * by_k)
    out = decay * by_q + (q * k).sum(-1, keepdims=True) * u
    return out, decay[..., None] * state_BHCC + k[..., None] * u[..., None, :]


class _Chunk(NamedTuple):
    """What a chunk reads, behind an axis for the chunks; T is that of a chunk.

    Attributes:
        until_BT: index of the last token that reads each token.
        first: index of its first token.
    """

    tokens: Writes
    until_BT: Array
    first: Array


def chunked(
    tokens: Writes, state_BHCC: Array | None, snapshot_B: Array | None = None
) -> tuple[Array, Array, Array | None]:
    """Outputs of rows of one sequence, and the states after the last token and before
    ``snapshot_B``.

    Args:
        state_BHCC: before the first token; None for zeros.
        snapshot_B: beginning of a chunk of each row.
    """
    state = _zeros(tokens) if state_BHCC is None else state_BHCC
    b, _, t = tokens.beta.shape
    chunks = _split(tokens, jnp.full((b, t), t - 1))

    def step(carried: Any, chunk: _Chunk) -> tuple[Any, Array]:
        state, snapshot = carried
        if snapshot_B is not None:
            here_B = (snapshot_B == chunk.first)[:, None, None, None]
            snapshot = jnp.where(here_B, state, snapshot)
        state, out = _chunk(state, chunk.until_BT[:, 0], chunk)  # all read all; padding is last
        return (state, snapshot), out

    start = state, None if snapshot_B is None else state
    (state, snapshot), out = jax.lax.scan(step, start, chunks)
    return _joined(out, t), state, snapshot


def branched(tokens: Writes, until_BT: Array, before_BN: Array) -> Array:
    """Outputs of whole rows, in which sequences begin within chunks, or at the beginning of a chunk
    where another sequence has left the state of their common prefix.

    The backward pass keeps the state after each chunk, and computes the chunk again.

    Args:
        until_BT: index of the last token that reads this one.
        before_BN: see ``state.tokens_before``.
    """
    chunks = _split(tokens, until_BT)
    until_BN = jnp.take_along_axis(until_BT, jnp.maximum(before_BN, 0), axis=1)
    until_NB = jnp.where(before_BN < 0, -1, until_BN).T
    return _joined(_branched(chunks, before_BN.T // CHUNK, until_NB), until_BT.shape[1])


@jax.custom_vjp
def _branched(chunks: _Chunk, source_NB: Array, until_NB: Array) -> Array:
    """Outputs by chunk.

    Args:
        source_NB: the chunk whose last state each begins with; below 0 for zeros.
        until_NB: last token that reads that state.
    """
    return _branched_forward(chunks, source_NB, until_NB)[0]


def _branched_forward(chunks: _Chunk, source_NB: Array, until_NB: Array) -> tuple[Array, Any]:
    def step(states: Array, each: Any) -> tuple[Array, Array]:
        i, chunk, source_B, until_B = each
        state, out = _chunk(_state(states, source_B), until_B, chunk)
        return states.at[:, i].set(state), out

    each = jnp.arange(n := len(chunks.first)), chunks, source_NB, until_NB
    state = _zeros(jax.tree.map(lambda x: x[0], chunks.tokens))
    states = jnp.broadcast_to(state[:, None], (len(state), n, *state.shape[1:]))
    states, out = jax.lax.scan(step, states, each)
    return out, (states, *each)


def _branched_backward(forward: Any, d_out: Array) -> tuple[_Chunk, None, None]:
    states, *each = forward

    def step(d_states: Array, each: Any) -> tuple[Array, Writes]:
        (i, chunk, source_B, until_B), d_out = each

        def run(state: Array, tokens: Writes) -> tuple[Array, Array]:
            return _chunk(state, until_B, chunk._replace(tokens=tokens))

        _, back = jax.vjp(run, _state(states, source_B), chunk.tokens)
        d_state, d_tokens = back((d_states[:, i], d_out))
        return jax.vmap(_add)(d_states, source_B, d_state), d_tokens

    each = tuple(each), d_out
    _, d_tokens = jax.lax.scan(step, jnp.zeros_like(states), each, reverse=True)
    return _Chunk(d_tokens, None, None), None, None  # pyright: ignore[reportArgumentType]


_branched.defvjp(_branched_forward, _branched_backward)


def _state(states_BNHCC: Array, source_B: Array) -> Array:
    known = jax.vmap(lambda states, i: states[i])(states_BNHCC, jnp.maximum(source_B, 0))
    return jnp.where((source_B < 0)[:, None, None, None], 0, known)


def _add(states: Array, source: Array, d_state: Array) -> Array:
    known = jnp.where(source < 0, len(states), source)  # past the end: dropped
    return states.at[known].add(d_state, mode="drop")


def _zeros(tokens: Writes) -> Array:
    """State before the first token."""
    b, h, _, channels = tokens.k.shape
    return jnp.zeros((b, h, channels, tokens.v.shape[-1]), jnp.float32)


def _split(tokens: Writes, until_BT: Array) -> _Chunk:
    """Chunks; what fills the last one decays nothing and writes nothing."""
    t = until_BT.shape[1]
    c = min(CHUNK, t)
    n = -(-t // c)

    def split(axis: int, x: Array) -> Array:
        fill = [(0, 0)] * x.ndim
        fill[axis] = (0, n * c - t)
        x = jnp.pad(x, fill)
        return jnp.moveaxis(x.reshape(*x.shape[:axis], n, c, *x.shape[axis + 1 :]), axis, 0)

    until_BT = jnp.where(until_BT >= t - 1, n * c, until_BT)
    of_tokens = jax.tree.map(functools.partial(split, 2), tokens)
    return _Chunk(of_tokens, split(1, until_BT), jnp.arange(n) * c)


def _joined(out: Array, t: int) -> Array:
    """``[N, B, H, C, channels]`` of chunks, as ``[B, H, T, channels]``."""
    out = jnp.moveaxis(out, 0, 2)
    return out.reshape(*out.shape[:2], -1, out.shape[-1])[:, :, :t]


def _chunk(state: Array, until_B: Array, chunk: _Chunk) -> tuple[Array, Array]:
    """The state after a chunk, and its outputs.

    The state before it and the tokens within it reach only those that may read them.

    Args:
        until_B: last token that reads the state.
    """
    (q, k, v, log_decay, beta), until_BI, first = chunk
    at_I = first + jnp.arange(until_BI.shape[1])
    reads_BIJ = jnp.tril(until_BI[:, None, :] >= at_I[None, :, None])
    total = _product("bij,bhj->bhi", reads_BIJ.astype(jnp.float32), log_decay)
    apart = total[..., :, None] - total[..., None, :]
    decay = jnp.exp(jnp.where(reads_BIJ[:, None], apart, -jnp.inf))
    continues_BI = until_B[:, None] >= at_I[None]
    since = jnp.where(continues_BI[:, None], jnp.exp(total), 0)[..., None]
    corrected = beta[..., None] * k
    a = jnp.tril(_product("bhic,bhjc->bhij", corrected, k) * decay, -1)
    old = since * _product("bhic,bhcv->bhiv", corrected, state)
    u = _product("bhij,bhjv->bhiv", _inverse(a), beta[..., None] * v - old)
    out = since * _product("bhic,bhcv->bhiv", q, state)
    out += _product("bhij,bhjv->bhiv", _product("bhic,bhjc->bhij", q, k) * decay, u)
    new = _product("bhic,bhiv->bhcv", k * decay[..., -1, :, None], u)
    return since[..., -1:, :] * state + new, out


@jax.custom_vjp
def _inverse(a: Array) -> Array:
    """(I + a)⁻¹ of strictly lower triangular matrices: blocks on the diagonal, twice as large each
    time, by [[P, 0], [X, Q]]⁻¹ = [[P⁻¹, 0], [-Q⁻¹ X P⁻¹, Q⁻¹]].

    It is a loop, and its gradient is two products, because a TPU's compiler takes seconds for each
    product.
    """
    row = jnp.arange(c := a.shape[-1])

    def double(i: Array, inverse: Array) -> Array:
        block, pair = row >> i, row >> i + 1
        joins = (pair[:, None] == pair[None]) & (block[:, None] != block[None])
        x = jnp.where(joins[None, None], a, 0)
        return inverse - _product("bhij,bhjk,bhkl->bhil", inverse, x, inverse)

    eye = jnp.broadcast_to(jnp.eye(c), a.shape)
    return jax.lax.fori_loop(0, (c - 1).bit_length(), double, eye)


def _inverse_backward(inverse: Array, d: Array) -> tuple[Array]:
    """-A⁻ᵀ d A⁻ᵀ for A = I + a."""
    return (-_product("bhji,bhjk->bhik", inverse, _product("bhij,bhkj->bhik", d, inverse)),)


_inverse.defvjp(lambda a: (_inverse(a),) * 2, _inverse_backward)


def _product(axes: str, *operands: Array) -> Array:
    return jnp.einsum(axes, *operands, precision=_EXACT)
