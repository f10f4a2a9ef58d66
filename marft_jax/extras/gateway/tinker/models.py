"""Models of clients: adapters of their own over one shared base, and the calls that train them."""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, cast

import numpy as np
from jax.sharding import Mesh
from tinker import types

from marft_jax import learning
from marft_jax.errors import BadInput
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.tinker import passes, wire
from marft_jax.extras.gateway.tinker.order import Numbered, Worker
from marft_jax.extras.gateway.tinker.sampling import snapshot
from marft_jax.extras.gateway.tinker.store import EPHEMERAL, Saved, Store, check_name
from marft_jax.extras.gateway.tinker.wire import Answer, TinkerError
from marft_jax.interop import peft
from marft_jax.learning import Adapter
from marft_jax.learning.gradients import Sums
from marft_jax.learning.policy import Policy, on_base
from marft_jax.models.decoder import DecoderConfig
from marft_jax.models.weights.load import BaseModel

ALPHA = 32.0  # of every rank, as in the API
LADDER = (4, 8, 16, 32, 64, 128)  # ranks that passes are compiled for; others are filled with zeros
_SAVED = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}
TRAINS = ("rank", "train_attn", "train_mlp", "train_unembed")
_TTL = 3600, 315_360_000
_RESIDENT = 64  # models whose adapters stay in memory
_MOST_WAITING = 1024  # calls of a model, not done

CALLS = {
    "forward_backward": None,
    "optim_step": types.OptimStepRequest,
    "save_weights": types.SaveWeightsRequest,
    "save_weights_for_sampler": types.SaveWeightsForSamplerRequest,
    "save_weights_external": types.SaveWeightsExternalRequest,
    "load_weights": types.LoadWeightsRequest,
}
"""Numbered calls of a model, with what their JSON bodies are; None: the body is protobuf."""


class _Call(NamedTuple):
    kind: str
    request: Any

    @classmethod
    def of(cls, kind: str, body: bytes) -> _Call:
        read = wire.read_pass(body) if CALLS[kind] is None else wire.read_json(CALLS[kind], body)
        return cls(kind, read)


@dataclasses.dataclass
class Model:
    """A client's model.

    Attributes:
        facts: what is known of it, as on the disk.
        policy: its adapter in a slot of its own; None while it is on the disk.
        sums: gradients since its last step.
        promises: results of its calls, by number.
    """

    facts: dict[str, Any]
    policy: Policy | None = None
    sums: Sums | None = None
    numbers: Numbered[_Call] = dataclasses.field(default_factory=Numbered)
    promises: dict[int, Future[Answer]] = dataclasses.field(default_factory=dict)
    used: float = 0.0
    lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)

    @property
    def id(self) -> str:
        return self.facts["model_id"]


def targets_of(config: DecoderConfig, lora: types.LoraConfig) -> tuple[str, ...]:
    """Matrices that a client's adapter has, as of ``--lora.targets``."""
    layers = config.layers
    parts = [layer.mixer for layer in layers] if lora.train_attn else []
    parts += [layer.mlp for layer in layers] if lora.train_mlp else []
    own = [m.target or name for part in parts for name, m in part.matrices().items()]
    return tuple(dict.fromkeys(own + ["unembed"] * lora.train_unembed))


