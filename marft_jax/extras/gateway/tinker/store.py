"""The server's folder: models, their calls, sessions and saved weights survive a killed server.

    sessions/SESSION.json
    models/MODEL/state-NUMBER/      an adapter with its optimiser, after the call of that number
    models/MODEL/calls/NUMBER.KIND  a call whose promise was given, NUMBER.answer its result
    weights/MODEL/KIND/NAME/        saved weights, an adapter or a peft folder, with facts.json

Folders appear only when they are whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from marft_jax import policy as verbs
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.formats import foreign, jsonlines
from marft_jax.policy import Adapter
from marft_jax.run.manifest import DRAFT, remove, whole_folder

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
EPHEMERAL = "ephemeral"
ANSWER, LOST = "answer", "lost"  # kinds of calls: a result, and a call that failed with the disk
_PATH = re.compile(
    rf"tinker://([A-Za-z0-9-]{{1,64}}:train:\d{{1,9}})/({'|'.join(KINDS)})/([A-Za-z0-9][\w.-]{{0,127}})",
    re.ASCII,
)
_FACTS, _ADAPTER = "facts.json", "adapter.safetensors"
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
        if not (found := _PATH.fullmatch(path)):
            what = f"tinker://MODEL/{'|'.join(KINDS)}/NAME, a name of letters, digits, . - and _"
            raise ApiError(400, f"path: expected {what}, got {path!r:.200}")
        return cls(*found.groups())


class Store:
    """Reads and writes the folder.

    Args:
        durable: also keeps calls and states; otherwise only sessions and saved weights.
        most_bytes: of saved weights.
    """

    def __init__(self, folder: Path, durable: bool, most_bytes: int) -> None:
        self._folder, self.durable, self._most = folder, durable, most_bytes
        folder.mkdir(parents=True, exist_ok=True)
        for draft in folder.rglob(f"{DRAFT}*"):
            shutil.rmtree(draft, ignore_errors=True)
        for draft in folder.glob("models/*/calls/.*"):  # of a process that was killed
            draft.unlink()

    def sessions(self) -> dict[str, dict[str, Any]]:
        """Facts of all sessions."""
        return {file.stem: _read(file) for file in sorted(self._folder.glob("sessions/*.json"))}

    def write_session(self, session: str, facts: dict[str, Any]) -> None:
        jsonlines.write(self._folder / "sessions" / f"{session}.json", [json.dumps(facts)])

    def models(self) -> Iterator[dict[str, Any]]:
        """Facts of the newest state of each model, with its ``number``."""
        for folder in sorted(self._folder.glob("models/*")):
            if states := _states(folder):
                yield _read(states[-1] / _FACTS)

    def write_state(self, model: str, number: int, adapter: Adapter, facts: dict[str, Any]) -> None:
        """Writes a model after the call of a number; older states and calls are dropped then."""
        if not self.durable:
            return
        folder = self._model(model)
        with whole_folder(folder / f"state-{number:09}") as draft:
            self.write_adapter(draft, adapter)
            jsonlines.write(draft / _FACTS, [json.dumps({**facts, "number": number})])
        with contextlib.suppress(OSError):  # the state is there
            for older in _states(folder)[:-1]:
                remove(older)
            for file in folder.glob("calls/[0-9]*"):
                if int(file.stem) <= number - _KEPT_CALLS:
                    file.unlink()

    def read_state(self, model: str) -> Adapter:
        """The newest state of a model."""
        return verbs.load(_states(self._model(model))[-1] / _ADAPTER)

    def write_call(self, model: str, number: int, kind: str, body: bytes) -> None:
        """Keeps a call, or its result; it is on the disk then."""
        if not self.durable:
            return
        file = self._call(model, number, kind)
        file.parent.mkdir(parents=True, exist_ok=True)
        with jsonlines.draft_of(file) as draft, draft.open("wb") as stream:
            stream.write(body)
            stream.flush()
            os.fsync(stream.fileno())

    def read_answer(self, model: str, number: int) -> bytes | None:
        """The result of a call, if it is kept."""
        with contextlib.suppress(FileNotFoundError):
            return self._call(model, number, ANSWER).read_bytes()
        return None

    def lose(self, model: str, number: int, kind: str) -> None:
        """Notes that a call failed with the disk: a server that is started again fails it, too."""
        with contextlib.suppress(OSError):  # needs no room, but the disk may fail in any way
            self._call(model, number, kind).rename(self._call(model, number, LOST))

    def calls(self, model: str, after: int) -> Iterator[tuple[int, str, bytes]]:
        """Calls after that of a number, in their order: (number, kind, body)."""
        for file in sorted(self._model(model).glob("calls/[0-9]*")):
            if (number := int(file.stem)) > after and file.suffix[1:] != ANSWER:
                yield number, file.suffix[1:], file.read_bytes()

    def place(self, saved: Saved) -> Path:
        """The folder of saved weights."""
        return self._folder / "weights" / saved.model.replace(":", ".") / saved.kind / saved.name

    def _model(self, model: str) -> Path:
        return self._folder / "models" / model.replace(":", ".")

    def _call(self, model: str, number: int, kind: str) -> Path:
        return self._model(model) / "calls" / f"{number:09}.{kind}"

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
            own = {"saved": saved, "time": time.time(), **facts}
            jsonlines.write(draft / _FACTS, [json.dumps(own)])
        if saved.kind == EPHEMERAL:
            with contextlib.suppress(OSError):
                for old, _ in self.listed(saved.model, EPHEMERAL)[:-_KEPT_EPHEMERAL]:
                    self.delete(old)

    def write_adapter(self, draft: Path, adapter: Adapter) -> None:
        verbs.save(adapter, draft / _ADAPTER)

    def facts(self, saved: Saved, owner: str | None = None) -> dict[str, Any]:
        """Facts of saved weights, of an owner if one is given; raises ``ApiError``, 404."""
        file = self.place(saved) / _FACTS
        facts = _read(file) if file.is_file() else None
        if facts is None or _is_over(facts) or owner not in (None, facts["owner"]):
            raise ApiError(404, f"there are no weights {saved.path}; they may be deleted")
        return facts

    def write_facts(self, saved: Saved, facts: dict[str, Any]) -> None:
        """Replaces the facts of saved weights."""
        jsonlines.write(self.place(saved) / _FACTS, [json.dumps(facts)])

    def load(self, saved: Saved) -> Adapter:
        """Reads saved weights; raises ``ApiError`` where there are none."""
        self.facts(saved)
        return verbs.load(self.place(saved) / _ADAPTER)

    def listed(
        self, models: str = "*", kind: str = "*weights"
    ) -> list[tuple[Saved, dict[str, Any]]]:
        """Saved weights with their facts, oldest first; those whose time is over are deleted.

        Args:
            models, kind: patterns of names.
        """
        found = list[tuple[Saved, dict[str, Any]]]()
        for file in self._folder.glob(f"weights/{models.replace(':', '.')}/{kind}/[!.]*/{_FACTS}"):
            facts = _read(file)
            saved = Saved(*facts["saved"])
            if _is_over(facts):
                self.delete(saved)
                continue
            found.append((saved, {**facts, "size_bytes": _size(file.parent)}))
        return sorted(found, key=lambda one: one[1]["time"])

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


def _read(file: Path) -> dict[str, Any]:
    return foreign.loads(file.read_text("utf-8"))


def _is_over(facts: dict[str, Any]) -> bool:
    return facts.get("expires") is not None and facts["expires"] < time.time()


def _states(folder: Path) -> list[Path]:
    return sorted(folder.glob("state-*"))
