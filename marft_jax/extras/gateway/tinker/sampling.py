"""Sampling with saved weights in the slots of a running engine, and scores of prompts."""

from __future__ import annotations

import functools
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, cast

import numpy as np
from tinker import types

from marft_jax import learning
from marft_jax.errors import BadInput, RunFailed
from marft_jax.extras.gateway.tinker import wire
from marft_jax.extras.gateway.tinker.wire import Answer, Top, dense, ids_of
from marft_jax.learning import Adapter, Datum
from marft_jax.learning.policy import Policy
from marft_jax.random_keys import Stream
from marft_jax.sampling.batcher import Batcher
from marft_jax.sampling.protocol import Completion, Request
from marft_jax.types import Sampling

_SEEDS = 1 << 62
_MOST_SAMPLES, _MOST_TOP = 1024, 1024
_MOST_DRAWN = 1 << 26  # log-probs that are read for draws at the positions of a prompt
Weights = tuple[str, ...] | None
"""Names the content of saved weights; None for the bare base."""


class _Waiting(NamedTuple):
    weights: Weights
    requests: list[Request]
    futures: list[Future[Completion]]


class Slots:
    """Puts saved weights into the slots of an engine's stack when requests need them; of slots
    without unanswered requests the one that was used least recently is replaced.

    Args:
        batcher: of an ``Engine``.
        read: reads saved weights.
    """

    def __init__(self, batcher: Batcher, size: int, read: Callable[[Any], Adapter]) -> None:
        self._batcher, self._read = batcher, read
        self._loaded: OrderedDict[Weights, int] = OrderedDict()  # least recently used first
        self._free, self._open = [*range(size)], [0] * (size + 1)  # the last is the base's
        self._waiting = deque[_Waiting]()
        self._lock = threading.RLock()

    def submit(self, weights: Weights, requests: Sequence[Request]) -> list[Future[Completion]]:
        """Samples with saved weights; the owners of the requests are set here."""
        for request in requests:
            self._batcher.sampler.capabilities.check(request)
        futures: list[Future[Completion]] = [Future() for _ in requests]
        with self._lock:
            self._waiting.append(_Waiting(weights, [*requests], futures))
            self._begin()
        return futures

    def _begin(self) -> None:
        """Begins what waits, in its order, as far as there are slots."""
        while self._waiting and (slot := self._slot(self._waiting[0].weights)) is not None:
            weights, requests, futures = self._waiting.popleft()
            for request, future in zip(requests, futures, strict=True):
                self._open[slot] += 1
                begun = self._batcher.submit(request._replace(owner=slot))
                future.add_done_callback(lambda own, b=begun: b.cancel() if own.cancelled() else 0)
                ended = functools.partial(self._ended, slot, weights, future)
                begun.add_done_callback(ended)

    def _slot(self, weights: Weights) -> int | None:
        """The slot of saved weights, which are put into one; None: all slots are used."""
        if weights is None:
            return -1
        if weights not in self._loaded:
            idle = [own for own, slot in self._loaded.items() if not self._open[slot]]
            if not self._free and not idle:
                return None
            slot = self._free.pop() if self._free else self._loaded.pop(idle[0])
            adapter, engine = self._read(weights), cast(Any, self._batcher.sampler)
            own = adapter.factors, adapter.alpha / adapter.rank, "/".join(weights)
            self._batcher.between(lambda: engine.replace(slot, *own))
            self._loaded[weights] = slot
        self._loaded.move_to_end(weights)
        return self._loaded[weights]

    def _ended(
        self, slot: int, weights: Weights, future: Future[Completion], done: Future[Completion]
    ) -> None:
        def free(_: Any = None) -> None:
            with self._lock:
                self._open[slot] -= 1
                self._begin()

        if done.cancelled():  # the engine drops it after the next calls between its steps
            wait = self._batcher.between
            wait(int).add_done_callback(lambda _: wait(int).add_done_callback(free))
            return
        error = done.exception()
        if error is None and weights and done.result().version != "/".join(weights):
            error = RunFailed("the sampler had other weights; this is a fault of the server")
        if future.set_running_or_notify_cancel():
            future.set_exception(error) if error else future.set_result(done.result())
        free()


