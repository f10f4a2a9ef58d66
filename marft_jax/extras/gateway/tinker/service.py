"""What is opened for the clients of a base, and what the API lists: each owner sees its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tinker import types

from marft_jax.errors import BadInput
from marft_jax.extras.gateway.tinker.adapters import LADDER, Adapters
from marft_jax.extras.gateway.tinker.models import Model, Models
from marft_jax.extras.gateway.tinker.order import Worker
from marft_jax.extras.gateway.tinker.samples import Samples
from marft_jax.extras.gateway.tinker.sessions import Sessions
from marft_jax.extras.gateway.tinker.store import KINDS, Saved, Store, expiry
from marft_jax.models.lora import ALL_LINEAR, UNEMBED
from marft_jax.run.models import load_onto, open_devices
from marft_jax.run.samplers import Shape, engine_on
from marft_jax.sampling.batcher import Batcher
from marft_jax.settings.config import Config, Rollout
from marft_jax.team.bases import context_of
from marft_jax.types import MAIN

_PAGE = {"offset": 0, "limit": 100}


class Service(NamedTuple):
    """All that answers calls. Its methods, and those of its parts, may be called in any thread."""

    adapters: Adapters
    store: Store
    sessions: Sessions
    models: Models
    samples: Samples

    def promise(self, id: str, owner: str) -> asyncio.Future[bytes]:
        """The result of a promise; raises ``ApiError``, 410, where it is not kept any more."""
        model, _, number = id.rpartition("/")
        if model not in self.models.all:
            return self.samples.promise(id, owner)
        number = int(number) if number.isdecimal() else -1
        return asyncio.wrap_future(self.models.promise(self.models.find(model, owner), number))

    def capabilities(self, query: Any, owner: str) -> dict[str, Any]:
        facts = {"trainable": True, "sampleable": True}
        facts |= {"max_context_length": self.adapters.context}
        return {"supported_models": [{"model_name": name, **facts} for name in self.adapters.names]}

    def info(self, request: types.GetInfoRequest, owner: str) -> dict[str, Any]:
        facts = self.models.find(request.model_id, owner).facts
        name = facts["base_model"]
        return {
            "type": "get_info", "model_id": request.model_id, "is_lora": True, "model_name": name,
            "lora_rank": facts["lora"]["rank"], "optimizer_config": {"type": "adamw"},
            "model_data": {"arch": "decoder", "model_name": name},
        }  # fmt: skip

    def list_sessions(self, query: Any, owner: str) -> dict[str, Any]:
        ids = [id for id, facts in [*self.sessions.all.items()] if facts["owner"] == owner]
        return {"sessions": _page(query, ids[::-1])[0]}

    def session(self, query: Any, owner: str) -> dict[str, Any]:
        facts = self.sessions.find(query["session"], owner)
        runs = [id for id in [*self.models.all] if id.startswith(f"{query['session']}:")]
        named = {key: facts[key] for key in ("user_metadata", "display_name")}
        return {**named, "training_run_ids": runs, "sampler_ids": [*facts["samplers"]]}

    def sampler(self, query: Any, owner: str) -> dict[str, Any]:
        base, saved = self.sessions.sampler(query["sampler"], owner)
        path = saved and saved.path
        return {"sampler_id": query["sampler"], "base_model": base, "model_path": path}

    def weights(self, query: Any, owner: str) -> dict[str, Any]:
        """What a client has to know to load weights."""
        facts = self.store.facts(Saved.of(str(query.get("tinker_path"))), owner)
        lora = {**facts["lora"]}
        rank = lora.pop("rank")
        return {"base_model": facts["base_model"], "is_lora": True, "lora_rank": rank, **lora}

    def delete(self, query: Any, owner: str) -> None:
        self.store.facts(saved := saved_of(query), owner)
        self.store.delete(saved)

    def set_ttl(self, query: Any, owner: str) -> None:
        facts, expires = self.store.facts(saved_of(query), owner), expiry(query.get("ttl_seconds"))
        self.store.write_facts(saved_of(query), {**facts, "expires": expires})

    def checkpoints(self, query: Any, owner: str) -> dict[str, Any]:
        """Saved weights of a model, or of an owner, newest first."""
        if (run := query.get("run")) is not None:
            return {"checkpoints": self._checkpoints(self.models.find(run, owner).id, owner)}
        rows, cursor = _page(query, self._checkpoints("*", owner))
        return {"checkpoints": rows, "cursor": cursor}

    def _checkpoints(self, models: str, owner: str) -> list[dict[str, Any]]:
        return [
            {
                "checkpoint_id": f"{saved.kind}/{saved.name}", "tinker_path": saved.path,
                "checkpoint_type": KINDS[saved.kind], "time": stamp(facts["time"]),
                "size_bytes": facts["size_bytes"], "user_metadata": facts["user_metadata"],
                "expires_at": facts["expires"] and stamp(facts["expires"]),
            }
            for saved, facts in reversed(self.store.listed(models)) if facts["owner"] == owner
        ]  # fmt: skip

    def runs(self, query: Any, owner: str) -> dict[str, Any]:
        """Models of an owner, newest first."""
        models = [m for m in [*self.models.all.values()] if m.facts["owner"] == owner]
        rows, cursor = _page(query, sorted(models, key=lambda m: -m.facts["created"]))
        return {"training_runs": [self._run(model) for model in rows], "cursor": cursor}

    def run(self, query: Any, owner: str) -> dict[str, Any]:
        return self._run(self.models.find(query["run"], owner))

    def _run(self, model: Model) -> dict[str, Any]:
        facts = model.facts
        saved = reversed(self._checkpoints(model.id, facts["owner"]))
        last = {checkpoint["checkpoint_type"]: checkpoint for checkpoint in saved}
        return {
            "training_run_id": model.id, "base_model": facts["base_model"], "is_lora": True,
            "model_owner": facts["owner"], "lora_rank": facts["lora"]["rank"],
            "user_metadata": facts["user_metadata"],
            "last_request_time": stamp(model.used or facts["created"]),
            "last_checkpoint": last.get("training"), "last_sampler_checkpoint": last.get("sampler"),
        }  # fmt: skip


def stamp(seconds: float) -> str:
    """A time as the API writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def saved_of(query: Any) -> Saved:
    return Saved.of(f"tinker://{query['run']}/{query['kind']}/{query['name']}")


