"""Saving and restoring a run: one folder per checkpoint with everything needed to continue.

    checkpoints/<step>/state/          the TrainState, written by Orbax
                       meta.json       settings, guard, identity of the base, library versions
                       manifest.json   size and SHA-256 of every file above

Random keys, the order of tasks and of minibatches are pure functions of the seed, the step and the
number of rollbacks, so these are the data position too. The frozen base is not saved; its identity
is. A folder is written under another name by a thread while training goes on, and renamed when all
of it is on the disk; a folder whose files are not those of its manifest is never read.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from marft_jax import config as config_lib
from marft_jax.errors import RunFailed
from marft_jax.formats import foreign, jsonlines
from marft_jax.interop import peft
from marft_jax.learning.learner import TrainState
from marft_jax.parallel import processes
from marft_jax.run.compatibility import check_fits
from marft_jax.run.directory import cannot_write, disk_errors
from marft_jax.run.manifest import DRAFT, damage, remove, whole_folder
from marft_jax.run.old_layout import FlatState, flatten, is_flat, unflatten
from marft_jax.types import MAIN

LOGGER = logging.getLogger("marft_jax")

_STATE, _META = "state", "meta.json"


class Saved(NamedTuple):
    """A checkpoint: the training state, laid out as asked, and what ``meta.json`` says of it: its
    ``metric`` (None where none was known), ``guard``, and what ``identity_of`` gave then."""

    state: TrainState
    meta: Mapping[str, Any]


class Checkpoints:
    """Folder ``checkpoints/`` of a run; a context manager that saves what it holds at the end.

    The last finished step is held in the host's memory, whatever the devices do with their arrays
    meanwhile: so it can be saved at any moment, by any thread, and is whatever ends the run.

    Args:
        run: the run directory.
        identity: what the saved arrays belong to, as ``identity_of`` gives it.
        keep: how many of the newest stay, beside the best.
        best: the metric by which one is the best; None keeps no best.

    Attributes:
        step: the last finished one, saved or held.
        skipped: a line about each checkpoint that is not intact.
    """

    def __init__(
        self, run: str | Path, identity: Mapping[str, Any], keep: int, best: str | None = None
    ):
        self.run = Path(run).absolute()
        self._folder = self.run / "checkpoints"
        self.identity, self._keep, self._best = dict(identity), keep, best
        self.step = 0
        self.skipped: list[str] = []
        self._damaged: set[int] = set()
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._lock = threading.RLock()
        self._saving: Future[None] | None = None
        self._held: Callable[[], None] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        """Saves the last finished step, unless saving is what failed."""
        try:
            if kind is not RunFailed:
                self.flush()
        finally:
            self._thread.shutdown()

    @property
    def steps(self) -> list[int]:
        """Steps that have a checkpoint, intact or not."""
        if not self._folder.is_dir():
            return []
        return sorted(int(p.name) for p in self._folder.iterdir() if p.name.isdecimal())

    def find(self, which: int | str, most: int | None = None) -> int | None:
        """Returns the step of the intact checkpoint that is asked for; None where there is none.

        Args:
            which: a step, ``latest``, or ``best`` by its metric.
            most: only those of this step or an earlier one.
        """
        self.wait()
        wanted = (
            step
            for step in reversed(self.steps)
            if (most is None or step <= most) and str(which) in (str(step), "latest", "best")
        )
        intact = filter(self._is_intact, wanted)
        return _best(self._metrics(intact)) if which == "best" else next(intact, None)

    def save(
        self,
        step: int,
        state: TrainState,
        guard: Mapping[str, Any] | None = None,
        metric: float | None = None,
        good: int | None = None,
        now: bool = True,
    ) -> None:
        """Holds a copy of a finished step and starts saving it in the background; arrays may be
        donated as soon as this returns.

        Args:
            guard: the guard's memory.
            metric: the value by which the best is chosen, the higher the better.
            good: where the guard may have to go back to: that step's checkpoint stays as well.
            now: False only holds it, for ``flush`` and the end.

        Raises:
            RunFailed: the save before it could not be finished.
        """
        self.step = step
        if jax.process_index() > 0:  # the state is replicated: one process has all of it
            return
        if (saving := self._saving) is not None and saving.done():
            self.wait()  # raises what went wrong
        # A copy: on a CPU, what the device gives is its own memory, which the next step overwrites;
        # not the versions of earlier steps, which nothing is written to.
        past = jax.device_get(state.past)
        arrays = jax.tree.map(np.array, jax.device_get(state._replace(past=())))._replace(past=past)
        metric = metric if metric is not None and np.isfinite(metric) else None
        meta = self.identity | {"metric": metric, "step": step, "arrays": shapes_of(arrays)}
        meta["guard"] = copy.deepcopy(dict(guard or {}))  # it changes while this is written
        self._held = functools.partial(self._write, step, arrays, meta, good)
        if now:
            self._start()

    def flush(self) -> None:
        """Saves what is held; returns when it is on the disk, or raises ``RunFailed``."""
        with self._lock:
            self._start()
            self.wait()

    def wait(self) -> None:
        """Waits for the save in progress; raises ``RunFailed`` where it could not be finished."""
        with self._lock:
            saving, self._saving = self._saving, None
            if saving is not None:
                with disk_errors(self.run):
                    saving.result()

    def restore(
        self, fresh: TrainState, which: int | str = "latest", most: int | None = None
    ) -> Saved | None:
        """A saved state, laid out like ``fresh``; None where there is none to restore.

        Raises:
            BadInput: what was saved belongs to another base, team or shape of state.
        """
        self.wait()
        processes.any_process(False)  # nobody looks before the save in progress is finished
        step = self.find(which, most)
        if step is None:
            return None
        meta = self._meta(step)
        layout = flatten(fresh, meta["arrays"]) if is_flat(meta["arrays"]) else fresh
        parts, arrays = _parts(layout), shapes_of(layout)
        check_fits(meta, self.identity | {"arrays": arrays}, self.run)
        self.identity["started"] = meta.get("started", self.identity["started"])
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, parts)
        with ocp.StandardCheckpointer() as reader:
            parts = reader.restore(self._folder / str(step) / _STATE, abstract)
        self.step = step
        state = layout._replace(**parts)
        return Saved(unflatten(state, fresh) if isinstance(state, FlatState) else state, meta)

    def restore_adapters(self) -> dict[str, peft.Adapter] | None:
        """Returns the newest adapters by name, whatever they were trained with; None without
        any."""
        step = self.find("latest")
        if step is None:
            return None
        meta = self._meta(step)
        with ocp.StandardCheckpointer() as reader:
            state = reader.restore(self._folder / str(step) / _STATE)
        found = state["policies"][MAIN]["adapters"] if "policies" in state else state["adapters"]
        rank, alpha = (meta["config"]["lora"][key] for key in ("rank", "alpha"))
        return {
            name: peft.Adapter(
                {
                    (target, layer): (ab["a"][n, layer], ab["b"][n, layer])
                    for target, ab in jax.device_get(found).items()
                    for layer in range(ab["a"].shape[1])
                },
                rank,
                alpha / rank,
            )
            for n, name in enumerate(dict.fromkeys(meta["adapters"]))
        }

    def drop_after(self, step: int) -> None:
        """Removes later checkpoints, the newest first, so that a restart never begins at one."""
        self.wait()
        self._held, self.step = None, step
        if jax.process_index() == 0:
            for later in sorted((s for s in self.steps if s > step), reverse=True):
                remove(self._folder / str(later))

    def clean(self) -> None:
        """Removes what a killed save left behind. Only for the process that holds the lock."""
        if self._folder.is_dir() and jax.process_index() == 0:
            for draft in self._folder.glob(f"{DRAFT}*"):
                shutil.rmtree(draft, ignore_errors=True)

    def _start(self) -> None:
        """Starts saving what is held in the background, where that was not started yet."""
        with self._lock:
            if self._held is not None:
                self.wait()
                write, self._held = self._held, None
                self._saving = self._thread.submit(write)

    def _write(self, step: int, arrays: TrainState, meta: dict[str, Any], good: int | None) -> None:
        self.run.stat()  # a run directory that vanished is not made anew
        try:
            with whole_folder(self._folder / str(step)) as draft:
                _check_space(draft, arrays)
                _write_arrays(draft / _STATE, arrays)
                meta["saved"] = time.strftime("%FT%TZ", time.gmtime())
                jsonlines.write(draft / _META, [json.dumps(meta)])
        except ValueError as error:  # how tensorstore reports any failure of the file system
            code = re.search(r"os_error_code='(\d+)'", str(error))
            why = os.strerror(int(code[1])) if code else " ".join(str(error).split())[:200]
            raise cannot_write(self.run, why) from error
        self._damaged.discard(step)
        self._retain(good)

    def _retain(self, good: int | None) -> None:
        """Removes all but the newest, the best and the last good one, once the new one is safe."""
        metrics = self._metrics(step for step in self.steps if step not in self._damaged)
        kept: set[int | None] = set(list(metrics)[-self._keep :])
        if self._best is not None:
            kept.add(_best(metrics))
        if good is not None:
            kept.add(max((step for step in metrics if step <= good), default=None))
        for step in set(self.steps) - kept:
            remove(self._folder / str(step))

    def _metrics(self, steps: Iterator[int]) -> dict[int, float | None]:
        """Returns the metrics of those of these checkpoints that can be read."""
        found = {}
        for step in steps:
            with contextlib.suppress(ValueError):
                found[step] = self._meta(step).get("metric")
        return found

    def _is_intact(self, step: int) -> bool:
        """Compares every file with what was written; says so once where one differs."""
        if step in self._damaged:
            return False
        wrong = damage(self._folder / str(step))
        if wrong:
            self._damaged.add(step)
            self.skipped.append(f"checkpoint {step} is not intact ({wrong}) and is skipped")
            LOGGER.warning("%s: %s", self.run, self.skipped[-1])
        return wrong is None

    def _meta(self, step: int) -> dict[str, Any]:
        return foreign.read_settings(self._folder / str(step) / _META)


class Schedule:
    """When to save: every so many steps, so many minutes after the last time, and at the end."""

    def __init__(self, settings: config_lib.Run, now: Callable[[], float] = time.monotonic):
        self._settings, self._now = settings, now
        self._saved = now()

    def is_due(self, done: int) -> bool:
        """True where to save after this step; the minutes then start anew."""
        s = self._settings
        late = s.save_minutes > 0 and self._now() - self._saved >= 60 * s.save_minutes
        due = done % s.save_every == 0 or done == s.steps or late
        if due:
            self._saved = self._now()
        return due


def shapes_of(state: Any) -> dict[str, str]:
    """Path to type and shape of every array: ``{".step": "int32[]", ...}``."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {
        jax.tree_util.keystr(path): f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
        for path, leaf in leaves
    }


def _parts(state: TrainState | FlatState) -> dict[str, Any]:
    """Returns the fields of a state as they are saved: without those that are empty."""
    fields = state._asdict().items()
    return {name: part for name, part in fields if not isinstance(part, tuple | dict) or part}


def _best(metrics: Mapping[int, float | None]) -> int | None:
    """Returns the step with the highest metric, of equal ones the newest."""
    known = [(value, step) for step, value in metrics.items() if value is not None]
    return max(known)[1] if known else None


def _check_space(folder: Path, arrays: TrainState) -> None:
    """Raises ``OSError`` where they do not fit: a write of Orbax's that fails half-way prints
    tracebacks of its own, one for each file that it had begun."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, sum(x.nbytes for x in jax.tree.leaves(arrays)))


def _write_arrays(folder: Path, arrays: TrainState) -> None:
    """Writes them from this process alone; what Orbax would log, it raises too."""
    alone = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0})
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as writer:
            writer.save(folder, args=ocp.args.StandardSave(_parts(arrays)))
    finally:
        logger.setLevel(level)