class Models:
    """All models of a server, and what trains them.

    Args:
        names: of the base, as clients call it.
        most: number of models.
        rank: the largest of an adapter.
        context: longest sequence, in tokens.
    """

    def __init__(
        self,
        base: BaseModel,
        mesh: Mesh,
        store: Store,
        worker: Worker,
        *,
        names: Sequence[str],
        most: int,
        rank: int,
        context: int,
    ) -> None:
        self.base, self.names, self.rank, self.context = base, tuple(names), rank, context
        self._mesh, self._store, self._worker, self._most = mesh, store, worker, most
        self._empty = dict[tuple[int, tuple[str, ...]], Policy]()
        self._lock = threading.RLock()
        self.all = {id: self._restored(facts) for id, facts in store.models().items()}

    def _restored(self, facts: dict[str, Any]) -> Model:
        """A model from the disk; calls that were promised and not done are done now."""
        model = Model(facts, numbers=Numbered(facts["number"]))
        for number, kind, body in self._store.calls(model.id):
            model.numbers.note(number, kind.encode() + body)
            if number > facts["number"]:
                self._take(model, number, _Call.of(kind, body))
        return model

    def find(self, id: str | None, owner: str) -> Model:
        """Finds a model of an owner; raises ``TinkerError``, 404."""
        model = self.all.get(id or "")
        if model is None or model.facts["owner"] != owner:
            raise TinkerError(404, f"model_id: there is no model {id!r:.120}")
        return model

    def check_base(self, name: str | None) -> str:
        """Returns the name of a base that is served; raises ``TinkerError``, 400."""
        if name not in self.names:
            what = f"base_model: expected one of {', '.join(self.names)}, got {name!r:.120}"
            raise TinkerError(400, f"{what}; the server's --names adds names of its base")
        return name

    def create(self, request: Any, owner: str, saved: Saved | None = None) -> str:
        """Makes a model, new or of saved weights, which is on the disk then; returns its id.

        Args:
            request: ``CreateModelRequest``, or ``LoadWeightsRequest`` with the weights.
        """
        if request.optimizer_config is not None and request.optimizer_config.type != "adamw":
            raise TinkerError(400, f"{request.optimizer_config!r:.60}: not offered; use adamw")
        id, base = f"{request.session_id}:train:{request.model_seq_id}", request.base_model
        facts = {"model_id": id, "owner": owner, "session": request.session_id}
        if saved is None:
            facts |= self._check_lora(request.lora_config)
        else:
            of_weights = self._store.facts(saved)
            base = base or of_weights["base_model"]
            facts |= {key: of_weights[key] for key in TRAINS}
            facts |= {"loaded": saved.path, "optimizer": request.optimizer}
        facts |= {"base_model": self.check_base(base), "user_metadata": request.user_metadata}
        with self._lock:
            if (known := self.all.get(id)) is not None:
                if any(known.facts.get(key) != value for key, value in facts.items()):
                    raise TinkerError(
                        409, f"model_seq_id: {id} was made before with other settings"
                    )
                return id
            if len(self.all) >= self._most:
                raise TinkerError(400, f"expected at most {self._most} models; see --models")
            if saved is None:
                adapter = self._draw(facts)
            else:
                adapter = self._loaded(saved, request.optimizer)
            facts["created"] = time.time()
            self._store.write_state(id, 0, adapter, facts)
            self.all[id] = Model(facts, self.policy_of(adapter, facts), used=time.time())
        return id

    def _check_lora(self, lora: types.LoraConfig | None) -> dict[str, Any]:
        if lora is None:
            raise TinkerError(400, "lora_config: expected one; full fine-tuning is not offered")
        if not 1 <= lora.rank <= self.rank:
            raise TinkerError(400, f"rank: expected 1 to {self.rank} (--rank), got {lora.rank}")
        if not targets_of(self.base.config, lora):
            raise TinkerError(400, "expected train_attn, train_mlp or train_unembed")
        return lora.model_dump(include={*TRAINS, "seed"})

    def _draw(self, facts: dict[str, Any]) -> Adapter:
        given, lora = facts["seed"], types.LoraConfig(**{key: facts[key] for key in TRAINS})
        seed = secrets.randbelow(1 << 31) if given is None else given % (1 << 32)
        targets = targets_of(self.base.config, lora)
        how = {"rank": lora.rank, "alpha": ALPHA, "targets": targets}
        return learning.fresh(self.empty(lora.rank, targets), **how, seed=seed)

    def _loaded(self, saved: Saved, optimizer: bool) -> Adapter:
        adapter = self._store.load(saved)
        if not optimizer:
            return snapshot(adapter)
        if adapter.moments is None:
            raise TinkerError(400, f"{saved.path}: it has no optimizer; load weights of save_state")
        return adapter

    def empty(self, rank: int, targets: Sequence[str]) -> Policy:
        """A policy with one free slot, for adapters of this rank or less."""
        key = next(r for r in LADDER if r >= rank), tuple(targets)
        if key not in self._empty:
            how = {"room": 1, "rank": key[0], "targets": key[1]}
            self._empty[key] = on_base(self.base, self._mesh, **how)
        return self._empty[key]

    def policy_of(self, adapter: Adapter, facts: dict[str, Any]) -> Policy:
        """A policy with this adapter, which was trained as the facts say."""
        lora = types.LoraConfig(**{key: facts[key] for key in TRAINS})
        empty = self.empty(lora.rank, targets_of(self.base.config, lora))
        return learning.add(empty, 0, adapter)

    def bare(self) -> Policy:
        """A policy that is the base."""
        empty = self.empty(1, targets_of(self.base.config, types.LoraConfig(rank=1))[:1])
        return learning.add(empty, 0, learning.fresh(empty, rank=1, alpha=1.0))

    def call(self, kind: str, body: bytes, owner: str) -> dict[str, Any]:
        """Takes a numbered call; returns its promise. The call is on the disk then.

        Raises:
            TinkerError: no such model, no such number, or a body that cannot be read.
        """
        call = _Call.of(kind, body)
        model, number = self.find(call.request.model_id, owner), call.request.seq_id
        if number is None:
            raise TinkerError(422, "seq_id: expected a number")
        with model.lock:
            if not model.numbers.is_repeated(number, content := kind.encode() + body):
                if sum(not one.done() for one in model.promises.values()) >= _MOST_WAITING:
                    raise TinkerError(429, "too many calls wait; try again later")
                self._store.write_call(model.id, number, kind, body)
                model.numbers.note(number, content)
                self._take(model, number, call)
        return {"request_id": f"{model.id}/{number}", "model_id": model.id}

    def _take(self, model: Model, number: int, call: _Call) -> None:
        model.promises[number] = Future()
        for n, one in model.numbers.ready(number, call):
            work = lambda n=n, one=one: self._work(model, n, one)  # noqa: E731
            self._worker.submit(model.id, work)
        for old in [n for n in model.promises if n < number - 256 and model.promises[n].done()]:
            del model.promises[old]

    def promise(self, model: Model, number: int) -> Future[Answer]:
        """The result of a call; raises ``TinkerError``, 410, where it is not kept any more."""
        if (future := model.promises.get(number)) is not None:
            return future
        if (kept := self._store.read_answer(model.id, number)) is None:
            raise TinkerError(
                410, f"the result of call {number} of {model.id} is not kept any more"
            )
        future = Future[Answer]()
        future.set_result(kept)
        return future

    def _work(self, model: Model, number: int, call: _Call) -> Iterator[int]:
        """Does a call; its result is on the disk before the state that follows, and both are before
        anybody is told."""
        model.used, steps = time.time(), call.kind in ("optim_step", "load_weights")
        result = None
        if call.kind.startswith("save") or getattr(call.request, "forward_only", False):
            result = self._store.read_answer(model.id, number)  # of before the server was killed
        try:
            if result is None:
                result = yield from getattr(self, f"_{call.kind}")(model, number, call.request)
        except (BadInput, ApiError) as error:
            result, steps = wire.failed(error, "user"), False
        except Exception as error:
            result, steps = wire.failed(error, "server"), False
        self._store.write_answer(model.id, number, result)
        if steps and self._store.durable:
            adapter = learning.take(self._policy(model), 0)
            self._store.write_state(model.id, number, adapter, model.facts)
        model.promises[number].set_result(result)

    def _policy(self, model: Model) -> Policy:
        """The adapter of a model, from the disk if need be; the least used make room."""
        if model.policy is None:
            model.policy = self.policy_of(self._store.read_state(model.id), model.facts)
        idle = [
            m for m in list(self.all.values()) if m.policy and m.sums is None and m is not model
        ]
        if self._store.durable and len(idle) >= _RESIDENT:
            min(idle, key=lambda m: m.used).policy = None
        return model.policy

    def _forward_backward(self, model: Model, number: int, asked: wire.Pass) -> Iterator[int]:
        examples = passes.read(asked, self.base.config.vocab_size, self.context)
        policy, sums = self._policy(model), model.sums
        model.sums = sums if asked.forward_only else None  # a pass that fails leaves half a sum
        model.sums, found = yield from passes.run(policy, sums, asked, examples)
        return wire.passed(found.logprobs, {"loss:sum": found.loss})

    def _optim_step(
        self, model: Model, number: int, request: types.OptimStepRequest
    ) -> Iterator[int]:
        own = request.optim_params
        if not isinstance(own, types.AdamParams):
            raise BadInput(f"optimizer {own.type!r:.40}: not offered; use AdamParams")
        if model.sums is None:
            raise BadInput("optim_step: expected a forward_backward since the last step, got none")
        _check_adam(own)
        how = learning.adam(
            own.learning_rate, b1=own.beta1, b2=own.beta2, eps=own.eps, decay=own.weight_decay,
            clip=own.grad_clip_norm or np.inf, always=True,
        )  # fmt: skip
        sums, model.sums = model.sums, None
        policy, [norm] = learning.optim_step(self._policy(model), sums, how)
        if not np.isfinite(norm):
            raise BadInput("the gradient is not finite, and no step was taken; see the losses")
        model.policy = policy
        yield 0
        return wire.answer(metrics={"unclipped_grad_l2:mean": float(norm)})

    def _load_weights(
        self, model: Model, number: int, request: types.LoadWeightsRequest
    ) -> Iterator[int]:
        if number != 1:
            raise BadInput("load_weights: expected as the first call of a model; create another")
        saved = Saved.of(request.path)
        facts = self._store.facts(saved)
        if facts["owner"] != model.facts["owner"]:
            raise TinkerError(404, f"there are no weights {saved.path}")
        if unlike := [key for key in TRAINS if facts[key] != model.facts[key]]:
            raise BadInput(
                f"{saved.path}: expected weights of {unlike[0]} {model.facts[unlike[0]]}, got "
                f"{facts[unlike[0]]}; create_training_client_from_state takes them as they are"
            )
        yield 0
        model.policy = self.policy_of(self._loaded(saved, request.optimizer), facts)
        return wire.answer(path=saved.path, model_id=model.id, type="load_weights")

    def _save_weights(self, model: Model, number: int, request: Any) -> Iterator[int]:
        """Saves weights of any kind: for training, for sampling with a name or without, or as a
        peft folder."""
        kind, name = _SAVED[request.type], request.path
        if kind == "sampler_weights" and name is None:
            if request.sampling_session_seq_id is None:
                raise BadInput("expected a path, or sampling_session_seq_id")
            kind = EPHEMERAL
        if getattr(request, "age_encryption_recipients", None):
            raise BadInput("age_encryption_recipients: not offered; encrypt the files yourself")
        saved = Saved(model.id, kind, check_name(f"{number:09}" if name is None else name))
        expires, there = check_ttl(request.ttl_seconds), self._store.place(saved).exists()
        if there and not getattr(request, "overwrite", False):
            if self._store.facts(saved).get("number") != number:
                raise BadInput(f"{saved.path} is there already; choose another name, or overwrite")
        facts = {key: model.facts[key] for key in ("owner", "base_model", *TRAINS)}
        facts |= {"number": number, "expires": expires}
        facts["user_metadata"] = getattr(request, "user_metadata", None)
        adapter, base = learning.take(self._policy(model), 0), self.base
        yield 0
        if kind == "external_weights":
            inside, spelling = peft.layers_in(base.source), dict(base.config.spelling)
            of_model = inside, base.config.layers_with, spelling
            factors = cast(peft.Factors, adapter.factors)
            with self._store.saving(saved, facts) as draft:
                peft.write(draft, factors, adapter.alpha, base.source, *of_model)
        else:
            adapter = adapter if kind == "weights" else snapshot(adapter)
            self._store.save(saved, adapter, facts)
        if kind != EPHEMERAL:
            return wire.answer(path=saved.path, type=request.type)
        sampler = f"{model.facts['session']}:sample:{request.sampling_session_seq_id}"
        self.on_sampler(sampler, model.facts["base_model"], saved)
        return wire.answer(sampling_session_id=sampler, type=request.type)

    _save_weights_for_sampler = _save_weights_external = _save_weights
    on_sampler: Callable[[str, str, Saved], None] = staticmethod(lambda *_: None)
    """Is told of a sampling session with weights without a name."""

    def described(self) -> list[dict[str, Any]]:
        """The base, by each of its names, as the API describes models."""
        own = {"max_context_length": self.context, "trainable": True, "sampleable": True}
        return [{"model_name": name, **own} for name in self.names]

    def info(self, model: Model) -> dict[str, Any]:
        """What ``get_info`` answers."""
        name = model.facts["base_model"]
        return {
            "type": "get_info", "model_id": model.id, "is_lora": True, "model_name": name,
            "lora_rank": model.facts["rank"], "optimizer_config": {"type": "adamw"},
            "model_data": {"arch": "decoder", "model_name": name},
        }  # fmt: skip


def check_ttl(seconds: Any) -> float | None:
    """When weights expire; raises ``TinkerError``, 400."""
    if seconds is None:
        return None
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, int)
        or not _TTL[0] <= seconds <= _TTL[1]
    ):
        raise TinkerError(400, f"ttl_seconds: expected {_TTL[0]} to {_TTL[1]}, got {seconds!r:.40}")
    return time.time() + seconds


def _check_adam(own: types.AdamParams) -> None:
    bounds = dict(beta1=(0, 1), beta2=(0, 1), eps=(0, 1e30), learning_rate=(-1e30, 1e30))
    bounds |= dict(weight_decay=(0, 1e30), grad_clip_norm=(0, 1e30))
    for name, (least, most) in bounds.items():
        if not least <= (value := getattr(own, name)) <= most or (most == 1 and value == 1):
            raise BadInput(f"{name}: expected {least} to {most}, got {value}")
