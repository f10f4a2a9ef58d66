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

from marft_jax import learning
from marft_jax.extras.gateway.tinker.wire import Answer, TinkerError
from marft_jax.formats import foreign, jsonlines
from marft_jax.learning import Adapter
from marft_jax.run.manifest import DRAFT, remove, whole_folder

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,127}")
_MODEL = re.compile(r"([A-Za-z0-9-]{1,64}):train:(\d{1,9})")
_FACTS, _ADAPTER = "facts.json", "adapter.safetensors"
_KEPT_CALLS = 1024  # results of a model that may be fetched once more
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
EPHEMERAL = "ephemeral"
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
        """Reads a path; raises ``TinkerError``, 400."""
        model, kind, name = (*path.removeprefix("tinker://").split("/"), "", "", "")[:3]
        fits = path.startswith("tinker://") and path.count("/") == 4
        if (
            not fits
            or kind not in KINDS
            or not _MODEL.fullmatch(model)
            or not _NAME.fullmatch(name)
        ):
            what = f"tinker://MODEL/{'|'.join(KINDS)}/NAME"
            raise TinkerError(400, f"path: expected {what}, got {path!r:.120}")
        return cls(model, kind, name)


def check_name(name: str) -> str:
    """Returns a name of weights; raises ``TinkerError``, 400."""
    if not _NAME.fullmatch(name):
        what = "path: expected letters, digits, . - and _, 128 at most, beginning with no sign"
        raise TinkerError(400, f"{what}, got {name!r:.80}")
    return name


