"""Hidden states and log-probs of a microbatch, and which tokens belong to which decision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from marft_jax.models import decoder, lora
from marft_jax.models.ops.products import times
from marft_jax.models.ops.reductions import log_softmax, total
from marft_jax.models.vocabulary import Vocabulary
from marft_jax.policy.rows import Rows
from marft_jax.types import Level

Graph = nnx.GraphDef[decoder.Decoder]
_Scores = tuple[jax.Array, jax.Array]  # (log-prob, entropy) of each target
# hidden states, targets, temperatures, sets of forbidden tokens, owners
_Chunk = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]
_LOGITS_IN_FLIGHT = 2**24  # vocabulary logits that exist at once, per microbatch


def hidden_states(
    graphdef: Graph,
    base: decoder.Base,
    r: Rows[jax.Array],
    index_BX: jax.Array,
    adapters: lora.Adapters | None = None,
    owners_BT: jax.Array | None = None,
    scale: jax.Array | float = 1.0,
) -> jax.Array:
    """Last hidden states at positions ``index_BX`` of each row, ``[B, X, D]``.

    Without adapters they are the frozen base's.
    """
    fused = mask = None
    if adapters is not None:
        fused = lora.fuse(adapters, scale, dtype_of(base))
        mask = lora.owner_mask(owners_BT, fused)
    hidden_BTD, _ = decoder.forward(
        graphdef, base, r.tokens.ids_BT, r.tokens.positions_BT, r.tokens.last_reader_BT, fused, mask
    )
    return jnp.take_along_axis(hidden_BTD, index_BX[..., None], axis=1)


def score_actions(
    graphdef: Graph,
    base: decoder.Base,
    hidden_BAD: jax.Array,
    r: Rows[jax.Array],
    entropy_learns: bool = True,
    unembed: lora.FusedAdapters | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob at the sampling temperature, and entropy, of every action token of a microbatch,
    among the tokens that it could be.

    The vocabulary projection reads action positions only, one chunk at a time, so that an array
    ``[rows, tokens, vocabulary]`` never exists. The backward pass computes the logits of a chunk
    again. Where the entropy has no gradient, the forward pass keeps the gradient of the log-probs
    instead. This gradient is as small as the hidden states, and spares one of three products with
    the vocabulary.

    Args:
        entropy_learns: the entropy has a gradient.
        unembed: adapters of the vocabulary, see ``on_vocabulary``.

    Returns:
        (logprobs_BA, entropy_BA), zero where the mask is.
    """
    run = jax.checkpoint(_score) if entropy_learns or unembed is not None else _score_once
    scored = _in_chunks(graphdef, base, hidden_BAD, r, unembed, run)
    logprobs_BA, entropy_BA = (x_BA * r.actions.mask_BA for x_BA in scored)
    return logprobs_BA, entropy_BA


