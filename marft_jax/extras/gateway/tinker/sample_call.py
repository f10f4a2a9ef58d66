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


class SampleCall(NamedTuple):
    """A call that samples, read and checked.

    Attributes:
        targets: tokens to score at each position of the prompt after the first, ``[N, K]``, or -1.
    """

    prompt: np.ndarray
    requests: list[Request]
    sent: types.SampleRequest
    targets: np.ndarray | None

    @property
    def scores(self) -> bool:
        """Some of the answer is scored by the learner."""
        sent = self.sent
        top = sent.topk_prompt_logprobs or sent.topk_sample_logprobs or sent.prompt_alt_tokens_k
        return bool(sent.prompt_logprobs or top or sent.target_prompt_logprobs)


def read(sent: types.SampleRequest, vocabulary: int, context: int) -> SampleCall:
    """Reads a call that samples.

    Raises:
        BadInput: it is not possible here; the message names the field.
    """
    prompt, params = wire.ids_of(sent.prompt), sent.sampling_params
    wire.check_ids("prompt", prompt, vocabulary, context - 1)
    if sent.record_stability_info:
        raise BadInput("record_stability_info: not offered, as stable_reinforce is not public")
    room, top = context - len(prompt), min(_MOST_TOP, vocabulary)
    drawn = top if len(prompt) * vocabulary <= _MOST_DRAWN else 0
    tokens = room if params.max_tokens is None else params.max_tokens
    bounds = {
        "max_tokens": (tokens, 1, room),
        "num_samples": (sent.num_samples, 1, _MOST_SAMPLES),
        "temperature": (params.temperature, 1e-30 if params.temperature else 0, 1e30),
        "top_p": (params.top_p, 1e-30, 1),
        "top_k": (params.top_k, -1, 1 << 30),
        "topk_prompt_logprobs": (sent.topk_prompt_logprobs, 0, top),
        "topk_sample_logprobs": (sent.topk_sample_logprobs, 0, top),
        "prompt_alt_tokens_k": (sent.prompt_alt_tokens_k, 0, drawn),
        "prompt_logprobs_last_n": (sent.prompt_logprobs_last_n or 0, 0, len(prompt) - 1),
    }
    for name, (value, least, most) in bounds.items():
        if not least <= value <= most:
            why = f" (the prompt has {len(prompt)} tokens, the context is {context})"
            why = why if most in (room, drawn, len(prompt) - 1) else ""
            raise BadInput(f"{name}: expected {least} to {most}{why}, got {value}")
    stops = [params.stop] if isinstance(params.stop, str) else [*(params.stop or ())]
    texts = tuple(stop for stop in stops if isinstance(stop, str))
    if len(stops) > 64 or any(not text or len(text) > 1000 for text in texts):
        raise BadInput("stop: expected at most 64 texts of 1 to 1000 characters, or ids")
    ids = tuple(int(stop) for stop in stops if not isinstance(stop, str))
    heat, top_p = float(params.temperature), float(params.top_p)
    sampling = Sampling(tokens, heat, top_p, max(0, params.top_k), stop=texts)
    seed = secrets.randbelow(_SEEDS) if params.seed is None else params.seed % _SEEDS
    ends, key = params.stop != [], (Stream.EVALUATION, 0, seed)
    first = Request(prompt.astype(np.int32), -1, sampling, key, stop_ids=ids, ends=ends)
    requests = [first._replace(key=(*key, i, 0)) for i in range(sent.num_samples)]
    return SampleCall(prompt, requests, sent, _targets(sent, len(prompt) - 1, vocabulary))


def _targets(sent: types.SampleRequest, n: int, vocabulary: int) -> np.ndarray | None:
    if (tensor := sent.target_prompt_logprobs) is None:
        return None
    rows, columns = tensor.sparse_crow_indices, tensor.sparse_col_indices
    places = None if rows is None else [np.asarray(x or (), int) for x in (rows, columns)]
    targets = wire.dense(np.asarray(tensor.data, int), tensor.shape or (), places, empty=-1)
    fits = targets.ndim == 2 and len(targets) == n
    if not fits or not ((targets >= -1) & (targets < vocabulary)).all():
        what = f"[{n}, K] of tokens, or -1"
        raise BadInput(f"target_prompt_logprobs: expected {what}, got {list(targets.shape)}")
    return targets