class Store:
    """Reads and writes the folder.

    Args:
        durable: also keeps calls and states; otherwise only sessions and saved weights.
        most_bytes: of saved weights.
    """

    def __init__(self, folder: Path, durable: bool, most_bytes: int) -> None:
        self.folder, self.durable, self._most = folder, durable, most_bytes
        folder.mkdir(parents=True, exist_ok=True)
        for draft in folder.rglob(f"{DRAFT}*"):
            shutil.rmtree(draft, ignore_errors=True)
        for draft in folder.glob("models/*/calls/.*"):  # of a process that was killed
            draft.unlink()

    def _model(self, model: str) -> Path:
        if not _MODEL.fullmatch(model):
            raise TinkerError(404, f"model_id: there is no model {model!r:.120}")
        return self.folder / "models" / model.replace(":", ".")

    def sessions(self) -> dict[str, dict[str, Any]]:
        """Facts of all sessions."""
        files = sorted(self.folder.glob("sessions/*.json"))
        return {file.stem: foreign.loads(file.read_text("utf-8")) for file in files}

    def write_session(self, session: str, facts: dict[str, Any]) -> None:
        jsonlines.write(self.folder / "sessions" / f"{session}.json", [json.dumps(facts)])

    def models(self) -> dict[str, dict[str, Any]]:
        """Facts of the newest state of each model, with its ``number``."""
        found = dict[str, dict[str, Any]]()
        for folder in sorted(self.folder.glob("models/*")):
            if states := _states(folder):
                facts = foreign.loads((states[-1] / _FACTS).read_text("utf-8"))
                found[facts["model_id"]] = facts
        return found

    def write_state(self, model: str, number: int, adapter: Adapter, facts: dict[str, Any]) -> None:
        """Writes a model after the call of a number; older states and calls are dropped then."""
        folder = self._model(model)
        if not self.durable:
            return
        with whole_folder(folder / f"state-{number:09}") as draft:
            learning.save(adapter, draft / _ADAPTER)
            jsonlines.write(draft / _FACTS, [json.dumps({**facts, "number": number})])
        for older in _states(folder)[:-1]:
            remove(older)
        calls = sorted(folder.glob("calls/[0-9]*"))
        for file in calls[:-1]:
            if int(file.name.partition(".")[0]) <= number - _KEPT_CALLS:
                file.unlink()

    def read_state(self, model: str) -> Adapter:
        """The newest state of a model."""
        return learning.load(_states(self._model(model))[-1] / _ADAPTER)

    def write_call(self, model: str, number: int, kind: str, body: bytes) -> None:
        """Keeps a call before its promise is given."""
        if self.durable:
            _replace(self._model(model) / "calls" / f"{number:09}.{kind}", body)

    def write_answer(self, model: str, number: int, answer: Answer) -> None:
        if self.durable:
            kind = "proto" if answer.proto else "json"
            _replace(self._model(model) / "calls" / f"{number:09}.answer-{kind}", answer.body)

    def read_answer(self, model: str, number: int) -> Answer | None:
        """The result of a call, if it is kept."""
        for kind in ("proto", "json") if self.durable else ():
            with contextlib.suppress(FileNotFoundError):
                file = self._model(model) / "calls" / f"{number:09}.answer-{kind}"
                return Answer(file.read_bytes(), kind == "proto")
        return None

    def calls(self, model: str) -> Iterator[tuple[int, str, bytes]]:
        """Calls that are kept, by number: (number, kind, body)."""
        for file in sorted(self._model(model).glob("calls/[0-9]*")):
            number, _, kind = file.name.partition(".")
            if not kind.startswith("answer-"):
                yield int(number), kind, file.read_bytes()

    def place(self, saved: Saved) -> Path:
        """The folder of saved weights."""
        return self.folder / "weights" / saved.model.replace(":", ".") / saved.kind / saved.name

    @contextlib.contextmanager
    def saving(self, saved: Saved, facts: dict[str, Any]) -> Iterator[Path]:
        """Gives a folder to write weights in.

        Raises:
            TinkerError: there is no more room.
        """
        used = sum(file.stat().st_size for file in self.folder.glob("weights/*/*/*/*"))
        if used > self._most:
            what = f"saved weights take {used} bytes, and the server keeps {self._most}"
            raise TinkerError(
                400, f"{what}; delete checkpoints, or restart it with --weights_bytes"
            )
        with whole_folder(self.place(saved)) as draft:
            yield draft
            own = {**facts, "model_id": saved.model, "kind": saved.kind, "name": saved.name}
            jsonlines.write(draft / _FACTS, [json.dumps({"time": time.time(), **own})])

    def save(self, saved: Saved, adapter: Adapter, facts: dict[str, Any]) -> None:
        """Saves weights; of those without a name only the newest stay."""
        with self.saving(saved, facts) as draft:
            learning.save(adapter, draft / _ADAPTER)
        if saved.kind == EPHEMERAL:
            for old in self.listed(saved.model, EPHEMERAL)[:-_KEPT_EPHEMERAL]:
                self.delete(Saved(saved.model, EPHEMERAL, old["name"]))

    def facts(self, saved: Saved) -> dict[str, Any]:
        """Facts of saved weights; raises ``TinkerError``, 404, where there are none."""
        file = self.place(saved) / _FACTS
        facts = foreign.loads(file.read_text("utf-8")) if file.is_file() else None
        if facts is None or _is_over(facts):
            raise TinkerError(404, f"there are no weights {saved.path}; they may be deleted")
        return facts

    def write_facts(self, saved: Saved, facts: dict[str, Any]) -> None:
        """Replaces the facts of saved weights."""
        jsonlines.write(self.place(saved) / _FACTS, [json.dumps(facts)])

    def load(self, saved: Saved) -> Adapter:
        """Reads saved weights; raises ``TinkerError`` where they are missing or damaged."""
        self.facts(saved)
        return learning.load(self.place(saved) / _ADAPTER)

    def listed(self, model: str | None = None, *kinds: str) -> list[dict[str, Any]]:
        """Facts of saved weights, oldest first; those whose time is over are deleted."""
        which = "*" if model is None else model.replace(":", ".")
        found = list[dict[str, Any]]()
        for file in self.folder.glob(f"weights/{which}/*/[!.]*/{_FACTS}"):
            facts = foreign.loads(file.read_text("utf-8"))
            saved = Saved(facts["model_id"], facts["kind"], facts["name"])
            if _is_over(facts):
                self.delete(saved)
            elif saved.kind in (kinds or KINDS):
                size = sum(x.stat().st_size for x in file.parent.iterdir())
                found.append({**facts, "size_bytes": size, "path": saved.path})
        return sorted(found, key=lambda facts: facts["time"])

    def delete(self, saved: Saved) -> None:
        with contextlib.suppress(FileNotFoundError):
            remove(self.place(saved))


def _is_over(facts: dict[str, Any]) -> bool:
    return facts.get("expires") is not None and facts["expires"] < time.time()


def _states(folder: Path) -> list[Path]:
    return sorted(folder.glob("state-*"))


def _replace(file: Path, body: bytes) -> None:
    """Writes a file that is whole or not there, and on the disk."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with jsonlines.draft_of(file) as draft, draft.open("wb") as stream:
        stream.write(body)
        stream.flush()
        os.fsync(stream.fileno())
