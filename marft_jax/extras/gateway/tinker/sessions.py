"""Sessions of clients, and the samplers that they begin in them."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from tinker import types

from marft_jax.extras.gateway.tinker.models import Models
from marft_jax.extras.gateway.tinker.store import EPHEMERAL, Saved, Store
from marft_jax.extras.gateway.tinker.wire import TinkerError

_SILENT_SECONDS = 600.0  # without a heartbeat, until a session ends


class Sessions:
    """All sessions of a server, which are on the disk.

    Attributes:
        all: what is known of each, by id.
    """

    def __init__(self, models: Models, store: Store) -> None:
        self._models, self._store, self.all = models, store, store.sessions()
        self._beats = dict.fromkeys(self.all, time.time())
        self._lock = threading.RLock()
        models.on_sampler = self.new_sampler

    def create(self, request: types.CreateSessionRequest, owner: str) -> dict[str, Any]:
        """Begins a session."""
        if request.project_id is not None:
            raise TinkerError(400, "project_id: projects are not offered; leave it out")
        session = str(uuid.uuid4())
        facts = {"owner": owner, "created": time.time(), "samplers": {}}
        facts |= request.model_dump(include={"tags", "user_metadata", "display_name"})
        self.all[session], self._beats[session] = facts, time.time()
        self._store.write_session(session, facts)
        return {"type": "create_session", "session_id": session}

    def find(self, session: str | None, owner: str) -> dict[str, Any]:
        """Facts of a session; raises ``TinkerError``, 404."""
        facts = self.all.get(session or "")
        if facts is None or facts["owner"] != owner:
            raise TinkerError(404, f"session_id: there is no session {session!r:.80}")
        return facts

    def beat(self, request: types.SessionHeartbeatRequest, owner: str) -> dict[str, Any]:
        """Keeps a session alive, and ends others that have been silent for long."""
        if self.find(request.session_id, owner).get("ended"):
            raise TinkerError(410, f"session {request.session_id} has ended")
        self._beats[request.session_id] = now = time.time()
        for session, facts in list(self.all.items()):
            if not facts.get("ended") and now - self._beats[session] > _SILENT_SECONDS:
                self._end(session)
        return {"type": "session_heartbeat"}

    def finish(self, asked: Any, owner: str) -> None:
        self.find(asked["session"], owner)
        self._end(asked["session"])

    def _end(self, session: str) -> None:
        """Ends a session: its weights without a name go, models and saved weights stay."""
        facts = self.all[session]
        facts["ended"] = True
        for id in self._models_of(session):
            for old in self._store.listed(id, EPHEMERAL):
                self._store.delete(Saved(id, EPHEMERAL, old["name"]))
        self.on_end(session)
        with self._lock:
            self._store.write_session(session, facts)

    on_end: Callable[[str], None] = staticmethod(lambda _: None)
    """Is told of a session that ends."""

    def _models_of(self, session: str) -> list[str]:
        return [id for id, m in list(self._models.all.items()) if m.facts["session"] == session]

    def listed(self, asked: Any, owner: str) -> dict[str, Any]:
        own = [id for id, facts in list(self.all.items()) if facts["owner"] == owner]
        return {"sessions": page(asked, own[::-1])[0]}

    def describe(self, asked: Any, owner: str) -> dict[str, Any]:
        facts = self.find(asked["session"], owner)
        told = {key: facts[key] for key in ("user_metadata", "display_name")}
        ids = {"training_run_ids": self._models_of(asked["session"])}
        return {**told, **ids, "sampler_ids": [*facts["samplers"]]}

    def describe_sampler(self, asked: Any, owner: str) -> dict[str, Any]:
        facts = self.sampler(asked["sampler"], owner)
        path = facts["weights"] and Saved(*facts["weights"]).path
        told = {"sampler_id": asked["sampler"], "base_model": facts["base_model"]}
        return {**told, "model_path": path}

    def new_sampler(self, id: str, base: str, saved: Saved | None) -> None:
        session = id.partition(":")[0]
        known = {"base_model": base, "weights": None if saved is None else [*saved], "clients": 0}
        with self._lock:
            samplers = self.all[session]["samplers"]
            old = samplers.setdefault(id, known)
            if any(old[key] != known[key] for key in ("base_model", "weights")):
                raise TinkerError(409, f"sampling_session_seq_id: {id} was used for other weights")
            self._store.write_session(session, self.all[session])

    def sampler(self, id: str | None, owner: str) -> dict[str, Any]:
        """Facts of a sampling session; raises ``TinkerError``, 404."""
        if id is None:
            raise TinkerError(400, "sampling_session_id: expected one, got none")
        facts = self.find(id.partition(":")[0], owner)["samplers"].get(id)
        if facts is None:
            raise TinkerError(404, f"sampling_session_id: there is no sampler {id!r:.80}")
        return facts

    def join(self, request: types.JoinSamplingSessionRequest, owner: str) -> dict[str, Any]:
        """Numbers one more client of a sampling session."""
        id = request.sampling_session_id
        with self._lock:
            facts = self.sampler(id, owner)
            facts["clients"] += 1
            session = id.partition(":")[0]
            self._store.write_session(session, self.all[session])
            return {"type": "join_sampling_session", "client_counter": facts["clients"]}


def page(asked: Any, rows: Sequence[Any]) -> tuple[Sequence[Any], dict[str, int]]:
    """A page of rows, as a query asks for, and where it stands."""
    given = [str(asked.get(name, "")) for name in ("offset", "limit")]
    offset, limit = (int(x) if x.isdecimal() else y for x, y in zip(given, (0, 100), strict=True))
    cursor = {"offset": offset, "limit": min(limit, 1000), "total_count": len(rows)}
    return rows[offset : offset + cursor["limit"]], cursor
