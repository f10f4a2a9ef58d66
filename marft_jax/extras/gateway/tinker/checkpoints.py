"""Saved weights and the models that they are of, as the API lists them."""

from __future__ import annotations

import shutil
import time
from typing import Any

from tinker import types

from marft_jax.extras.gateway.tinker.models import TRAINS, Models, check_ttl
from marft_jax.extras.gateway.tinker.sessions import Sessions, page
from marft_jax.extras.gateway.tinker.store import KINDS, Saved, Store
from marft_jax.extras.gateway.tinker.wire import TinkerError


class Checkpoints:
    """All saved weights of a server; each owner sees its own."""

    def __init__(self, models: Models, sessions: Sessions, store: Store) -> None:
        self._models, self._sessions, self._store = models, sessions, store

    def weights(self, base: str | None, path: str | None, owner: str) -> tuple[str, Saved | None]:
        if path is None:
            return self._models.check_base(base), None
        saved = Saved.of(path)
        if saved.kind == "external_weights":
            raise TinkerError(400, f"{path}: expected weights or sampler_weights")
        return self.facts(path, owner)["base_model"], saved

    def facts(self, path: str, owner: str) -> dict[str, Any]:
        """Facts of saved weights of an owner; raises ``TinkerError``, 404 as for none."""
        facts = self._store.facts(saved := Saved.of(path))
        if facts["owner"] != owner:
            raise TinkerError(404, f"there are no weights {saved.path}; they may be deleted")
        return facts

    def saved(self, asked: Any, owner: str) -> tuple[Saved, dict[str, Any]]:
        """Weights that a path names, with their facts."""
        path = f"tinker://{asked['run']}/{asked['kind']}/{asked['name']}"
        return Saved.of(path), self.facts(path, owner)

    def delete(self, asked: Any, owner: str) -> None:
        self._store.delete(self.saved(asked, owner)[0])

    def set_ttl(self, asked: Any, owner: str) -> None:
        saved, facts = self.saved(asked, owner)
        expires = check_ttl(asked.get("ttl_seconds"))
        self._store.write_facts(saved, {**facts, "expires": expires})

    def info(self, asked: Any, owner: str) -> dict[str, Any]:
        """What a client has to know to load weights."""
        facts = self.facts(str(asked.get("tinker_path")), owner)
        told = {key: facts[key] for key in ("base_model", *TRAINS) if key != "rank"}
        return {**told, "is_lora": True, "lora_rank": facts["rank"]}

    def copy(self, request: types.CopyWeightsRequest, owner: str) -> dict[str, Any]:
        """Copies weights to a new training run of a session."""
        if request.session_id is None or request.model_seq_id is None:
            raise TinkerError(400, "projects are not offered: expected session_id and model_seq_id")
        self._sessions.find(request.session_id, owner)
        facts, old = self.facts(request.source_path, owner), Saved.of(request.source_path)
        new = old._replace(model=f"{request.session_id}:train:{request.model_seq_id}")
        facts |= {"expires": check_ttl(request.ttl_seconds), "time": time.time()}
        with self._store.saving(new, facts) as draft:
            shutil.copytree(self._store.place(old), draft, dirs_exist_ok=True)
        return {"tinker_path": new.path}

    def listed(self, asked: Any, owner: str) -> dict[str, Any]:
        """Lists saved weights of a model, or of an owner, newest first."""
        run = asked.get("run")
        own = self._listed(run, owner)
        rows, cursor = page(asked, own) if run is None else (own, None)
        return {"checkpoints": rows, "cursor": cursor}

    def _listed(self, run: str | None, owner: str) -> list[dict[str, Any]]:
        return [
            {
                "checkpoint_id": f"{one['kind']}/{one['name']}", "tinker_path": one["path"],
                "checkpoint_type": KINDS[one["kind"]], "time": stamp(one["time"]),
                "size_bytes": one["size_bytes"], "user_metadata": one.get("user_metadata"),
                "expires_at": stamp(one["expires"]) if one.get("expires") else None,
            }
            for one in reversed(self._store.listed(run)) if one["owner"] == owner
        ]  # fmt: skip

    def runs(self, asked: Any, owner: str) -> dict[str, Any]:
        """Lists models of an owner, newest first."""
        own = [m for m in list(self._models.all.values()) if m.facts["owner"] == owner]
        own.sort(key=lambda m: -m.facts["created"])
        rows, cursor = page(asked, [m.id for m in own])
        return {"training_runs": [self.run(id, owner) for id in rows], "cursor": cursor}

    def run(self, id: str, owner: str) -> dict[str, Any]:
        """A model as a training run; raises ``TinkerError``, 404."""
        model = self._models.find(id, owner)
        last = {one["checkpoint_type"]: one for one in reversed(self._listed(id, owner))}
        facts = model.facts
        return {
            "training_run_id": id, "base_model": facts["base_model"], "model_owner": owner,
            "is_lora": True, "lora_rank": facts["rank"], "user_metadata": facts["user_metadata"],
            "last_request_time": stamp(model.used or facts["created"]),
            "last_checkpoint": last.get("training"), "last_sampler_checkpoint": last.get("sampler"),
        }  # fmt: skip


def stamp(seconds: float) -> str:
    """A time as the API writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
