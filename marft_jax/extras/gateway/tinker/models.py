"""Models of clients, and the numbered calls that train and save them."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
from tinker import types

from marft_jax import policy as verbs
from marft_jax.errors import BadInput, RunFailed
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.tinker import passes, wire
from marft_jax.extras.gateway.tinker.adapters import Adapters
from marft_jax.extras.gateway.tinker.order import Numbered, Worker, Working
from marft_jax.extras.gateway.tinker.sessions import Sessions
from marft_jax.extras.gateway.tinker.store import ADAPTER, EPHEMERAL, LOST, Saved, Store, expiry
from marft_jax.policy import Adapter
from marft_jax.policy.gradients import GradientSums
from marft_jax.policy.optimiser import Adam
from marft_jax.policy.policy import Policy

_RESIDENT = 64  # models whose adapters stay in memory
_SAVED = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}
CALLS = {
    "optim_step": types.OptimStepRequest,
    "save_weights": types.SaveWeightsRequest,
    "save_weights_for_sampler": types.SaveWeightsForSamplerRequest,
    "save_weights_external": types.SaveWeightsExternalRequest,
    "load_weights": types.LoadWeightsRequest,
}
"""Numbered calls of a model with JSON bodies; those of a ``forward_backward`` are protobuf."""


@dataclasses.dataclass
class Model:
    """A client's model.

    Attributes:
        facts: what is known of it, as on the disk.
        policy: its adapter in a slot of its own; None while it is on the disk.
        sums: gradients since its last step.
    """

    facts: dict[str, Any]
    policy: Policy | None = None
    sums: GradientSums | None = None
    calls: Numbered = dataclasses.field(default_factory=Numbered)
    used: float = 0.0
    lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)

    @property
    def id(self) -> str:
        return self.facts["model_id"]


class Models:
    """All models of a server, and what trains them.

    Args:
        most: number of models.
    """

    def __init__(
        self, adapters: Adapters, store: Store, sessions: Sessions, worker: Worker, most: int
    ) -> None:
        self.adapters, self._store, self._sessions = adapters, store, sessions
        self._worker, self._most, self._lock = worker, most, threading.RLock()
        self.all = {facts["model_id"]: self._restored(facts) for facts in store.models()}

    def _restored(self, facts: dict[str, Any]) -> Model:
        """A model from the disk; calls that were promised and not done are done now."""
        model = Model(facts, calls=Numbered(facts["number"]))
        for number, kind, body in self._store.calls(model.id, after=facts["number"]):
            self._take(model, number, kind, body)
        return model

    def find(self, id: str | None, owner: str) -> Model:
        """Finds a model of an owner; raises ``ApiError``, 404."""
        model = self.all.get(id or "")
        if model is None or model.facts["owner"] != owner:
            raise ApiError(404, f"model_id: there is no model {id!r:.120}")
        return model

    def create(
        self, request: types.CreateModelRequest | types.LoadWeightsRequest, owner: str
    ) -> dict[str, Any]:
        """Makes a model, new or of saved weights; returns its promise. It is on the disk then."""
        self._sessions.find(request.session_id, owner)
        number, config = request.model_seq_id, request.optimizer_config
        if number is None or not 0 <= number < 10**9:
            raise ApiError(422, f"model_seq_id: expected a number from 0, got {number}")
        if config is not None and config.type != "adamw":
            raise ApiError(400, f"{config!r:.60}: not offered; use adamw")
        id = f"{request.session_id}:train:{number}"
        facts = {"model_id": id, "owner": owner, "user_metadata": request.user_metadata}
        if isinstance(request, types.CreateModelRequest):
            lora = self.adapters.check(request.lora_config)
            seed = request.lora_config and request.lora_config.seed
            facts |= {"base_model": request.base_model, "lora": lora, "seed": seed}
            facts["made"] = {"type": "create_model"}
            make = functools.partial(self.adapters.draw, lora, seed)
        else:
            saved = Saved.of(request.path)
            of_weights = self._store.facts(saved, owner)
            facts |= {"lora": of_weights["lora"], "optimizer": request.optimizer}
            facts["base_model"] = request.base_model or of_weights["base_model"]
            facts["made"] = {"type": "load_weights", "path": saved.path}
            make = functools.partial(self._loaded, saved, request.optimizer)
        self.adapters.check_base(facts["base_model"])
        with self._lock:
            if id not in self.all:
                if len(self.all) >= self._most:
                    raise ApiError(400, f"expected at most {self._most} models; see --models")
                adapter, whole = make(), {**facts, "created": time.time()}
                self._store.create_model(id, adapter, whole)
                policy = self.adapters.policy_of(adapter, facts["lora"])
                self.all[id] = Model(whole, policy, used=time.time())
            elif any(self.all[id].facts.get(key) != value for key, value in facts.items()):
                raise ApiError(409, f"model_seq_id: {id} was made before with other settings")
        return {"request_id": f"{id}/0", "model_id": id}

    def _loaded(self, saved: Saved, optimizer: bool) -> Adapter:
        adapter = self._store.load(saved)
        if not optimizer:
            return adapter._replace(moments=None, count=0)
        if adapter.moments is None:
            raise ApiError(400, f"{saved.path}: it has no optimizer; load weights of save_state")
        return adapter

    def call(self, kind: str, body: bytes, owner: str) -> dict[str, Any]:
        """Takes a numbered call; returns its promise. The call is on the disk then.

        Raises:
            ApiError: no such model, no such number, or a body that cannot be read.
        """
        request = self._read(kind, body)
        if kind == "load_weights" and request.session_id is not None:
            return self.create(request, owner)
        model, number = self.find(request.model_id, owner), request.seq_id
        if number is None:
            raise ApiError(422, "seq_id: expected a number")
        with model.lock:
            if not model.calls.is_repeated(number, kind.encode() + body):
                self._store.write_call(model.id, number, kind, body)
                self._take(model, number, kind, body)
        return {"request_id": f"{model.id}/{number}", "model_id": model.id}

    def _read(self, kind: str, body: bytes) -> Any:
        return wire.read_json(CALLS[kind], body) if kind in CALLS else wire.read_pass(body)

    def _take(self, model: Model, number: int, kind: str, body: bytes) -> None:
        work = functools.partial(self._work, model, number, kind, body)
        for ready, promise in model.calls.add(number, kind.encode() + body, work):
            self._worker.submit(model.id, ready, promise)

    def promise(self, model: Model, number: int) -> Future[bytes]:
        """The result of a call; raises ``ApiError``, 410, where it is not kept any more."""
        if (promise := model.calls.promise(number)) is not None:
            return promise
        made = wire.answer(model_id=model.id, **model.facts["made"])
        kept = made if number == 0 else self._store.read_answer(model.id, number)
        if kept is None:
            raise ApiError(410, f"the result of call {number} of {model.id} is not kept any more")
        promise = Future[bytes]()
        promise.set_result(kept)
        return promise

    def _work(self, model: Model, number: int, kind: str, body: bytes) -> Working:
        """Does a call; its result and the state that follows are on the disk before anybody is
        told. Where the disk fails, the call has failed and the gradient is dropped."""
        model.used, before = time.time(), model.policy
        try:
            model.policy = policy = self._policy(model)
            try:
                result = yield from self._done(model, policy, number, kind, body)
            except Exception as error:
                result = wire.failed(error)
            moved = None if model.policy is policy else verbs.take(model.policy, 0)
            self._store.write_answer(model.id, number, result, moved)
        except Exception as error:
            model.policy, model.sums = before, None
            self._store.lose(model.id, number)
            return wire.failed(error)
        return result

    def _policy(self, model: Model) -> Policy:
        """The adapter of a model, from the disk if need be; the least used make room."""
        idle = [m for m in [*self.all.values()] if m.policy and m.sums is None and m is not model]
        if len(idle) >= _RESIDENT:
            min(idle, key=lambda m: m.used).policy = None
        if model.policy is not None:
            return model.policy
        return self.adapters.policy_of(self._store.read_state(model.id), model.facts["lora"])

    def _done(self, model: Model, policy: Policy, number: int, kind: str, body: bytes) -> Working:
        """Does a call, unless it was done before the server was killed and leaves no state."""
        if kind == LOST:
            model.sums = None
            raise RunFailed("the disk of the server failed at this call")
        request = self._read(kind, body)
        if kind in _SAVED or getattr(request, "forward_only", False):
            if (known := self._store.read_answer(model.id, number)) is not None:
                return known
        if kind == "forward_backward":
            return (yield from self._forward_backward(model, policy, request))
        verb = self._save if kind in _SAVED else getattr(self, f"_{kind}")
        return verb(model, policy, number, request)

    def _forward_backward(self, model: Model, policy: Policy, call: wire.Pass) -> Working:
        examples = passes.read(call, self.adapters.base.config.vocab_size, self.adapters.context)
        sums = model.sums
        model.sums = sums if call.forward_only else None  # a pass that fails leaves half a sum
        model.sums, result = yield from passes.run(policy, sums, call, examples)
        return result

    def _optim_step(self, model: Model, policy: Policy, number: int, request: Any) -> bytes:
        adam = _adam(request.optim_params)
        if model.sums is None:
            raise BadInput("optim_step: expected a forward_backward since the last step, got none")
        sums, model.sums = model.sums, None
        moved, [norm] = verbs.optim_step(policy, sums, adam)
        if not np.isfinite(norm):
            raise BadInput("the gradient is not finite, and no step was taken; see the losses")
        model.policy = moved
        return wire.answer(metrics={"unclipped_grad_l2:mean": float(norm)})

    def _load_weights(self, model: Model, policy: Policy, number: int, request: Any) -> bytes:
        if number != 1:
            raise BadInput("load_weights: expected as the first call of a model; create another")
        saved, wanted = Saved.of(request.path), model.facts["lora"]
        if (lora := self._store.facts(saved, model.facts["owner"])["lora"]) != wanted:
            what = f"expected weights of {wanted}, got {lora}"
            raise BadInput(f"{saved.path}: {what}; create_training_client_from_state takes any")
        model.policy = self.adapters.policy_of(self._loaded(saved, request.optimizer), lora)
        return wire.answer(path=saved.path, model_id=model.id, type="load_weights")

    def _save(self, model: Model, policy: Policy, number: int, request: Any) -> bytes:
        """Saves weights of any kind: for training, for sampling with a name or without, or as a
        peft folder."""
        kind, seq_id = _SAVED[request.type], getattr(request, "sampling_session_seq_id", None)
        if getattr(request, "age_encryption_recipients", None):
            raise BadInput("age_encryption_recipients: not offered; encrypt the files yourself")
        name = f"{number:09}" if request.path is None else request.path
        if kind == "sampler_weights" and request.path is None:
            if seq_id is None:
                raise BadInput("expected a path, or sampling_session_seq_id")
            saved = Saved(model.id, EPHEMERAL, name)
        else:
            saved = Saved.of(f"tinker://{model.id}/{kind}/{name}")
        expires, there = expiry(request.ttl_seconds), self._store.place(saved).exists()
        if there and not getattr(request, "overwrite", False):
            if self._store.facts(saved)["number"] != number:
                raise BadInput(f"{saved.path} is there already; choose another name, or overwrite")
        facts = {key: model.facts[key] for key in ("owner", "base_model", "lora")}
        facts |= {"number": number, "expires": expires}
        facts["user_metadata"] = getattr(request, "user_metadata", None)
        adapter = verbs.take(policy, 0)
        with self._store.saving(saved, facts) as draft:
            if kind == "external_weights":
                self.adapters.write_peft(draft, adapter)
            else:
                bare = adapter._replace(moments=None, count=0)
                verbs.save(adapter if kind == "weights" else bare, draft / ADAPTER)
        if saved.kind != EPHEMERAL:
            return wire.answer(path=saved.path, type=request.type)
        sampler = f"{model.id.partition(':')[0]}:sample:{seq_id}"
        self._sessions.add_sampler(sampler, facts["base_model"], saved)
        return wire.answer(sampling_session_id=sampler, type=request.type)


_BOUNDS: Mapping[str, tuple[float, float]] = {
    "beta1": (0, np.nextafter(1, 0)), "beta2": (0, np.nextafter(1, 0)), "eps": (0, 1e30),
    "learning_rate": (-1e30, 1e30), "weight_decay": (0, 1e30), "grad_clip_norm": (0, 1e30),
}  # fmt: skip


def _adam(params: types.OptimParams) -> Adam:
    if not isinstance(params, types.AdamParams):
        raise BadInput(f"optimizer {params.type!r:.40}: not offered; use AdamParams")
    for name, (least, most) in _BOUNDS.items():
        if not least <= (value := getattr(params, name)) <= most:
            raise BadInput(f"{name}: expected {least} to {most:g}, got {value}")
    return verbs.adam(
        params.learning_rate, b1=params.beta1, b2=params.beta2, eps=params.eps,
        decay=params.weight_decay, clip=params.grad_clip_norm or np.inf, always=True,
    )  # fmt: skip
