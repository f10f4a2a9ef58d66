"""Sessions, models and saved weights as the API describes them; each owner sees its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from tinker import types

from marft_jax.extras.gateway.tinker.models import Model, Models
from marft_jax.extras.gateway.tinker.sessions import Sessions
from marft_jax.extras.gateway.tinker.store import KINDS, Saved, Store, expiry


class Listing(NamedTuple):
    """Verbs of the routes that list, describe and delete."""

    models: Models
    sessions: Sessions
    store: Store

    def capabilities(self, asked: Any, owner: str) -> dict[str, Any]:
        adapters = self.models.adapters
        own = {"max_context_length": adapters.context, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": name, **own} for name in adapters.names]}

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
