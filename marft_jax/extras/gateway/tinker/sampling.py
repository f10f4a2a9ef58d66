"""Calls that sample: their fields as requests of a sampler, and scores by the learner's pass."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from tinker import types

from marft_jax import policy as verbs
from marft_jax.errors import BadInput
from marft_jax.extras.gateway.tinker import wire
from marft_jax.extras.gateway.tinker.order import Working
from marft_jax.extras.gateway.tinker.wire import Top
from marft_jax.policy import Datum
from marft_jax.policy.policy import Policy
from marft_jax.random_keys import Stream
from marft_jax.sampling.protocol import Completion, Request
from marft_jax.types import Sampling

_SEEDS = 1 << 62
_MOST_SAMPLES, _MOST_TOP = 1024, 1024
_MOST_DRAWN = 1 << 26  # log-probs that are read for draws at the positions of a prompt
_NO_LOGPROB = -99999.0  # the SDK's mark of a position without likeliest tokens


class Asked(NamedTuple):
    """A call that samples, read and checked.

    Attributes:
        targets: tokens to score at each position of the prompt after the first, ``[N, K]``, or -1.
    """

    prompt: np.ndarray
    requests: list[Request]
    call: types.SampleRequest
    targets: np.ndarray | None

    @property
    def scores(self) -> bool:
        """Some of the answer is scored by the learner."""
        c = self.call
        top = c.topk_prompt_logprobs or c.topk_sample_logprobs or c.prompt_alt_tokens_k
        return bool(c.prompt_logprobs or top or c.target_prompt_logprobs)


def read(call: types.SampleRequest, vocabulary: int, context: int) -> Asked:
    """Reads a call that samples.

    Raises:
        BadInput: it is not possible here; the message names the field.
    """
    prompt, given = wire.ids_of(call.prompt), call.sampling_params
    wire.check_ids("prompt", prompt, vocabulary, context - 1)
    if call.record_stability_info:
        raise BadInput("record_stability_info: not offered, as stable_reinforce is not public")
    room, top = context - len(prompt), min(_MOST_TOP, vocabulary)
    drawn = top if len(prompt) * vocabulary <= _MOST_DRAWN else 0
    tokens = room if given.max_tokens is None else given.max_tokens
    bounds = {
        "max_tokens": (tokens, 1, room),
        "num_samples": (call.num_samples, 1, _MOST_SAMPLES),
        "temperature": (given.temperature, 1e-30 if given.temperature else 0, 1e30),
        "top_p": (given.top_p, 1e-30, 1),
        "top_k": (given.top_k, -1, 1 << 30),
        "topk_prompt_logprobs": (call.topk_prompt_logprobs, 0, top),
        "topk_sample_logprobs": (call.topk_sample_logprobs, 0, top),
        "prompt_alt_tokens_k": (call.prompt_alt_tokens_k, 0, drawn),
        "prompt_logprobs_last_n": (call.prompt_logprobs_last_n or 0, 0, len(prompt) - 1),
    }
    for name, (value, least, most) in bounds.items():
        if not least <= value <= most:
            why = f" (the prompt has {len(prompt)} tokens, the context is {context})"
            why = why if most in (room, drawn, len(prompt) - 1) else ""
            raise BadInput(f"{name}: expected {least} to {most}{why}, got {value}")
    many = [given.stop] if isinstance(given.stop, str) else [*(given.stop or ())]
    texts = tuple(one for one in many if isinstance(one, str))
    if len(many) > 64 or any(not text or len(text) > 1000 for text in texts):
        raise BadInput("stop: expected at most 64 texts of 1 to 1000 characters, or ids")
    ids = tuple(int(one) for one in many if not isinstance(one, str))
    heat, top_p = float(given.temperature), float(given.top_p)
    sampling = Sampling(tokens, heat, top_p, max(0, given.top_k), stop=texts)
    seed = secrets.randbelow(_SEEDS) if given.seed is None else given.seed % _SEEDS
    ends, key = given.stop != [], (Stream.EVALUATION, 0, seed)
    one = Request(prompt.astype(np.int32), -1, sampling, key, stop_ids=ids, ends=ends)
    requests = [one._replace(key=(*key, i, 0)) for i in range(call.num_samples)]
    return Asked(prompt, requests, call, _targets(call, len(prompt) - 1, vocabulary))


def _targets(call: types.SampleRequest, n: int, vocabulary: int) -> np.ndarray | None:
    if (given := call.target_prompt_logprobs) is None:
        return None
    rows, columns = given.sparse_crow_indices, given.sparse_col_indices
    places = None if rows is None else [np.asarray(x or (), int) for x in (rows, columns)]
    found = wire.dense(np.asarray(given.data, int), given.shape or (), places, empty=-1)
    fits = found.ndim == 2 and len(found) == n
    if not fits or (found.size and not -1 <= found.min() <= found.max() < vocabulary):
        what = f"[{n}, K] of tokens, or -1"
        raise BadInput(f"target_prompt_logprobs: expected {what}, got {list(found.shape)}")
    return found


def scored(policy: Policy, asked: Asked, completions: Sequence[Completion]) -> Working:
    """Scores a prompt and samples with the learner's pass; yields the tokens of each part, and
    returns the whole result."""
    call, prompt, message = asked.call, asked.prompt, wire.sampled(completions)
    n, last = len(prompt), call.prompt_logprobs_last_n or len(prompt) - 1
    ids, nexts, late = prompt[:-1], prompt[1:], np.arange(n - 1 - last, n - 1)
    if call.prompt_logprobs:
        own = np.full(n, np.nan, np.float32)
        own[n - last :] = _forward(policy, ids, late, nexts[late])
        message.prompt_logprobs = own.tobytes()
        yield n
    if (k := call.topk_prompt_logprobs) > 0:
        tops = np.zeros((n, k), np.int32), np.full((n, k), _NO_LOGPROB, np.float32)
        for whole, found in zip(tops, _top(policy, ids, late, nexts[late], k), strict=True):
            whole[n - last :] = found
        wire.write_top(message.topk_prompt_logprobs, tops)
        yield n
    if (targets := asked.targets) is not None:
        logprobs, at = np.zeros(targets.shape, np.float32), np.nonzero(targets >= 0)
        logprobs[at] = _forward(policy, ids, at[0], targets[at])
        wire.write(message.target_prompt_logprobs, logprobs, call.target_prompt_logprobs)
        yield n
    if (k := call.prompt_alt_tokens_k) > 0:
        drawn, logprobs = _draws(policy, asked, k)
        wire.write(message.prompt_alt_tokens.tokens, drawn)
        wire.write(message.prompt_alt_tokens.logprobs, logprobs)
        yield n
    if (k := call.topk_sample_logprobs) > 0:
        for one, told in zip(completions, message.sequences, strict=True):
            whole, places = np.concatenate([prompt, one.ids]), n - 1 + np.arange(len(one.ids))
            heat = call.sampling_params.temperature or 1.0
            top = _top(policy, whole[:-1], places, one.ids, k, heat)
            wire.write_top(told.topk_sampled_logprobs, top)
            yield len(whole)
    return message.SerializeToString()


def _forward(policy: Policy, ids: Any, at: Any, targets: Any) -> np.ndarray:
    if not len(targets):
        return np.zeros(0, np.float32)
    return verbs.forward(policy, verbs.pack(policy, [Datum.of(0, ids, at, targets)]))[0]


def _top(policy: Policy, ids: Any, at: Any, targets: Any, k: int, heat: float = 1.0) -> Top:
    if not len(targets):
        return np.zeros((0, k), np.int32), np.zeros((0, k), np.float32)
    return verbs.top(
        policy, verbs.pack(policy, [Datum.of(0, ids, at, targets, temperature=heat)]), k
    )[0]


def _draws(policy: Policy, asked: Asked, k: int) -> Top:
    """Draws tokens at each position of the prompt after the first, with their log-probs."""
    prompt, heat = asked.prompt, asked.call.sampling_params.temperature
    at, vocabulary = np.arange(len(prompt) - 1), policy.base.config.vocab_size
    ids, logprobs = _top(policy, prompt[:-1], at, prompt[1:], vocabulary)
    rng = np.random.default_rng(asked.requests[0].key[2])
    noise = rng.gumbel(size=(k, *logprobs.shape)) if heat else np.zeros((k, *logprobs.shape))
    best = (logprobs / (heat or 1.0) + noise).argmax(-1).T
    return np.take_along_axis(ids, best, 1), np.take_along_axis(logprobs, best, 1)
