"""Hidden states and log-probs of a microbatch, and which tokens belong to which decision."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from marft_jax.learning import batch as batch_lib
from marft_jax.models import decoder, lora
from marft_jax.models.ops.products import times
from marft_jax.models.ops.reductions import log_softmax, total

_LOGITS_IN_FLIGHT = 2**24  # vocabulary logits that exist at once, per microbatch


def hidden_states(graphdef, base, r, index_BX, adapters=None, owners_BT=None, alpha: float = 1.0):
    """Last hidden states at positions ``index_BX`` of each row, ``[B, X, D]``.

    Without adapters they are the frozen base's.
    """
    fused = mask = None
    if adapters is not None:
        fused = lora.fuse(adapters, alpha, dtype_of(base))
        mask = lora.owner_mask(owners_BT, fused)
    hidden_BTD, _ = decoder.forward(
        graphdef, base, r.tokens_BT, r.positions_BT, r.until_BT, fused, mask
    )
    return jnp.take_along_axis(hidden_BTD, index_BX[..., None], axis=1)


def score_actions(graphdef, base, hidden_BAD, r, entropy_learns: bool = True):
    """Log-prob at the sampling temperature, and entropy, of every action token of a microbatch.

    The vocabulary projection sees action positions only, a chunk at a time, so that
    ``[rows, tokens, vocabulary]`` never exists: the backward pass computes the logits of a chunk
    again. Where only log-probs are learned from, the forward pass leaves it their gradient, which
    is as small as the hidden states, and spares one of three products with the vocabulary.

    Args:
        entropy_learns: the entropy has a gradient.

    Returns:
        (logprobs_BA, entropy_BA), zero where the mask is.
    """
    b, a, _ = hidden_BAD.shape
    vocabulary_VD = decoder.vocabulary(graphdef, base)
    most = max(1, _LOGITS_IN_FLIGHT // (b * len(vocabulary_VD)))
    chunks = -(-a // most)
    chunk = -(-a // chunks)  # alike: a last one that is not full is computed like a full one
    run = jax.checkpoint(_score) if entropy_learns else _score_once

    def score(_, chunked):
        hidden, targets, temperature = chunked
        return None, run(hidden, vocabulary_VD, targets, temperature)

    def split(x):
        fill = [(0, 0), (0, -a % chunk)] + [(0, 0)] * (x.ndim - 2)
        padded = jnp.pad(x, fill, constant_values=1)
        return jnp.moveaxis(padded.reshape(b, -1, chunk, *x.shape[2:]), 1, 0)

    _, scored = jax.lax.scan(
        score, None, (split(hidden_BAD), split(r.targets_BA), split(r.temperature_BA))
    )
    return tuple(jnp.moveaxis(x, 0, 1).reshape(b, -1)[:, :a] * r.mask_BA for x in scored)


def _score(hidden, vocabulary_VD, targets, temperature):
    """(log-prob, entropy) of each target."""
    return _read(_logprobs(hidden, vocabulary_VD, temperature), targets)


def _logprobs(hidden, vocabulary_VD, temperature):
    return log_softmax(decoder.logits(hidden, vocabulary_VD) / temperature[..., None])


def _read(logprobs, targets):
    entropy = -total(jnp.exp(logprobs) * logprobs)
    return jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0], entropy


@jax.custom_vjp
def _score_once(hidden, vocabulary_VD, targets, temperature):
    """``_score``, with no gradient but that of the log-prob: d log p / dh = (onehot - p) W / T."""
    return _score(hidden, vocabulary_VD, targets, temperature)


def _score_and_lean(hidden, vocabulary_VD, targets, temperature):
    """The scores, and the gradient of each log-prob."""
    logprobs = _logprobs(hidden, vocabulary_VD, temperature)
    rising = jax.nn.one_hot(targets, len(vocabulary_VD)) - jnp.exp(logprobs)
    rising = (rising / temperature[..., None]).astype(hidden.dtype)
    lean = times(rising.reshape(-1, len(vocabulary_VD)), vocabulary_VD, (1, 0))
    return _read(logprobs, targets), lean.reshape(hidden.shape)


_score_once.defvjp(
    _score_and_lean, lambda lean, d: ((d[0][..., None] * lean).astype(lean.dtype), None, None, None)
)


def action_logprobs(graphdef, base, adapters, alpha: float, r, entropy_learns: bool = True):
    """``score_actions`` of the policy: every token passes through its owner's adapter."""
    hidden_BAD = hidden_states(graphdef, base, r, r.index_BA, adapters, r.owners_BT, alpha)
    return score_actions(graphdef, base, hidden_BAD, r, entropy_learns)


def unit_labels(rows, level: batch_lib.Level):
    """(mask, agent, owner) of each decision, from one microbatch or from all of them."""
    if level == "action":
        return rows.turn_mask_BK, rows.agent_BK, rows.owner_BK
    return rows.mask_BA, token_agents(rows), of_turn(rows.owner_BK, rows)


def token_agents(rows):
    """Who wrote each action token."""
    return of_turn(rows.agent_BK, rows)


def of_turn(x_K, rows):
    """What holds for a turn, for each of its action tokens."""
    return jnp.take_along_axis(x_K, rows.turn_BA, axis=-1)


def unit_index(rows, level: batch_lib.Level):
    """Where in its row a decision's value is read: at the token before it."""
    return rows.first_BK if level == "action" else rows.index_BA


def per_unit(x_BA, r, level: batch_lib.Level, divisor_BK):
    """Per-token numbers to per-decision numbers: sums over each turn's tokens, divided."""
    if level == "token":
        return x_BA
    turn_BAK = jax.nn.one_hot(r.turn_BA, divisor_BK.shape[1]) * r.mask_BA[..., None]
    return jnp.einsum("ba,bak->bk", x_BA, turn_BAK) / divisor_BK


def dtype_of(base):
    """What the frozen base computes in."""
    return jax.tree.leaves(base)[0].dtype