class Asked(NamedTuple):
    """A call that samples, read and checked."""

    prompt: np.ndarray
    requests: list[Request]
    call: types.SampleRequest

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
    prompt, given = np.asarray(ids_of(call.prompt), np.int64), call.sampling_params
    if prompt.min() < 0 or prompt.max() >= vocabulary:
        raise BadInput(f"prompt: expected tokens from 0 to {vocabulary - 1}")
    if call.record_stability_info:
        raise BadInput("record_stability_info: not offered, as stable_reinforce is not public")
    room = context - len(prompt)
    if room < 1:
        raise BadInput(f"prompt: expected at most {context - 1} tokens, got {len(prompt)}")
    bounds = {
        "max_tokens": (room if given.max_tokens is None else given.max_tokens, 1, room),
        "num_samples": (call.num_samples, 1, _MOST_SAMPLES),
        "temperature": (given.temperature, 0, 1e30),
        "top_p": (given.top_p, 0, 1),
        "top_k": (given.top_k, -1, 1 << 30),
        **{
            name: (getattr(call, name), 0, min(_MOST_TOP, vocabulary))
            for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k")
        },
        "prompt_logprobs_last_n": (call.prompt_logprobs_last_n or 0, 0, len(prompt) - 1),
    }
    for name, (value, least, most) in bounds.items():
        if not least <= value <= most:
            why = f" (the context is {context} tokens)" if name == "max_tokens" else ""
            raise BadInput(f"{name}: expected {least} to {most}{why}, got {value}")
    if given.top_p == 0 or 0 < given.temperature < 1e-30:
        raise BadInput("top_p: expected above 0; temperature: expected 0 or above 1e-30")
    texts, ids, ends = _stops(given.stop)
    sampling = Sampling(
        int(bounds["max_tokens"][0]), float(given.temperature), float(given.top_p),
        max(0, given.top_k), stop=texts,
    )  # fmt: skip
    seed = secrets.randbelow(_SEEDS) if given.seed is None else given.seed % _SEEDS
    one = Request(prompt.astype(np.int32), -1, sampling, (), stop_ids=ids, ends=ends)
    keys = [(Stream.EVALUATION, 0, seed, i, 0) for i in range(call.num_samples)]
    requests = [one._replace(key=key) for key in keys]
    if call.target_prompt_logprobs is not None:
        targets = dense(call.target_prompt_logprobs, empty=-1)
        fits = targets.ndim == 2 and len(targets) == len(prompt) - 1
        if not fits or (targets.size and not -1 <= targets.min() <= targets.max() < vocabulary):
            what = f"[{len(prompt) - 1}, K] of tokens, or -1"
            raise BadInput(f"target_prompt_logprobs: expected {what}, got {list(targets.shape)}")
    if call.prompt_alt_tokens_k and len(prompt) * vocabulary > _MOST_DRAWN:
        most = _MOST_DRAWN // vocabulary
        raise BadInput(f"prompt_alt_tokens_k: expected a prompt of at most {most} tokens")
    return Asked(prompt, requests, call)


def _stops(stop: Any) -> tuple[tuple[str, ...], tuple[int, ...], bool]:
    """Texts and ids that end a sample, and whether the end token does."""
    many = [stop] if isinstance(stop, str) else [*(stop or ())]
    texts = tuple(one for one in many if isinstance(one, str))
    if len(many) > 64 or any(not text or len(text) > 1000 for text in texts):
        raise BadInput("stop: expected at most 64 texts of 1 to 1000 characters, or ids")
    return texts, tuple(int(one) for one in many if not isinstance(one, str)), stop != []


def scored(policy: Policy, asked: Asked, completions: Sequence[Completion]) -> Iterator[int]:
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
    if (given := call.target_prompt_logprobs) is not None:
        targets = dense(given, empty=-1)
        logprobs, (rows, columns) = np.zeros(targets.shape, np.float32), np.nonzero(targets >= 0)
        logprobs[rows, columns] = _forward(policy, ids, rows, targets[rows, columns])
        wire.write(message.target_prompt_logprobs, logprobs, np.float32, given)
        yield n
    if (k := call.prompt_alt_tokens_k) > 0:
        drawn, logprobs = _draws(policy, asked, k)
        wire.write(message.prompt_alt_tokens.tokens, drawn, np.int64)
        wire.write(message.prompt_alt_tokens.logprobs, logprobs, np.float32)
        yield n
    if (k := call.topk_sample_logprobs) > 0:
        for one, told in zip(completions, message.sequences, strict=True):
            whole, places = np.concatenate([prompt, one.ids]), n - 1 + np.arange(len(one.ids))
            heat = call.sampling_params.temperature or 1.0
            top = _top(policy, whole[:-1], places, one.ids, k, heat)
            wire.write_top(told.topk_sampled_logprobs, top)
            yield len(whole)
    return Answer(message.SerializeToString(), proto=True)


_NO_LOGPROB = -99999.0  # the SDK's mark of a position without likeliest tokens


def _forward(policy: Policy, ids: Any, at: Any, targets: Any) -> np.ndarray:
    if not len(targets):
        return np.zeros(0, np.float32)
    return learning.forward(policy, [Datum.of(0, ids, at, targets)])[0]


def _top(policy: Policy, ids: Any, at: Any, targets: Any, k: int, heat: float = 1.0) -> Top:
    if not len(targets):
        return np.zeros((0, k), np.int32), np.zeros((0, k), np.float32)
    [found] = learning.top(policy, [Datum.of(0, ids, at, targets, temperature=heat)], k)
    return found


def _draws(policy: Policy, asked: Asked, k: int) -> Top:
    """Draws tokens at each position of the prompt after the first, with their log-probs."""
    prompt, heat = asked.prompt, asked.call.sampling_params.temperature
    at, vocabulary = np.arange(len(prompt) - 1), policy.base.config.vocab_size
    ids, logprobs = _top(policy, prompt[:-1], at, prompt[1:], vocabulary)
    rng = np.random.default_rng(asked.requests[0].key[2])
    noise = rng.gumbel(size=(k, *logprobs.shape)) if heat else np.zeros((k, *logprobs.shape))
    best = (logprobs / (heat or 1.0) + noise).argmax(-1).T
    return tuple(np.take_along_axis(x, best, 1) for x in (ids, logprobs))  # type: ignore[return-value]


def snapshot(adapter: Adapter) -> Adapter:
    """An adapter without its optimiser."""
    return adapter._replace(moments=None, count=0)