def _page(query: Any, rows: Sequence[Any]) -> tuple[Sequence[Any], dict[str, int]]:
    """A page of rows, as a query asks for, and where it stands."""
    sent = [(str(query.get(name, "")), default) for name, default in _PAGE.items()]
    offset, limit = (int(text) if text.isdecimal() else default for text, default in sent)
    cursor = {"offset": offset, "limit": min(limit, 1000), "total_count": len(rows)}
    return rows[offset : offset + cursor["limit"]], cursor


@contextlib.contextmanager
def open_service(
    config: Config,
    folder: Path,
    *,
    names: Sequence[str] = (),
    models: int = 4096,
    samplers: int = 8,
    rank: int = 32,
    weights_bytes: int = 64 << 30,
) -> Iterator[Service]:
    """Opens a base with what trains and samples it. At the end, unanswered samples are dropped;
    training calls that are not done are on the disk.

    Args:
        folder: for models and saved weights.
        names: of the base, beside its own.
        models, samplers, rank, weights_bytes: the most models, saved weights that are sampled with
            at the same time, rank, and bytes of saved weights.

    Raises:
        BadInput: settings or a model that do not fit.
    """
    if not 1 <= rank <= LADDER[-1]:
        raise BadInput(f"--rank: expected 1 to {LADDER[-1]}, got {rank}")
    if not isinstance(config.rollout, Rollout):
        raise BadInput("--rollout.sampler: expected engine; saved weights are sampled by it")
    store = Store(folder, weights_bytes)
    devices = open_devices(config.mesh)
    base = load_onto(devices, config.model)
    context = context_of(MAIN, config.model, base.config.max_position)
    engine = engine_on(
        base,
        devices.playing.local_mesh,
        Shape(config.rollout.slots, config.rollout.chunk, context, context),
        adapters=samplers,
        rank=rank,
        targets=(ALL_LINEAR, "experts", UNEMBED),
    )
    known = [*dict.fromkeys([*names, config.model.base])]
    adapters = Adapters(base, devices.learning, names=known, rank=rank, context=context)
    worker, sessions = Worker(), Sessions(store)
    with contextlib.closing(store), Batcher(engine) as batcher:
        all_models = Models(adapters, store, sessions, worker, models)
        samples = Samples(adapters, store, sessions, worker, batcher, samplers)
        with worker:  # now begins what was promised before
            yield Service(adapters, store, sessions, all_models, samples)