def _in_chunks(
    graphdef: Graph,
    base: decoder.Base,
    hidden_BAD: jax.Array,
    r: Rows[jax.Array],
    unembed: lora.FusedAdapters | None,
    run: Callable[..., Any],
) -> Any:
    """Results of ``run`` on (hidden states, vocabulary, targets, temperatures) of a chunk of action
    tokens, put together to ``[B, A, ...]``."""
    b, a, _ = hidden_BAD.shape
    vocabulary, forbidden = decoder.vocabulary(graphdef, base), r.actions.forbidden
    most = max(1, _LOGITS_IN_FLIGHT // (b * len(vocabulary.matrix_VD)))
    chunks = -(-a // most)
    chunk = -(-a // chunks)  # equal chunks, as one that is not full costs as much as a full chunk

    def score(_: None, chunked: _Chunk) -> tuple[None, Any]:
        (hidden, targets, temperature, sets, owners), of_chunk = chunked, vocabulary
        if owners is not None:
            of_chunk = of_chunk.adapted(unembed, owners)
        if forbidden is not None and sets is not None:
            never = forbidden.at(sets, len(vocabulary.matrix_VD))
            of_chunk = dataclasses.replace(of_chunk, never=never)
        with jax.named_scope("vocabulary"):
            return None, run(hidden, of_chunk, targets, temperature)

    def split(x: jax.Array) -> jax.Array:
        fill = [(0, 0), (0, -a % chunk)] + [(0, 0)] * (x.ndim - 2)
        padded = jnp.pad(x, fill, constant_values=1)
        return jnp.moveaxis(padded.reshape(b, -1, chunk, *x.shape[2:]), 1, 0)

    chunked = split(hidden_BAD), split(r.actions.targets_BA), split(r.actions.temperature_BA)
    chunked += (None if forbidden is None else split(forbidden.set_A),)
    chunked += (None if unembed is None else split(of_turn(r.turns.owner_BK, r)),)
    _, scored = jax.lax.scan(score, None, chunked)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(b, -1, *x.shape[3:])[:, :a], scored)


def _score(
    hidden: jax.Array, vocabulary: Vocabulary, targets: jax.Array, temperature: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(log-prob, entropy) of each target."""
    return _read(log_softmax(decoder.logits(hidden, vocabulary) / temperature[..., None]), targets)


def _read(logprobs: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    entropy = -total(jnp.exp(logprobs) * logprobs)
    return jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0], entropy


@jax.custom_vjp
def _score_once(
    hidden: jax.Array, vocabulary: Vocabulary, targets: jax.Array, temperature: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """``_score`` with the gradient of the log-prob alone: d log p / dh = (onehot - p) W / T, where
    logits are the products with W alone."""
    return _score(hidden, vocabulary, targets, temperature)


def _score_forward(
    hidden: jax.Array, vocabulary: Vocabulary, targets: jax.Array, temperature: jax.Array
) -> tuple[_Scores, jax.Array]:
    """Scores, and the gradient of each log-prob."""
    logits, to_products = jax.vjp(vocabulary.finish, vocabulary.products(hidden))
    logprobs, matrix_VD = log_softmax(logits / temperature[..., None]), vocabulary.matrix_VD
    by_logit = jax.nn.one_hot(targets, len(matrix_VD)) - jnp.exp(logprobs)
    [by_product] = to_products(by_logit / temperature[..., None])
    by_product = by_product.astype(hidden.dtype).reshape(-1, len(matrix_VD))
    gradient = times(by_product, matrix_VD, (1, 0))
    return _read(logprobs, targets), gradient.reshape(hidden.shape)


def _score_backward(gradient: jax.Array, d_scores: _Scores) -> tuple[jax.Array, None, None, None]:
    return (d_scores[0][..., None] * gradient).astype(gradient.dtype), None, None, None


_score_once.defvjp(_score_forward, _score_backward)


def forward(
    graphdef: Graph,
    *,
    base: decoder.Base,
    adapters: lora.Adapters | None,
    scale: jax.Array | float,
    r: Rows[jax.Array],
) -> jax.Array:
    """Log-probs of the learned tokens under adapters, ``[B, A]``; without any, of the base."""
    with jax.named_scope("forward"):
        states_BAD, unembed = _through_policy(graphdef, base, adapters, scale, r)
        return score_actions(graphdef, base, states_BAD, r, unembed=unembed)[0]


def top_tokens(
    graphdef: Graph,
    k: int,
    base: decoder.Base,
    adapters: lora.Adapters | None,
    scale: jax.Array | float,
    r: Rows[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """The k likeliest tokens at each action token's place, and their log-probs, ``[B, A, k]``."""

    def top(hidden: jax.Array, vocabulary: Vocabulary, _: Any, temperature: jax.Array) -> Any:
        logits = decoder.logits(hidden, vocabulary) / temperature[..., None]
        return jax.lax.top_k(log_softmax(logits), k)[::-1]

    states_BAD, unembed = _through_policy(graphdef, base, adapters, scale, r)
    return _in_chunks(graphdef, base, states_BAD, r, unembed, top)


def _through_policy(
    graphdef: Graph,
    base: decoder.Base,
    adapters: lora.Adapters | None,
    scale: jax.Array | float,
    r: Rows[jax.Array],
) -> tuple[jax.Array, lora.FusedAdapters | None]:
    """``hidden_states`` at action tokens, and ``on_vocabulary`` of the same adapters."""
    at, owners_BT = r.actions.index_BA, r.tokens.owners_BT
    states_BAD = hidden_states(graphdef, base, r, at, adapters, owners_BT, scale)
    return states_BAD, on_vocabulary(adapters or {}, scale, dtype_of(base))


def on_vocabulary(
    adapters: lora.Adapters, scale: jax.Array | float, dtype: jnp.dtype
) -> lora.FusedAdapters | None:
    """Those of the matrix to logits alone; None where there are none."""
    unembed = {name: pair for name, pair in adapters.items() if name == lora.UNEMBED}
    return lora.fuse(unembed, scale, dtype) if unembed else None


def decision_labels(r: Rows[jax.Array], level: Level) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(mask, agent, owner) of each decision."""
    if level == "action":
        return r.turns.mask_BK, r.turns.agent_BK, r.turns.owner_BK
    return r.actions.mask_BA, of_turn(r.turns.agent_BK, r), of_turn(r.turns.owner_BK, r)


def of_turn(x_BK: jax.Array, r: Rows[jax.Array]) -> jax.Array:
    """Numbers of turns, at each of their action tokens."""
    return jnp.take_along_axis(x_BK, r.actions.turn_BA, axis=-1)


def turn_sums(x_BA: jax.Array, r: Rows[jax.Array]) -> jax.Array:
    """Sums over the tokens of each turn, at each of its tokens, ``[B, A]``."""
    return of_turn(per_decision(x_BA, r, "action", jnp.ones_like(r.turns.divisor_BK)), r)


def decision_index(r: Rows[jax.Array], level: Level) -> jax.Array:
    """Positions in the row where the values of decisions are read: the token before each."""
    return r.turns.prompt_end_BK if level == "action" else r.actions.index_BA


def per_decision(
    x_BA: jax.Array, r: Rows[jax.Array], level: Level, divisor_BK: jax.Array
) -> jax.Array:
    """Numbers of tokens to numbers of decisions: at action level, sums over a turn's tokens,
    divided by ``divisor_BK``."""
    if level == "token":
        return x_BA
    of_turn_BAK = jax.nn.one_hot(r.actions.turn_BA, divisor_BK.shape[1], dtype=bool)
    of_turn_BAK &= r.actions.mask_BA[..., None] > 0
    # selected, not multiplied: 0 * NaN would carry one turn's NaN to all turns of the row
    return jnp.where(of_turn_BAK, x_BA[..., None], 0).sum(1) / divisor_BK


def dtype_of(base: decoder.Base) -> jnp.dtype:
    """Dtype that the frozen base computes in."""
    return jax.tree.leaves(base)[0].dtype
