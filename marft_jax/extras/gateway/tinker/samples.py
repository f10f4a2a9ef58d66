"""Calls that sample: their promises, and saved weights in the slots of a running engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, cast

from starlette.concurrency import run_in_threadpool
from tinker import types

from marft_jax.errors import RunFailed
from marft_jax.extras.gateway.answers import Choice
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.protocol import Call
from marft_jax.extras.gateway.served_team import choice_of_completion
from marft_jax.extras.gateway.tinker import sample_call, wire
from marft_jax.extras.gateway.tinker.adapters import BARE, Adapters
from marft_jax.extras.gateway.tinker.order import Worker, Working
from marft_jax.extras.gateway.tinker.sample_call import SampleCall
from marft_jax.extras.gateway.tinker.sessions import Sessions
from marft_jax.extras.gateway.tinker.store import Saved, Store
from marft_jax.sampling.batcher import Batcher
from marft_jax.sampling.protocol import Completion

_MOST_OPEN = 4096  # calls that are unanswered, or whose results may be fetched
_KEPT = 256  # results that were fetched and may be fetched once more


class _Weights(NamedTuple):
    """Saved weights with their facts."""

    saved: Saved
    facts: dict[str, Any]

    @property
    def version(self) -> str:
        return f"{self.saved.path} {self.facts['time']}"


class _Slots:
    """Saved weights in the slots of an engine's stack: while somebody samples with them they stay;
    of the others, those that were used least recently make room."""

    def __init__(self, batcher: Batcher, store: Store, size: int) -> None:
        self._batcher, self._store = batcher, store
        self._slots = OrderedDict((str(i), i) for i in range(size))  # by version; oldest first
        self._open, self._freed, self._turn = [0] * size, asyncio.Event(), asyncio.Lock()

    @contextlib.asynccontextmanager
    async def slot(self, weights: _Weights | None) -> AsyncIterator[int]:
        """Waits for a slot, in the order of the calls, and keeps these weights in it."""
        if weights is None:  # the base has none
            yield -1
            return
        async with self._turn:
            if weights.version not in self._slots:
                await self._load(weights)
            self._slots.move_to_end(weights.version)
            self._open[slot := self._slots[weights.version]] += 1
        try:
            yield slot
        finally:
            self._open[slot] -= 1
            self._freed.set()

    async def _load(self, weights: _Weights) -> None:
        while not (idle := [v for v, slot in self._slots.items() if not self._open[slot]]):
            self._freed.clear()
            await self._freed.wait()
        adapter = await run_in_threadpool(self._store.load, weights.saved)
        slot, engine = self._slots.pop(idle[0]), cast(Any, self._batcher.sampler)
        self._slots[str(slot)] = slot  # nobody's, if this fails
        scale, version = adapter.alpha / adapter.rank, weights.version
        replace = functools.partial(engine.replace, slot, adapter.factors, scale, version)
        await asyncio.wrap_future(self._batcher.run_between_steps(replace))
        self._slots[version] = self._slots.pop(str(slot))


@dataclasses.dataclass
class _Sample:
    """A call that samples."""

    owner: str
    digest: bytes
    promise: asyncio.Task[bytes]
    fetched: bool = False


class Samples:
    """Answers calls that sample, in the event loop of the server.

    Args:
        size: slots of saved weights that are sampled with at the same time.
    """

    def __init__(
        self,
        adapters: Adapters,
        store: Store,
        sessions: Sessions,
        worker: Worker,
        batcher: Batcher,
        size: int,
    ) -> None:
        self._adapters, self._store, self._sessions = adapters, store, sessions
        self._worker, self._batcher, self._slots = worker, batcher, _Slots(batcher, store, size)
        self._open = dict[str, _Sample]()

    @property
    def alive(self) -> bool:
        return self._batcher.alive

    def weights(self, base: str | None, path: str | None, owner: str) -> tuple[str, Saved | None]:
        """Base and saved weights that an owner names, if any; raises ``ApiError``."""
        if path is None:
            return self._adapters.check_base(base), None
        if (saved := Saved.of(path)).kind == "external_weights":
            raise ApiError(400, f"{path}: expected weights or sampler_weights")
        return self._store.facts(saved, owner)["base_model"], saved

    def create_sampler(
        self, request: types.CreateSamplingSessionRequest, owner: str
    ) -> dict[str, Any]:
        """Begins a sampling session."""
        self._sessions.find(request.session_id, owner)
        id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        weights = self.weights(request.base_model, request.model_path, owner)
        self._sessions.add_sampler(id, *weights)
        return {"type": "create_sampling_session", "sampling_session_id": id}

    async def call(self, body: bytes, owner: str) -> dict[str, Any]:
        """Takes a call that samples; returns its promise.

        Raises:
            ApiError: no such sampler or weights, too much at once, or an unreadable call.
            BadInput: a field that is not possible here.
        """
        sent = wire.read_json(types.SampleRequest, body)
        sampler, digest = sent.sampling_session_id, hashlib.sha256(body).digest()
        _, saved = self._sessions.sampler(sampler, owner)
        if sent.seq_id is None:
            raise ApiError(422, "seq_id: expected a number, beside sampling_session_id")
        id = f"{sampler}/{sent.seq_id}"
        if id not in self._open:
            self._make_room()
            call, weights = self._read(sent), self._content(saved)
            task = asyncio.create_task(self._answer(sampler, call, weights))
            self._open[id] = _Sample(owner, digest, task)
        elif self._open[id].digest != digest:
            raise ApiError(409, f"seq_id: {id} was used before with another call")
        ids = [f"{id}/{i}" for i in range(sent.num_samples)]
        return {"request_id": id, "sample_sequence_ids": ids}

    async def choices(self, call: Call, owner: str) -> list[Choice]:
        """Answers a call of OpenAI's API with saved weights of an owner, or with the base."""
        path = call.model if call.model.startswith("tinker://") else None
        _, saved = self.weights(None if path else call.model, path, owner)
        weights, settings = self._content(saved), {**call.sampling}
        tokenizer = self._adapters.base.tokenizer
        if call.tools or call.form or settings.pop("min_p", 0):
            what = "tools, response_format and min_p: not offered here; serve --api openai does"
            raise ApiError(400, what, code="unsupported_parameter")
        params = types.SamplingParams(
            temperature=settings.get("temperature", 1), top_p=settings.get("top_p", 1),
            max_tokens=settings.get("max_new_tokens"), top_k=settings.get("top_k") or -1,
            seed=call.seed, stop=[*call.stop] or None,
        )  # fmt: skip
        prompts = [
            tokenizer.encode(prompt, special=True) if isinstance(prompt, str) else [*prompt]
            for prompt in call.prompts
        ] or [tokenizer.chat(call.messages)]
        inputs = map(types.ModelInput.from_ints, prompts)
        common = {"sampling_params": params, "num_samples": call.n}
        calls = [self._read(types.SampleRequest(prompt=prompt, **common)) for prompt in inputs]
        drawn = await asyncio.gather(*(self._draw(sample, weights) for sample in calls))
        return [
            choice_of_completion(call, tokenizer, sample.requests[0], completion)
            for sample, completions in zip(calls, drawn, strict=True)
            for completion in completions
        ]

    def _read(self, sent: types.SampleRequest) -> SampleCall:
        base, context = self._adapters.base, self._adapters.context
        return sample_call.read(sent, base.config.vocab_size, context)

    def _content(self, saved: Saved | None) -> _Weights | None:
        """What saved weights are now; raises ``ApiError``, 404, if they are deleted."""
        if saved is None:
            return None
        try:
            return _Weights(saved, self._store.facts(saved))
        except ApiError:
            what = "it was of an older step; sample from a newer one, or save by name"
            raise ApiError(404, f"{saved.path} is deleted: {what}") from None

    def _make_room(self) -> None:
        """Drops results that nobody will fetch, but the newest; raises ``ApiError``, 429, if too
        many calls are left."""
        over = [
            id for id, sample in self._open.items()
            if sample.fetched or sample.promise.done() and self._sessions.has_ended(id)
        ]  # fmt: skip
        for id in over[:-_KEPT]:
            del self._open[id]
        if len(self._open) >= _MOST_OPEN:
            raise ApiError(429, "too many calls wait; try again later")

    async def _answer(self, sampler: str, call: SampleCall, weights: _Weights | None) -> bytes:
        try:
            completions = await self._draw(call, weights)
            if not call.scores:
                return wire.sampled(completions).SerializeToString()

            def work() -> Working:
                adapter, lora = None, BARE
                if weights is not None:
                    adapter, lora = self._store.load(weights.saved), weights.facts["lora"]
                policy = self._adapters.policy_of(adapter, lora)
                return (yield from sample_call.scored(policy, call, completions))

            promise = Future[bytes]()
            self._worker.submit(sampler, work, promise)
            return await asyncio.wrap_future(promise)
        except (Exception, asyncio.CancelledError) as error:
            return wire.failed(error)

    async def _draw(self, call: SampleCall, weights: _Weights | None) -> Sequence[Completion]:
        """Samples with saved weights, or with the base."""
        async with self._slots.slot(weights) as slot:
            requests = [request._replace(owner=slot) for request in call.requests]
            parts = [asyncio.wrap_future(self._batcher.submit(request)) for request in requests]
            completions = await asyncio.gather(*parts)
        if weights is not None and {c.version for c in completions} != {weights.version}:
            raise RunFailed("the sampler had other weights; this is a fault of the server")
        return completions

    async def cancel(self, query: Any, owner: str) -> None:
        """Drops a call that samples."""
        sample = self._open.get(str(query.get("request_id")))
        if sample is not None and sample.owner == owner:
            sample.promise.cancel()

    def promise(self, id: str, owner: str) -> asyncio.Task[bytes]:
        """The result of a call; raises ``ApiError``, 410, for one that is lost, as are those of a
        server that was started again."""
        sample = self._open.get(id)
        if sample is None or sample.owner != owner or sample.promise.cancelled():
            raise ApiError(410, f"request_id: {id!r:.120} is not known any more")
        return sample.promise

    def fetched(self, id: str) -> None:
        """Notes that a result was fetched; it may be fetched again for a while."""
        if id in self._open:
            self._open[id].fetched = True
