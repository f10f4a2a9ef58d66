"""A run in object storage, whose files are mirrored in a folder of this machine.

A file is an object. All files go there with each checkpoint, and small ones that grow every
``PUSH_S`` seconds. A checkpoint exists when its ``manifest.json`` does: that object is written last
and deleted first. The bucket decides: a start takes over what is there, whatever its folder has.
Nothing is deleted there because it is missing here.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from marft_jax.errors import BadInput, RunFailed, described, one_line
from marft_jax.extras.storage.lock import Lock, repeated
from marft_jax.formats import foreign, jsonlines
from marft_jax.run.manifest import MANIFEST
from marft_jax.run.storage import RunStorage

PUSH_S = 20.0  # between pushes of what grows
SMALL = 1 << 22  # bytes of a file that is pushed so often

_T = TypeVar("_T")
_HEAD = ("config.yaml", "team.yaml", "inputs.json", "demonstrations.jsonl", "checkpoints/*.json")
_GROWING = (".jsonl", ".txt", ".yaml", ".json")
_ONCE = re.compile(r"transcripts/\d|evaluations/.*\.jsonl|tensorboard/|unsaved-")
"""What training does not read; its content does not change without its size."""
_STEP = re.compile(r"checkpoints/\d+/")


class Mirror(RunStorage):
    """A run at an address, such as ``s3://bucket/run``, of any store that fsspec can open.

    Args:
        address: of the run.
        trains: this process is to train in it, and owns its folder; else it reads.

    Raises:
        BadInput: there is no such store, no access, or no bucket.
    """

    def __init__(self, address: str, trains: bool) -> None:
        scheme, _, rest = address.rstrip("/").partition("://")
        self._address = f"{scheme.lower()}://{rest}"
        key = hashlib.sha256(self._address.encode()).hexdigest()[:16]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "marft_jax/runs"
        name = re.sub(r"[^\w.-]", "-", rest.rpartition("/")[2])
        super().__init__(cache / key / ("trained" if trains else "read") / name)
        self._scope: str | None = None  # names of what this process writes begin so
        self._lock: Lock | None = None
        self._seen: dict[str, Any] = {}  # state of each local file that the bucket has
        self._pushing = threading.RLock()
        with self._refusing("that can be listed"):
            self._open()
            self._sizes = self._list()
        if cut := [name for name in self._sizes if name.endswith(".part0001")]:
            what = f"expected whole files, got {cut[0]}, as an older release cut them"
            raise BadInput(f"{self._address}: {what}; join the parts of each (cat), delete them")
        if not trains:
            self._bring(*_HEAD)

    def fetch(self, pattern: str) -> None:
        if self._lock is None:  # else nobody else writes there
            self._sizes = self._try(self._list)
            self._bring(pattern)

    def fetch_checkpoint(self, step: int) -> None:
        state = f"checkpoints/{step}/state"
        shutil.rmtree(self.path / state, ignore_errors=True)
        for name in [name for name in self._sizes if name.startswith(f"{state}/")]:
            self._get(name)

    def push(self, growing: bool = False) -> None:
        """As of ``RunStorage``; ``growing``: only small files that grow from step to step."""
        if self._scope is None:
            return
        with self._pushing:
            self._check_owner()
            for name, state in sorted(self._files(), key=lambda file: bool(_STEP.match(file[0]))):
                step = _STEP.match(name)
                whole = step and not growing and _STEP.sub("", name) == MANIFEST
                is_small = name.endswith(_GROWING) and state[1] <= SMALL
                other = not step and (not growing or is_small)
                if self._seen.get(name) != state and (whole or other):
                    with contextlib.suppress(FileNotFoundError):  # it is not here, or no more
                        if step:
                            self._send_checkpoint(step[0])
                        else:
                            self._put(name, (self.path / name).read_bytes())
                        self._seen[name] = state

    def remove(self, name: str) -> None:
        self.push()
        self._delete(n for n in self._sizes if n == name or n.startswith(f"{name}/"))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        with self._refusing("that can be written"):
            self._lock = Lock(lambda: self._fs, self._at("lock"), self.path, self._address)
        with self._lock.renewed():
            self._sizes = self._try(self._list)
            self._delete(name for name in self._sizes if not self._is_whole(name))
            self._bring("*", all=not any(n.endswith(f"/{MANIFEST}") for n in self._sizes))
            self._scope = ""
            with self._pushed():
                yield

    @contextlib.contextmanager
    def keeping(self, folder: str) -> Iterator[None]:
        self.fetch(f"{folder}/*")
        self._scope = f"{folder}/"
        with self._pushed():
            yield

    @contextlib.contextmanager
    def _pushed(self) -> Iterator[None]:
        try:
            with repeated(lambda: self.push(growing=True), PUSH_S, self._address):
                yield
        finally:
            self.push()

    def _open(self) -> None:
        """Opens the store without caches: others write there, and credentials change."""
        kind = fsspec.get_filesystem_class(self._address.partition(":")[0])
        logging.getLogger(kind.__module__.partition(".")[0]).setLevel(logging.CRITICAL)
        self._fs, self._root = fsspec.core.url_to_fs(
            self._address, skip_instance_cache=True, use_listings_cache=False
        )

    @contextlib.contextmanager
    def _refusing(self, wanted: str) -> Iterator[None]:
        try:
            yield
        except BadInput:
            raise
        except Exception as error:  # each store has other kinds
            fix = "check the address, the credentials and their rights"
            if isinstance(error, ImportError):
                fix = 'pip install -e ".[storage]", which opens s3:// and gs://'
            got = one_line(described(error), 200)
            raise BadInput(
                f"{self._address}: expected object storage {wanted}, as s3://BUCKET/PATH or "
                f"gs://BUCKET/PATH, got {got}; {fix}"
            ) from error

    def _try(self, call: Callable[[], _T]) -> _T:
        """Calls the store, once more with credentials read anew if it fails.

        Raises:
            FileNotFoundError: there is no such object.
            RunFailed: it failed again.
        """
        try:
            return call()
        except FileNotFoundError:
            raise
        except Exception:
            with contextlib.suppress(Exception):
                self._open()
        try:
            return call()
        except FileNotFoundError:
            raise
        except Exception as error:
            got = one_line(described(error), 200)
            raise RunFailed(
                f"{self._address}: object storage fails ({got}); what is not saved there is in "
                f"{self.path}; checkpoints that were saved stay loadable: give access, and start "
                "again to continue from them"
            ) from error

    def _check_owner(self) -> None:
        if self._lock is not None and (who := self._try(self._lock.taken_by)):
            raise RunFailed(
                f"{self._address}: {who} has taken this run, because this process did not renew "
                "its lock in time; this process writes nothing more"
            )

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _list(self) -> dict[str, int]:
        """Returns the size of each object of the run by its name."""
        objects = self._fs.find(self._root, detail=True)
        sizes = {path[len(self._at("")) :]: info["size"] for path, info in objects.items()}
        inside = re.compile(r"(?!lock/|/)(?!(.*/)?\.\.?/).*[^/]")  # none that leads elsewhere
        return {name: size for name, size in sizes.items() if inside.fullmatch(name)}

    def _is_whole(self, name: str) -> bool:
        """True for a file that no checkpoint has, and for one of a checkpoint that exists."""
        step = _STEP.match(name)
        return step is None or step[0] + MANIFEST in self._sizes

    def _files(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields the files that this process takes to the bucket, and what changes with each."""
        for file in self.path.rglob("*"):
            name = file.relative_to(self.path).as_posix()
            mine = name.startswith(self._scope or "") and name not in ("lock", "owner")
            with contextlib.suppress(FileNotFoundError):
                if mine and not re.search(r"(^|/)\.", name) and file.is_file():
                    stat = file.stat()
                    yield name, (stat.st_ino, stat.st_size, stat.st_mtime_ns)

    def _send_checkpoint(self, prefix: str) -> None:
        """Writes a checkpoint, in place of another one of the same step."""
        folder = self.path / prefix
        names = [*foreign.loads((folder / MANIFEST).read_text("utf-8")), MANIFEST]
        files = {name: (folder / name).read_bytes() for name in names}
        self._delete(name for name in self._sizes if name.startswith(prefix))
        for name, data in files.items():
            if name == MANIFEST:
                self._check_owner()
            self._put(prefix + name, data)

    def _put(self, name: str, data: bytes) -> None:
        self._try(lambda: self._fs.pipe_file(self._at(name), data))
        self._sizes[name] = len(data)

    def _delete(self, names: Iterable[str]) -> None:
        for name in sorted(names, key=lambda name: not name.endswith(MANIFEST)):
            with contextlib.suppress(FileNotFoundError):
                self._try(functools.partial(self._fs.rm_file, self._at(name)))
            del self._sizes[name]

    def _bring(self, *patterns: str, all: bool = True) -> None:
        """Makes the files that fit these patterns equal to those of the bucket, but no states.

        Args:
            all: also those that training writes and does not read.
        """
        fits = re.compile("|".join(map(fnmatch.translate, patterns))).match
        for name, _ in [*self._files()]:
            if fits(name) and name not in self._sizes:
                (self.path / name).unlink(missing_ok=True)
        for folder in (self.path / "checkpoints").glob("[0-9]*"):
            if not self._is_whole(f"checkpoints/{folder.name}/"):
                shutil.rmtree(folder, ignore_errors=True)
        for name, size in [*self._sizes.items()]:
            file, once = self.path / name, _ONCE.match(name)
            is_state = _STEP.match(name) and (name.count("/") > 2 or not self._is_whole(name))
            is_here = once and file.is_file() and file.stat().st_size == size
            other = is_state or is_here or (once and not all)
            if fits(name) and not other:
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    self._get(name)
        self._seen |= dict(self._files())

    def _get(self, name: str) -> None:
        data = self._try(lambda: self._fs.cat_file(self._at(name)))
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with jsonlines.draft_of(file) as draft:
            draft.write_bytes(data)
