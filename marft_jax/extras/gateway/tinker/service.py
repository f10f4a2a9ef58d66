"""The service behind every caller: calls that sample, promises, and what is opened for them."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tinker import types

from marft_jax.config import Config, Rollout
from marft_jax.errors import BadInput, RunFailed, described
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.tinker import sampling, wire
from marft_jax.extras.gateway.tinker.checkpoints import Checkpoints
from marft_jax.extras.gateway.tinker.models import LADDER, Models
from marft_jax.extras.gateway.tinker.order import Worker
from marft_jax.extras.gateway.tinker.sampling import Asked, Slots
from marft_jax.extras.gateway.tinker.sessions import Sessions
from marft_jax.extras.gateway.tinker.store import Saved, Store
from marft_jax.extras.gateway.tinker.wire import Answer, TinkerError
from marft_jax.learning.policy import Policy
from marft_jax.models.lora import ALL_LINEAR, UNEMBED
from marft_jax.parallel.mesh import local_mesh
from marft_jax.run.models import load_onto, open_devices
from marft_jax.run.samplers import Shape, engine_on
from marft_jax.sampling.batcher import Batcher
from marft_jax.sampling.protocol import Completion
from marft_jax.team.bases import context_of
from marft_jax.types import MAIN

_MOST_SAMPLES = 4096  # calls that sample, unanswered or not fetched
_KEPT = 1024  # fetched results that may be fetched once more


class Sample:
    """A call that samples, and its promise."""

    def __init__(self, owner: str, content: bytes, sampler: str) -> None:
        self.owner, self.digest, self.sampler = owner, hashlib.sha256(content).digest(), sampler
        self.future: Future[Answer] = Future()
        self.parts: list[Future[Completion]] = []
        self.fetched = False


class Service:
    """Answers the calls of all clients. Its methods may be called in any thread.

    Args:
        slots: of saved weights that are sampled with at the same time.
    """

    def __init__(
        self, models: Models, store: Store, worker: Worker, batcher: Batcher, slots: int
    ) -> None:
        self.models, self.store, self._worker, self._batcher = models, store, worker, batcher
        self.slots = Slots(batcher, slots, lambda weights: store.load(Saved(*weights[:3])))
        self.sessions = Sessions(models, store)
        self.sessions.on_end = self._forget
        self.checkpoints = Checkpoints(models, self.sessions, store)
        self._samples: OrderedDict[str, Sample] = OrderedDict()
        self._lock = threading.RLock()

    @property
    def alive(self) -> bool:
        return self._batcher.alive

    def create_sampler(
        self, request: types.CreateSamplingSessionRequest, owner: str
    ) -> dict[str, Any]:
        """Begins a sampling session."""
        self.sessions.find(request.session_id, owner)
        id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        weights = self.checkpoints.weights(request.base_model, request.model_path, owner)
        self.sessions.new_sampler(id, *weights)
        return {"type": "create_sampling_session", "sampling_session_id": id}

    def sample(self, body: bytes, owner: str) -> dict[str, Any]:
        """Takes a call that samples; returns its promise.

        Raises:
            TinkerError: no such sampler or weights, too much at once, or an unreadable call.
            BadInput: a field that is not possible here.
        """
        call = wire.read_json(types.SampleRequest, body)
        facts, id = self.sessions.sampler(call.sampling_session_id, owner), call.sampling_session_id
        saved = facts["weights"] and Saved(*facts["weights"])
        if call.seq_id is None:
            raise TinkerError(422, "seq_id: expected a number, beside sampling_session_id")
        sample, id = Sample(owner, body, f"{id}"), f"{id}/{call.seq_id}"
        promise: dict[str, Any] = {"request_id": id}
        promise["sample_sequence_ids"] = [f"{id}/{i}" for i in range(call.num_samples)]
        with self._lock:
            if (known := self._samples.get(id)) is not None:
                if known.digest != sample.digest:
                    raise TinkerError(409, f"seq_id: {id} was used before with another call")
                return promise
            self._make_room()
            asked, weights = self.read(call), self.content(saved)
            sample.parts = self.slots.submit(weights, asked.requests)
            self._samples[id] = sample
        left = [len(sample.parts)]

        def one_done(_: Any) -> None:
            with self._lock:
                left[0] -= 1
                last = not left[0]
            if last:
                self._sampled(sample, asked, saved)

        for part in sample.parts:
            part.add_done_callback(one_done)
        return promise

    def read(self, call: types.SampleRequest) -> Asked:
        """Reads and checks a call; raises ``BadInput``."""
        models = self.models
        return sampling.read(call, models.base.config.vocab_size, models.context)

    def content(self, saved: Saved | None) -> sampling.Weights:
        """Names what saved weights are now; raises ``TinkerError``, 404, if they are deleted."""
        if saved is None:
            return None
        try:
            return (*saved, str(self.store.facts(saved)["time"]))
        except TinkerError:
            what = "it was the snapshot of an older step; sample from a newer one, or save by name"
            raise TinkerError(404, f"{saved.path} is deleted: {what}") from None

    def _forget(self, session: str) -> None:
        """Drops results of a session that has ended."""
        with self._lock:
            for id, one in list(self._samples.items()):
                if one.sampler.startswith(session) and one.future.done():
                    del self._samples[id]

    def _make_room(self) -> None:
        fetched = [id for id, one in self._samples.items() if one.fetched]
        for id in fetched[:-_KEPT]:
            del self._samples[id]
        if len(self._samples) - len(fetched) >= _MOST_SAMPLES:
            raise TinkerError(429, "too many calls wait; try again later")

    def _sampled(self, sample: Sample, asked: Asked, saved: Saved | None) -> None:
        """Answers a call whose samples are all there, after the learner has scored it."""
        try:
            completions = [part.result() for part in sample.parts]
        except BaseException as error:  # cancelled, too
            return sample.future.set_result(wire.failed(RunFailed(described(error)), "server"))
        if not asked.scores:
            body = wire.sampled(completions).SerializeToString()
            return sample.future.set_result(Answer(body, proto=True))

        def work() -> Iterator[int]:
            return (yield from sampling.scored(self._policy(saved), asked, completions))

        def answered(done: Future[Answer]) -> None:
            error = done.exception()
            usual = "user" if isinstance(error, BadInput | ApiError) else "server"
            failed = isinstance(error, Exception) and wire.failed(error, usual)
            sample.future.set_result(failed or done.result())

        self._worker.submit(sample.sampler, work).add_done_callback(answered)

    def _policy(self, saved: Saved | None) -> Policy:
        if saved is None:
            return self.models.bare()
        return self.models.policy_of(self.store.load(saved), self.store.facts(saved))

    def cancel(self, asked: Any, owner: str) -> None:
        """Drops a call that samples."""
        sample = self._samples.get(str(asked.get("request_id")))
        if sample is not None and sample.owner == owner:
            for part in sample.parts:
                part.cancel()

    def promise(self, id: str, owner: str) -> Future[Answer]:
        """The result of a promise.

        Raises:
            TinkerError: 410 for one that is lost: samples of a server that was started again.
        """
        model, _, number = id.rpartition("/")
        if model in self.models.all:
            own = self.models.find(model, owner)
            if number == "create":
                return _done(wire.answer(model_id=own.id, type="create_model"))
            if number == "load":
                path = own.facts.get("loaded")
                return _done(wire.answer(model_id=own.id, path=path, type="load_weights"))
            return self.models.promise(own, int(number) if number.isdecimal() else -1)
        with self._lock:
            sample = self._samples.get(id)
            if sample is None or sample.owner != owner:
                raise TinkerError(410, f"request_id: {id!r:.120} is not known any more")
            return sample.future

    def fetched(self, id: str) -> None:
        """Notes that a sample was fetched; it may be fetched again for a while."""
        if (sample := self._samples.get(id)) is not None:
            sample.fetched = True

    def finished(self, sampler: str, clone: int, owner: str) -> list[dict[str, Any]]:
        """Samples of a client of a sampling session that are done and not fetched."""
        self.sessions.sampler(sampler, owner)
        with self._lock:
            own = [x for x in self._samples.items() if x[1].sampler == sampler]
        return [
            {"state": "finished", "request_id": id}
            for id, one in own
            if one.future.done() and not one.fetched
            if int(id.rpartition("/")[2]) // 1_000_000_000 == clone
        ]

    def create_model(
        self, request: types.CreateModelRequest | types.LoadWeightsRequest, owner: str
    ) -> dict[str, Any]:
        """Makes a model: a new one, or of saved weights."""
        self.sessions.find(request.session_id, owner)
        if request.model_seq_id is None:
            raise TinkerError(422, "model_seq_id: expected a number, beside session_id")
        saved, what = None, "create"
        if isinstance(request, types.LoadWeightsRequest):
            saved, what = Saved.of(request.path), "load"
            self.checkpoints.facts(request.path, owner)
        id = self.models.create(request, owner, saved)
        return {"request_id": f"{id}/{what}", "model_id": id}


def _done(answer: Answer) -> Future[Answer]:
    future = Future[Answer]()
    future.set_result(answer)
    return future


@contextlib.contextmanager
def open_service(
    config: Config,
    folder: Path,
    *,
    names: Sequence[str] = (),
    durable: bool = True,
    models: int = 4096,
    samplers: int = 8,
    rank: int = 32,
    weights_bytes: int = 64 << 30,
) -> Iterator[Service]:
    """Opens a base with what trains and samples it.

    Args:
        folder: for models and saved weights.
        names: of the base, beside its own.
        durable: every step is on the disk before it is acknowledged.
        models, samplers, rank, weights_bytes: the most models, saved weights that are sampled with
            at the same time, rank, and bytes of saved weights.

    Raises:
        BadInput: settings or a model that do not fit.
    """
    if not 1 <= rank <= LADDER[-1]:
        raise BadInput(f"--rank: expected 1 to {LADDER[-1]}, got {rank}")
    if not isinstance(config.rollout, Rollout):
        raise BadInput("--rollout.sampler: expected engine; saved weights are sampled by it")
    devices = open_devices(config.mesh)
    base = load_onto(devices, config.model)
    context = context_of(MAIN, config.model, base.config.max_position)
    engine = engine_on(
        base,
        local_mesh(devices.playing),
        Shape(config.rollout.slots, config.rollout.chunk, context, context),
        adapters=samplers,
        rank=rank,
        targets=(ALL_LINEAR, "experts", UNEMBED),
    )
    worker, store = Worker(), Store(folder, durable, weights_bytes)
    known = [*dict.fromkeys([*names, config.model.base])]
    how = {"names": known, "most": models, "rank": rank, "context": context}
    all_models = Models(base, devices.learning, store, worker, **how)
    with Batcher(engine) as batcher:
        service = Service(all_models, store, worker, batcher, samplers)
        with worker:  # now begins what was promised before
            yield service
