"""Gated delta rule: a matrix of every head that each token decays and corrects.

    S_t = α_t S_(t-1) + k_t u_tᵀ     u_t = β_t (v_t - α_t S_(t-1)ᵀ k_t)     o_t = S_tᵀ q_t

``recurrent`` is this for one token. ``chunked`` computes the same for whole rows with products of
matrices: within a chunk u solves (I + A) u = r, where A has no loop over tokens.
Source: Yang et al. 2024, Gated Delta Networks (section 3, and the chunks of DeltaNet).
"""

from __future__ import annotations

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


def chunked(
    tokens: Writes, state_BHCC: Array | None, until_BT: Array, snapshot_B: Array | None = None
) -> tuple[Array, Array, Array | None]:
    """Outputs of whole rows, and the states after the last token and before ``snapshot_B``.

    The backward pass keeps the state before each chunk, and computes the chunk again.

    Args:
        state_BHCC: before the first token; None for zeros.
        until_BT: index of the last token that reads this one; with a state, all read all.
        snapshot_B: beginning of a chunk of each row.
    """
    (b, h, t, _), channels = tokens.k.shape, tokens.v.shape[-1]
    if state_BHCC is None:
        state_BHCC = jnp.zeros((b, h, tokens.k.shape[-1], channels), jnp.float32)
    c = min(CHUNK, t)
    n = -(-t // c)
    until_BT = jnp.where(until_BT >= t - 1, n * c, until_BT)

    def split(x: Array, axis: int) -> Array:
        """Chunks in front; what fills the last chunk decays nothing and writes nothing."""
        fill = [(0, 0)] * x.ndim
        fill[axis] = (0, n * c - t)
        x = jnp.pad(x, fill)
        return jnp.moveaxis(x.reshape(*x.shape[:axis], n, c, *x.shape[axis + 1 :]), axis, 0)

    def chunk(carried: Any, each: Any) -> tuple[Any, Array]:
        state, until_B, snapshot = carried
        tokens, until_BI, first = each
        if snapshot_B is not None:
            here_B = (snapshot_B == first)[:, None, None, None]
            snapshot = jnp.where(here_B, state, snapshot)
        state, out = _chunk(state, until_B, tokens, until_BI, first)
        return (state, until_BI[:, -1], snapshot), out

    each = jax.tree.map(lambda x: split(x, 2), tokens), split(until_BT, 1), jnp.arange(n) * c
    start = state_BHCC, jnp.full(b, n * c), None if snapshot_B is None else state_BHCC
    (state_BHCC, _, snapshot), out = jax.lax.scan(jax.checkpoint(chunk), start, each)
    out = jnp.moveaxis(out, 0, 2).reshape(b, h, n * c, channels)[:, :, :t]
    return out, state_BHCC, snapshot


def _chunk(
    state: Array, until_B: Array, tokens: Writes, until_BI: Array, first: Array
) -> tuple[Array, Array]:
    """The state after a chunk, and its outputs.

    The state before it and the tokens within it reach only those that may read them.

    Args:
        until_B: last token that reads the state.
        first: index of the chunk's first token.
    """
    q, k, v, log_decay, beta = tokens
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
