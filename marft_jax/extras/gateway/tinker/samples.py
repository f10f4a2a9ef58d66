"""Calls that sample: their promises, and saved weights in the slots of a running engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, cast

from starlette.concurrency import run_in_threadpool
from tinker import types

from marft_jax.errors import RunFailed
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.tinker import sampling, wire
from marft_jax.extras.gateway.tinker.adapters import BARE, Adapters
from marft_jax.extras.gateway.tinker.order import Worker, Working
from marft_jax.extras.gateway.tinker.sampling import Asked
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
        while not (idle := [own for own, slot in self._slots.items() if not self._open[slot]]):
            self._freed.clear()
            await self._freed.wait()
        adapter = await run_in_threadpool(self._store.load, weights.saved)
        slot, engine = self._slots.pop(idle[0]), cast(Any, self._batcher.sampler)
        self._slots[str(slot)] = slot  # nobody's, if this fails
        own = slot, adapter.factors, adapter.alpha / adapter.rank, weights.version
        await asyncio.wrap_future(self._batcher.between(lambda: engine.replace(*own)))
        self._slots[weights.version] = self._slots.pop(str(slot))


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
        call = wire.read_json(types.SampleRequest, body)
        sampler, digest = call.sampling_session_id, hashlib.sha256(body).digest()
        _, saved = self._sessions.sampler(sampler, owner)
        if call.seq_id is None:
            raise ApiError(422, "seq_id: expected a number, beside sampling_session_id")
        id = f"{sampler}/{call.seq_id}"
        if id not in self._open:
            self._make_room()
            asked, weights = self.read(call), self.content(saved)
            task = asyncio.create_task(self._answer(sampler, asked, weights))
            self._open[id] = _Sample(owner, digest, task)
        elif self._open[id].digest != digest:
            raise ApiError(409, f"seq_id: {id} was used before with another call")
        ids = [f"{id}/{i}" for i in range(call.num_samples)]
        return {"request_id": id, "sample_sequence_ids": ids}

    def read(self, call: types.SampleRequest) -> Asked:
        """Reads and checks a call; raises ``BadInput``."""
        return sampling.read(call, self._adapters.base.config.vocab_size, self._adapters.context)

    def content(self, saved: Saved | None) -> _Weights | None:
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
            id for id, one in self._open.items()
            if one.fetched or one.promise.done() and self._sessions.has_ended(id)
        ]  # fmt: skip
        for id in over[:-_KEPT]:
            del self._open[id]
        if len(self._open) >= _MOST_OPEN:
            raise ApiError(429, "too many calls wait; try again later")

    async def _answer(self, sampler: str, asked: Asked, weights: _Weights | None) -> bytes:
        try:
            completions = await self.draw(asked, weights)
            if not asked.scores:
                return wire.sampled(completions).SerializeToString()

            def work() -> Working:
                adapter, lora = None, BARE
                if weights is not None:
                    adapter, lora = self._store.load(weights.saved), weights.facts["lora"]
                policy = self._adapters.policy_of(adapter, lora)
                return (yield from sampling.scored(policy, asked, completions))

            promise = Future[bytes]()
            self._worker.submit(sampler, lambda: wire.answered(work()), promise)
            return await asyncio.wrap_future(promise)
        except (Exception, asyncio.CancelledError) as error:
            return wire.failed(error)

    async def draw(self, asked: Asked, weights: _Weights | None) -> Sequence[Completion]:
        """Samples with saved weights, or with the base."""
        async with self._slots.slot(weights) as slot:
            requests = [one._replace(owner=slot) for one in asked.requests]
            parts = [asyncio.wrap_future(self._batcher.submit(one)) for one in requests]
            completions = await asyncio.gather(*parts)
        if weights is not None and any(one.version != weights.version for one in completions):
            raise RunFailed("the sampler had other weights; this is a fault of the server")
        return completions

    async def cancel(self, asked: Any, owner: str) -> None:
        """Drops a call that samples."""
        sample = self._open.get(str(asked.get("request_id")))
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
