"""The server's folder: models, their calls, sessions and saved weights survive a killed server.

    server.db                    sessions, models, and the calls with their results
    models/MODEL/state-NUMBER    an adapter with its optimiser, after the call of that number
    weights/MODEL/KIND/NAME/     saved weights, an adapter or a peft folder, with facts.json

A state counts when the database has its number, which it has together with the call's result.
Folders of weights appear only when they are whole.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from marft_jax import policy as verbs
from marft_jax.errors import BadInput
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.formats import jsonlines
from marft_jax.policy import Adapter
from marft_jax.run.manifest import DRAFT, remove, whole_folder

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
EPHEMERAL = "ephemeral"
LOST = "lost"  # the kind of a call that failed with the disk
_PATH = re.compile(
    rf"tinker://([A-Za-z0-9-]{{1,64}}:train:\d{{1,9}})/({'|'.join(KINDS)})/([A-Za-z0-9][\w.-]{{0,127}})",
    re.ASCII,
)
_FACTS, ADAPTER = "facts.json", "adapter.safetensors"
_KEPT_CALLS = 1024  # results of a model that may be fetched once more
_TTL = 3600, 315_360_000
_KEPT_EPHEMERAL = 32  # weights without a name of a model; older ones are deleted


class Saved(NamedTuple):
    """Saved weights."""

    model: str
    kind: str
    name: str

    @property
    def path(self) -> str:
        return f"tinker://{self.model}/{self.kind}/{self.name}"

    @classmethod
    def of(cls, path: str) -> Saved:
        """Reads a path; raises ``ApiError``, 400."""
        if not (match := _PATH.fullmatch(path)):
            what = f"tinker://MODEL/{'|'.join(KINDS)}/NAME, a name of letters, digits, . - and _"
            raise ApiError(400, f"path: expected {what}, got {path!r:.200}")
        return cls(*match.groups())


_TABLES = """
PRAGMA journal_mode = PERSIST;  -- so that a call can be marked as lost on a full disk
CREATE TABLE IF NOT EXISTS sessions (id PRIMARY KEY, facts);
CREATE TABLE IF NOT EXISTS models (id PRIMARY KEY, facts, number);
CREATE TABLE IF NOT EXISTS calls (model, number, kind, body, answer, PRIMARY KEY (model, number));
"""
_THIS = "WHERE model = ? AND number = ?"


class Store:
    """Reads and writes the folder. What it writes is on the disk when a method returns.

    Args:
        most_bytes: of saved weights.

    Raises:
        BadInput: the folder is of an older release, or cannot be read.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder, self._most, self._lock = folder, most_bytes, threading.RLock()
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "sessions").is_dir():
            what = "expected a folder of this release, got models of an older one"
            raise BadInput(f"--run.dir {folder}: {what}; serve it with that one, or name another")
        for draft in folder.rglob(f"{DRAFT}*"):
            shutil.rmtree(draft, ignore_errors=True)
        try:
            self._database = sqlite3.connect(folder / "server.db", check_same_thread=False)
            self._database.executescript(_TABLES)
        except sqlite3.Error as error:
            what = f"server.db: expected a database of this server, got: {error}"
            raise BadInput(f"--run.dir {folder}: {what}") from error

    def close(self) -> None:
        self._database.close()

    def _run(self, *statements: tuple[Any, ...]) -> list[Any]:
        """Runs statements, each with its values, together or not at all; returns the last one's
        rows. Raises ``OSError`` where the disk fails."""
        try:
            with self._lock, self._database as database:
                done = [database.execute(text, values) for text, *values in statements]
                return done[-1].fetchall()
        except sqlite3.Error as error:
            raise OSError(errno.EIO, str(error)) from error

    def sessions(self) -> dict[str, dict[str, Any]]:
        """Facts of all sessions."""
        rows = self._run(("SELECT * FROM sessions ORDER BY rowid",))
        return {session: json.loads(facts) for session, facts in rows}

    def write_session(self, session: str, facts: dict[str, Any]) -> None:
        put = "INSERT INTO sessions VALUES (?, ?) ON CONFLICT DO UPDATE SET facts = excluded.facts"
        self._run((put, session, json.dumps(facts)))

    def models(self) -> list[dict[str, Any]]:
        """Facts of each model whose state is there, with the ``number`` of its last step."""
        rows = self._run(("SELECT * FROM models ORDER BY id",))
        return [
            {**json.loads(facts), "number": number}
            for model, facts, number in rows
            if self._state(model, number).exists()
        ]

    def create_model(self, model: str, adapter: Adapter, facts: dict[str, Any]) -> None:
        self._write_state(model, 0, adapter)
        new = "INSERT OR REPLACE INTO models VALUES (?, ?, 0)", model, json.dumps(facts)
        self._run(("DELETE FROM calls WHERE model = ?", model), new)

    def read_state(self, model: str) -> Adapter:
        """The newest state of a model."""
        [[number]] = self._run(("SELECT number FROM models WHERE id = ?", model))
        return verbs.load(self._state(model, number))

    def write_call(self, model: str, number: int, kind: str, body: bytes) -> None:
        put = "INSERT OR REPLACE INTO calls VALUES (?, ?, ?, ?, NULL)"
        self._run((put, model, number, kind, body))

    def write_answer(
        self, model: str, number: int, answer: bytes, adapter: Adapter | None = None
    ) -> None:
        """Keeps the result of a call, together with the state that follows if there is a new one;
        what led to older states is dropped then."""
        done = "WHERE model = ? AND number <= ?"
        answered = f"UPDATE calls SET answer = ? {_THIS}", answer, model, number
        if adapter is None:
            self._run(answered)
            return
        self._write_state(model, number, adapter)
        self._run(
            answered,
            ("UPDATE models SET number = ? WHERE id = ?", number, model),
            (f"UPDATE calls SET body = NULL {done}", model, number),
            (f"DELETE FROM calls {done}", model, number - _KEPT_CALLS),
        )
        state = self._state(model, number)
        with contextlib.suppress(OSError):
            for file in [file for file in state.parent.iterdir() if file != state]:
                file.unlink()

    def read_answer(self, model: str, number: int) -> bytes | None:
        """The result of a call, if it is kept."""
        rows = self._run((f"SELECT answer FROM calls {_THIS}", model, number))
        return rows[0][0] if rows else None

    def lose(self, model: str, number: int) -> None:
        """Notes that a call failed with the disk: a server that is started again fails it, too."""
        with contextlib.suppress(OSError):
            self._run((f"UPDATE calls SET kind = ? {_THIS}", LOST, model, number))

    def calls(self, model: str, after: int) -> list[tuple[int, str, bytes]]:
        """Calls after that of a number, in their order: (number, kind, body)."""
        later = "WHERE model = ? AND number > ? ORDER BY number"
        return self._run((f"SELECT number, kind, body FROM calls {later}", model, after))

    def _state(self, model: str, number: int) -> Path:
        return self._folder / "models" / model.replace(":", ".") / f"state-{number:09}"

    def _write_state(self, model: str, number: int, adapter: Adapter) -> None:
        file = self._state(model, number)
        file.parent.mkdir(parents=True, exist_ok=True)
        with jsonlines.draft_of(file) as draft:
            verbs.save(adapter, draft)
            with draft.open("rb") as stream:
                os.fsync(stream.fileno())

    def place(self, saved: Saved) -> Path:
        """The folder of saved weights."""
        return self._folder / "weights" / saved.model.replace(":", ".") / saved.kind / saved.name

    @contextlib.contextmanager
    def saving(self, saved: Saved, facts: dict[str, Any]) -> Iterator[Path]:
        """Gives a folder to write weights in; of those without a name only the newest stay.

        Raises:
            ApiError: there is no more room.
        """
        used = _size(self._folder / "weights")
        if used > self._most:
            what = f"saved weights take {used} bytes, and the server keeps {self._most}"
            raise ApiError(400, f"{what}; delete checkpoints, or restart it with --weights_bytes")
        with whole_folder(self.place(saved)) as draft:
            yield draft
            whole = {"saved": saved, "time": time.time(), **facts}
            jsonlines.write(draft / _FACTS, [json.dumps(whole)])
        if saved.kind == EPHEMERAL:
            with contextlib.suppress(OSError):
                for old, _ in self.listed(saved.model, EPHEMERAL)[:-_KEPT_EPHEMERAL]:
                    self.delete(old)

    def facts(self, saved: Saved, owner: str | None = None) -> dict[str, Any]:
        """Facts of saved weights, of an owner if one is given; raises ``ApiError``, 404."""
        file = self.place(saved) / _FACTS
        facts = json.loads(file.read_text()) if file.is_file() else None
        if facts is None or _is_over(facts) or owner not in (None, facts["owner"]):
            raise ApiError(404, f"there are no weights {saved.path}; they may be deleted")
        return facts

    def write_facts(self, saved: Saved, facts: dict[str, Any]) -> None:
        """Replaces the facts of saved weights."""
        jsonlines.write(self.place(saved) / _FACTS, [json.dumps(facts)])

    def load(self, saved: Saved) -> Adapter:
        """Reads saved weights; raises ``ApiError`` where there are none."""
        self.facts(saved)
        return verbs.load(self.place(saved) / ADAPTER)

    def listed(
        self, models: str = "*", kind: str = "*weights"
    ) -> list[tuple[Saved, dict[str, Any]]]:
        """Saved weights with their facts, oldest first; those whose time is over are deleted.

        Args:
            models, kind: patterns of names.
        """
        listed = list[tuple[Saved, dict[str, Any]]]()
        for file in self._folder.glob(f"weights/{models.replace(':', '.')}/{kind}/[!.]*/{_FACTS}"):
            facts = json.loads(file.read_text())
            saved = Saved(*facts["saved"])
            if _is_over(facts):
                self.delete(saved)
                continue
            listed.append((saved, {**facts, "size_bytes": _size(file.parent)}))
        return sorted(listed, key=lambda pair: pair[1]["time"])

    def delete(self, saved: Saved) -> None:
        with contextlib.suppress(FileNotFoundError):
            remove(self.place(saved))


def _size(folder: Path) -> int:
    """Bytes of all files in a folder and those inside it."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def expiry(seconds: Any) -> float | None:
    """When weights expire; raises ``ApiError``, 400."""
    if seconds is None:
        return None
    if type(seconds) is not int or not _TTL[0] <= seconds <= _TTL[1]:
        raise ApiError(400, f"ttl_seconds: expected {_TTL[0]} to {_TTL[1]}, got {seconds!r:.40}")
    return time.time() + seconds


def _is_over(facts: dict[str, Any]) -> bool:
    return facts.get("expires") is not None and facts["expires"] < time.time()