def scored(policy: Policy, call: SampleCall, completions: Sequence[Completion]) -> Working:
    """Scores a prompt and samples with the learner's pass; yields the tokens of each part, and
    returns the whole result."""
    sent, prompt, message = call.sent, call.prompt, wire.sampled(completions)
    n, last = len(prompt), sent.prompt_logprobs_last_n or len(prompt) - 1
    ids, nexts, late = prompt[:-1], prompt[1:], np.arange(n - 1 - last, n - 1)
    if sent.prompt_logprobs:
        logprobs = np.full(n, np.nan, np.float32)
        logprobs[n - last :] = _forward(policy, ids, late, nexts[late])
        message.prompt_logprobs = logprobs.tobytes()
        yield n
    if (k := sent.topk_prompt_logprobs) > 0:
        tops = np.zeros((n, k), np.int32), np.full((n, k), _NO_LOGPROB, np.float32)
        for whole, part in zip(tops, _top(policy, ids, late, nexts[late], k), strict=True):
            whole[n - last :] = part
        wire.write_top(message.topk_prompt_logprobs, tops)
        yield n
    if (targets := call.targets) is not None:
        logprobs, at = np.zeros(targets.shape, np.float32), np.nonzero(targets >= 0)
        logprobs[at] = _forward(policy, ids, at[0], targets[at])
        wire.write(message.target_prompt_logprobs, logprobs, sent.target_prompt_logprobs)
        yield n
    if (k := sent.prompt_alt_tokens_k) > 0:
        drawn, logprobs = _draws(policy, call, k)
        wire.write(message.prompt_alt_tokens.tokens, drawn)
        wire.write(message.prompt_alt_tokens.logprobs, logprobs)
        yield n
    if (k := sent.topk_sample_logprobs) > 0:
        for completion, sequence in zip(completions, message.sequences, strict=True):
            sampled = completion.ids
            whole, at = np.concatenate([prompt, sampled]), n - 1 + np.arange(len(sampled))
            heat = sent.sampling_params.temperature or 1.0
            top = _top(policy, whole[:-1], at, sampled, k, heat)
            wire.write_top(sequence.topk_sampled_logprobs, top)
            yield len(whole)
    return message.SerializeToString()


def _forward(policy: Policy, ids: Any, at: Any, targets: Any) -> np.ndarray:
    if not len(targets):
        return np.zeros(0, np.float32)
    return verbs.forward(policy, verbs.pack(policy, [Datum.of(0, ids, at, targets)]))[0]


def _top(policy: Policy, ids: Any, at: Any, targets: Any, k: int, heat: float = 1.0) -> Top:
    if not len(targets):
        return np.zeros((0, k), np.int32), np.zeros((0, k), np.float32)
    packed = verbs.pack(policy, [Datum.of(0, ids, at, targets, temperature=heat)])
    return verbs.top(policy, packed, k)[0]


def _draws(policy: Policy, call: SampleCall, k: int) -> Top:
    """Draws tokens at each position of the prompt after the first, with their log-probs."""
    prompt, heat = call.prompt, call.sent.sampling_params.temperature
    at, vocabulary = np.arange(len(prompt) - 1), policy.base.config.vocab_size
    ids, logprobs = _top(policy, prompt[:-1], at, prompt[1:], vocabulary)
    rng = np.random.default_rng(call.requests[0].key[2])
    noise = rng.gumbel(size=(k, *logprobs.shape)) if heat else np.zeros((k, *logprobs.shape))
    best = (logprobs / (heat or 1.0) + noise).argmax(-1).T
    return np.take_along_axis(ids, best, 1), np.take_along_axis(logprobs, best, 1)
