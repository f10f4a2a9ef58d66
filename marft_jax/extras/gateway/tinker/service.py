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
from marft_jax.parallel.mesh import local_mesh
from marft_jax.run.models import load_onto, open_devices
from marft_jax.run.samplers import Shape, engine_on
from marft_jax.sampling.batcher import Batcher
from marft_jax.settings.config import Config, Rollout
from marft_jax.team.bases import context_of
from marft_jax.types import MAIN


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
        own = self.models.find(model, owner)
        kept = self.models.promise(own, int(number) if number.isdecimal() else -1)
        return asyncio.wrap_future(kept)

    def capabilities(self, asked: Any, owner: str) -> dict[str, Any]:
        own = {"trainable": True, "sampleable": True, "max_context_length": self.adapters.context}
        return {"supported_models": [{"model_name": name, **own} for name in self.adapters.names]}

    def info(self, request: types.GetInfoRequest, owner: str) -> dict[str, Any]:
        facts = self.models.find(request.model_id, owner).facts
        name = facts["base_model"]
        return {
            "type": "get_info", "model_id": request.model_id, "is_lora": True, "model_name": name,
            "lora_rank": facts["lora"]["rank"], "optimizer_config": {"type": "adamw"},
            "model_data": {"arch": "decoder", "model_name": name},
        }  # fmt: skip

    def list_sessions(self, asked: Any, owner: str) -> dict[str, Any]:
        own = [id for id, facts in [*self.sessions.all.items()] if facts["owner"] == owner]
        return {"sessions": _page(asked, own[::-1])[0]}

    def session(self, asked: Any, owner: str) -> dict[str, Any]:
        facts = self.sessions.find(asked["session"], owner)
        runs = [id for id in [*self.models.all] if id.startswith(f"{asked['session']}:")]
        told = {key: facts[key] for key in ("user_metadata", "display_name")}
        return {**told, "training_run_ids": runs, "sampler_ids": [*facts["samplers"]]}

    def sampler(self, asked: Any, owner: str) -> dict[str, Any]:
        base, saved = self.sessions.sampler(asked["sampler"], owner)
        told = {"sampler_id": asked["sampler"], "base_model": base}
        return {**told, "model_path": saved and saved.path}

    def weights(self, asked: Any, owner: str) -> dict[str, Any]:
        """What a client has to know to load weights."""
        facts = self.store.facts(Saved.of(str(asked.get("tinker_path"))), owner)
        lora = {**facts["lora"]}
        own = {"base_model": facts["base_model"], "is_lora": True, "lora_rank": lora.pop("rank")}
        return {**own, **lora}

    def delete(self, asked: Any, owner: str) -> None:
        self.store.facts(saved := saved_of(asked), owner)
        self.store.delete(saved)

    def set_ttl(self, asked: Any, owner: str) -> None:
        facts, expires = self.store.facts(saved_of(asked), owner), expiry(asked.get("ttl_seconds"))
        self.store.write_facts(saved_of(asked), {**facts, "expires": expires})

    def checkpoints(self, asked: Any, owner: str) -> dict[str, Any]:
        """Saved weights of a model, or of an owner, newest first."""
        if (run := asked.get("run")) is not None:
            return {"checkpoints": self._checkpoints(self.models.find(run, owner).id, owner)}
        rows, cursor = _page(asked, self._checkpoints("*", owner))
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

    def runs(self, asked: Any, owner: str) -> dict[str, Any]:
        """Models of an owner, newest first."""
        own = [m for m in [*self.models.all.values()] if m.facts["owner"] == owner]
        rows, cursor = _page(asked, sorted(own, key=lambda m: -m.facts["created"]))
        return {"training_runs": [self._run(model) for model in rows], "cursor": cursor}

    def run(self, asked: Any, owner: str) -> dict[str, Any]:
        return self._run(self.models.find(asked["run"], owner))

    def _run(self, model: Model) -> dict[str, Any]:
        facts = model.facts
        saved = reversed(self._checkpoints(model.id, facts["owner"]))
        last = {one["checkpoint_type"]: one for one in saved}
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


def saved_of(asked: Any) -> Saved:
    return Saved.of(f"tinker://{asked['run']}/{asked['kind']}/{asked['name']}")


def _page(asked: Any, rows: Sequence[Any]) -> tuple[Sequence[Any], dict[str, int]]:
    """A page of rows, as a query asks for, and where it stands."""
    given = [str(asked.get(name, "")) for name in ("offset", "limit")]
    offset, limit = (int(x) if x.isdecimal() else y for x, y in zip(given, (0, 100), strict=True))
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
        local_mesh(devices.playing),
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
