"""Sessions of clients, and the samplers that they begin in them."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from typing import Any

from tinker import types

from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.tinker.store import EPHEMERAL, Saved, Store

_SILENT_SECONDS = 600.0  # without a heartbeat, until a session ends


class Sessions:
    """All sessions of a server, which are on the disk.

    Attributes:
        all: what is known of each, by id.
    """

    def __init__(self, store: Store) -> None:
        self._store, self.all = store, store.sessions()
        self._beats = dict.fromkeys(self.all, time.time())
        self._lock = threading.RLock()

    def create(self, request: types.CreateSessionRequest, owner: str) -> dict[str, Any]:
        """Begins a session."""
        if request.project_id is not None:
            raise ApiError(400, "project_id: projects are not offered; leave it out")
        session = str(uuid.uuid4())
        facts = {"owner": owner, "created": time.time(), "samplers": {}}
        facts |= request.model_dump(include={"tags", "user_metadata", "display_name"})
        self._store.write_session(session, facts)
        self._beats[session], self.all[session] = time.time(), facts
        return {"type": "create_session", "session_id": session}

    def find(self, session: str | None, owner: str) -> dict[str, Any]:
        """Facts of a session; raises ``ApiError``, 404."""
        facts = self.all.get(session or "")
        if facts is None or facts["owner"] != owner:
            raise ApiError(404, f"session_id: there is no session {session!r:.80}")
        return facts

    def beat(self, request: types.SessionHeartbeatRequest, owner: str) -> dict[str, Any]:
        """Keeps a session alive, and ends others that have been silent for long."""
        if "ended" in self.find(request.session_id, owner):
            raise ApiError(410, f"session {request.session_id} has ended")
        self._beats[request.session_id] = now = time.time()
        for session, facts in [*self.all.items()]:
            if "ended" not in facts and now - self._beats[session] > _SILENT_SECONDS:
                with contextlib.suppress(OSError):  # the disk's errors are no matter of this one
                    self._end(session)
        return {"type": "session_heartbeat"}

    def has_ended(self, sampler: str) -> bool:
        return "ended" in self.all[sampler.partition(":")[0]]

    def finish(self, query: Any, owner: str) -> None:
        self.find(query["session"], owner)
        self._end(query["session"])

    def _end(self, session: str) -> None:
        """Ends a session: its weights without a name go, models and saved weights stay."""
        with self._lock:
            self.all[session]["ended"] = True
            self._store.write_session(session, self.all[session])
        for old, _ in self._store.listed(f"{session}:*", EPHEMERAL):
            self._store.delete(old)

    def add_sampler(self, id: str, base: str, saved: Saved | None) -> None:
        """Begins a sampling session with a base or saved weights."""
        session, known = id.partition(":")[0], [base, saved and [*saved]]
        with self._lock:
            if self.all[session]["samplers"].setdefault(id, known) != known:
                raise ApiError(409, f"sampling_session_seq_id: {id} was used for other weights")
            self._store.write_session(session, self.all[session])

    def sampler(self, id: str | None, owner: str) -> tuple[str, Saved | None]:
        """Base and saved weights of a sampling session; raises ``ApiError``, 404."""
        if id is None:
            raise ApiError(400, "sampling_session_id: expected one, got none")
        samplers = self.find(id.partition(":")[0], owner)["samplers"]
        if id not in samplers:
            raise ApiError(404, f"sampling_session_id: there is no sampler {id!r:.80}")
        base, saved = samplers[id]
        return base, saved and Saved(*saved)
