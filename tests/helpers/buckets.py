"""A store in memory that can be made to fail, and a training without a model."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from marft_jax.errors import BadInput
from marft_jax.extras.storage.mirror import Mirror
from marft_jax.formats import jsonlines
from marft_jax.run.manifest import damage, remove, whole_folder


class Died(BaseException):
    """End of a process, which runs no cleaning."""


Write = Callable[[], Any]
FAULTS: list[Callable[[str, str, Write], Any]] = []
"""At most one: gets the name of a write, the path, and the write itself."""


class Bucket(MemoryFileSystem):
    protocol = "bucket"
    store: dict[str, Any] = {}
    opened = 0

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        type(self).opened += 1

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.removeprefix("bucket://"))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **how: Any) -> None:
        kind = "create" if mode == "create" else "write"
        write = lambda mode=mode: super(Bucket, self).pipe_file(path, value, mode=mode)  # noqa: E731
        FAULTS[0](kind, path, write) if FAULTS else write()

    def rm_file(self, path: str) -> None:
        write = lambda: super(Bucket, self).rm_file(path)  # noqa: E731
        FAULTS[0]("delete", path, write) if FAULTS else write()


fsspec.register_implementation("bucket", Bucket, clobber=True)


@contextlib.contextmanager
def fault(what: Callable[[str, str, Write], Any]) -> Iterator[None]:
    FAULTS.append(what)
    try:
        yield
    finally:
        FAULTS.clear()


def names(address: str) -> list[str]:
    """The objects of a run, without locks."""
    root = address.removeprefix("bucket:/")
    found = (name.removeprefix(f"{root}/") for name in Bucket.store if name.startswith(f"{root}/"))
    return sorted(name for name in found if not name.startswith("lock/"))


def content(address: str, name: str) -> bytes:
    return Bucket.store[f"{address.removeprefix('bucket:/')}/{name}"].getvalue()


def newest(run: Path) -> int:
    """The newest checkpoint, which must be whole."""
    steps = sorted(int(p.name) for p in (run / "checkpoints").glob("[0-9]*"))
    for step in steps:
        assert damage(run / "checkpoints" / str(step)) is None, f"half a checkpoint: {step}"
    return steps[-1] if steps else 0


def metrics(run: Path) -> list[int]:
    """The steps that metrics.jsonl has."""
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def save(place: Any, step: int, keep: int = 2) -> None:
    """Saves a checkpoint and drops old ones, in the order of ``Checkpoints``."""
    folder = place.path / "checkpoints"
    with whole_folder(folder / str(step)) as draft:
        (draft / "state" / "d").mkdir(parents=True)
        (draft / "state" / "d" / f"arrays-{step}").write_bytes(bytes([step]) * 50)
        (draft / "meta.json").write_text(json.dumps({"step": step}))
    for old in sorted(int(p.name) for p in folder.glob("[0-9]*"))[:-keep]:
        remove(folder / str(old))
        place.remove(f"checkpoints/{old}")
    place.push()


def train(place: Mirror, until: int, on_step: Callable[[int], Any] = lambda step: None) -> int:
    """Continues a run until a step, with a checkpoint every second step.

    Returns:
        The step that it began after.
    """
    run = place.path
    run.mkdir(parents=True, exist_ok=True)
    with place.locked():
        for step in (int(p.name) for p in (run / "checkpoints").glob("[0-9]*")):
            place.fetch_checkpoint(step)
        begun = newest(run)
        jsonlines.keep_steps_before(run / "metrics.jsonl", begun + 1)
        jsonlines.write(run / "config.yaml", ["run: {}"])
        for step in range(begun + 1, until + 1):
            jsonlines.write(run / "transcripts" / f"{step}.jsonl", [json.dumps({"step": step})])
            jsonlines.append(run / "metrics.jsonl", [json.dumps({"step": step, "x": step / 7})])
            if step % 2 == 0:
                save(place, step)
                on_step(step)
    return begun


def race(makers: int, place: Callable[[], Mirror], each: float) -> tuple[int, int]:
    """Lets several processes, each on a machine of its own, take a run in the same moment: how many
    got it, and how many were refused."""
    taken, refused, done = list[Mirror](), list[Mirror](), threading.Event()

    def start(place: Mirror) -> None:
        try:
            with place.locked():
                taken.append(place)
                done.wait(20)
        except BadInput:
            refused.append(place)

    places = [place() for _ in range(makers)]
    threads = [threading.Thread(target=start, args=(own,)) for own in places]
    for own in places:
        own.path.mkdir(parents=True)
    for thread in threads:
        thread.start()
    until = time.monotonic() + 20
    while len(refused) < makers - 1 and time.monotonic() < until:
        time.sleep(each)
    done.set()
    for thread in threads:
        thread.join()
    return len(taken), len(refused)
