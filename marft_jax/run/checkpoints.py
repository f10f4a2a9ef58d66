"""Saving and restoring a run: one folder per checkpoint with everything needed to continue.

    checkpoints/<step>/state/          the TrainState, written by Orbax
                       meta.json       settings, guard, identity of the base, library versions
                       manifest.json   size and SHA-256 of every file above

Random keys and the order of tasks and minibatches are pure functions of the seed, the step and the
number of rollbacks, so no data position is saved. Of the frozen base only the identity is saved. A
folder is written under another name, and renamed when all files are on the disk. A folder whose
files differ from its manifest is never read.
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
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from marft_jax.errors import BadInput, RunFailed
from marft_jax.formats import foreign, jsonlines
from marft_jax.interop import peft
from marft_jax.learning.learner import TrainState
from marft_jax.parallel import processes
from marft_jax.run.compatibility import check_fits
from marft_jax.run.directory import cannot_write, disk_errors
from marft_jax.run.manifest import DRAFT, damage, remove, whole_folder
from marft_jax.run.storage import RunStorage, storage_of
from marft_jax.settings import config as config_lib
from marft_jax.team.bases import folder_of

LOGGER = logging.getLogger("marft_jax")

_STATE, _META = "state", "meta.json"
_OLDEST = "commit 4c3bfa8"  # whose run directories are the oldest that this code reads


class Saved(NamedTuple):
    """A restored checkpoint.

    Attributes:
        state: the training state, placed as asked.
        meta: contents of ``meta.json``: ``metric`` (None where unknown), ``guard``, and the result
            of ``identity_of`` when it was saved.
    """

    state: TrainState
    meta: Mapping[str, Any]


class Checkpoints:
    """Folder ``checkpoints/`` of a run; a context manager that saves the held step at its end.

    A copy of the last finished step is held in the host's memory, so that any thread can save it at
    any moment, whatever ends the run.

    Args:
        run: the run directory.
        identity: result of ``identity_of``: what the arrays belong to.
        keep: number of the newest checkpoints that stay, besides the best.
        best: name of the metric of the best checkpoint; None keeps no best.
        continues: the run goes on; a checkpoint of another environment or algorithm is refused.

    Attributes:
        step: the last finished step, saved or held.
        skipped: a line about each checkpoint that is not intact.
    """

    def __init__(
        self,
        run: str | Path | RunStorage,
        identity: Mapping[str, Any],
        keep: int,
        best: str | None = None,
        continues: bool = False,
    ):
        self._storage = storage_of(run)
        self.run = self._storage.path.absolute()
        self._folder = self.run / "checkpoints"
        self.identity, self._keep, self._best = dict(identity), keep, best
        self._continues = continues
        self.step = 0
        self.skipped: list[str] = []
        self._damaged: set[int] = set()
        self._lock = threading.Lock()
        self._held: Callable[[], None] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        """Saves the last finished step, unless a failed save ended the block."""
        if kind is not RunFailed:
            self.flush()

    @property
    def steps(self) -> list[int]:
        """Steps that have a checkpoint, intact or not."""
        if not self._folder.is_dir():
            return []
        names = (path.name for path in self._folder.iterdir())  # 08 is a user's
        return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))

    def find(self, which: int | str, most: int | None = None) -> int | None:
        """Returns the step of an intact checkpoint; None where there is none.

        Args:
            which: a step, ``latest``, or ``best`` by its metric.
            most: the latest step that counts.
        """
        self._storage.fetch("checkpoints/*.json")
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
        """Holds a copy of a finished step, and saves it. The arrays may be donated afterwards.

        Args:
            guard: the guard's memory.
            metric: the best checkpoint has the highest.
            good: step that the guard may roll back to; its checkpoint stays.
            now: False holds the copy for ``flush`` and the end, without saving it.

        Raises:
            RunFailed: the run directory cannot be written.
        """
        self.step = step
        if jax.process_index() > 0:  # the state is replicated: one process has all of it
            return
        # A copy, as on a CPU device_get returns the device's own memory, which the next step
        # overwrites. Past versions are not overwritten.
        past = jax.device_get(state.past)
        arrays = jax.tree.map(np.array, jax.device_get(state._replace(past=())))._replace(past=past)
        metric = metric if metric is not None and np.isfinite(metric) else None
        meta = self.identity | {"metric": metric, "step": step, "arrays": shapes_of(arrays)}
        meta["guard"] = copy.deepcopy(dict(guard or {}))  # it changes before this is written
        self._held = functools.partial(self._write, step, arrays, meta, good)
        if now:
            self.flush()

    def flush(self) -> None:
        """Saves the held step; returns when it is where the run is kept, or raises ``RunFailed``.

        Any thread may call this: the first one writes, and the others wait for it.
        """
        with self._lock:
            write, self._held = self._held, None
            if write is not None:
                with disk_errors(self.run):
                    write()
            self._storage.push()

    def restore(
        self, fresh: TrainState, which: int | str = "latest", most: int | None = None
    ) -> Saved | None:
        """Restores a saved state, placed like ``fresh``; None where there is none.

        Raises:
            BadInput: the checkpoint is of another base, team or shape of state, or too old.
        """
        processes.any_process(False)  # nobody looks before the first process has saved
        step = self.find(which, most)
        if processes.any_process(processes.of_first(step or 0) != (step or 0)):
            raise RunFailed(f"{self.run}: processes found different checkpoints; start them again")
        if step is None:
            return None
        meta, now = self._meta_of_state(step), self.identity | {"arrays": shapes_of(fresh)}
        check_fits(meta, now, self.run, self._continues)
        self.identity["started"] = meta["started"]
        parts = self._read(step, jax.tree.map(ocp.utils.to_shape_dtype_struct, _parts(fresh)))
        self.step = step
        return Saved(fresh._replace(**parts), meta)

    def restore_adapters(self) -> dict[str, peft.Adapter] | None:
        """Returns the newest adapters by name, of any settings; None without a checkpoint."""
        step = self.find("latest")
        if step is None:
            return None
        meta = self._meta_of_state(step)
        policies = jax.device_get(self._read(step)["policies"])
        rank, alpha = (meta["config"]["lora"][key] for key in ("rank", "alpha"))
        owners = dict.fromkeys(zip(meta["on"], meta["adapters"], strict=True))
        return {
            folder_of(name, base, several=len(policies) > 1): peft.Adapter(
                {
                    (target, layer): (ab["a"][n, layer], ab["b"][n, layer])
                    for target, ab in policy["adapters"].items()
                    for layer in range(ab["a"].shape[1])
                },
                rank,
                alpha / rank,
            )
            for base, policy in policies.items()
            for n, name in enumerate(name for on, name in owners if on == base)
        }

    def _read(self, step: int, like: Any = None) -> Any:
        """Reads the arrays of a step, placed like these, or as they were saved."""
        with (
            ocp.StandardCheckpointer() as reader,
            _plainly_named(self._folder / str(step)) as saved,
        ):
            return reader.restore(saved / _STATE, like)

    def drop_after(self, step: int) -> None:
        """Removes later checkpoints, the newest first, so that no restart begins at one of them."""
        self._held, self.step = None, step
        if jax.process_index() == 0:
            for later in sorted((s for s in self.steps if s > step), reverse=True):
                self._remove(later)

    def clean(self) -> None:
        """Removes drafts of killed saves. Only the process that holds the lock may call this."""
        if self._folder.is_dir() and jax.process_index() == 0:
            for draft in self._folder.glob(f"{DRAFT}*"):
                shutil.rmtree(draft, ignore_errors=True)

    def _write(self, step: int, arrays: TrainState, meta: dict[str, Any], good: int | None) -> None:
        self.run.stat()  # a run directory that vanished is not made anew
        try:
            with whole_folder(self._folder / str(step)) as draft:
                _check_space(draft, arrays)
                with _plainly_named(draft) as folder:
                    _write_arrays(folder / _STATE, _parts(arrays))
                meta["saved"] = time.strftime("%FT%TZ", time.gmtime())
                jsonlines.write(draft / _META, [json.dumps(meta)])
        except ValueError as error:  # how tensorstore reports any failure of the file system
            code = re.search(r"os_error_code='(\d+)'", str(error))
            why = os.strerror(int(code[1])) if code else " ".join(str(error).split())[:200]
            raise cannot_write(self.run, why) from error
        self._damaged.discard(step)
        self._retain(good)

    def _retain(self, good: int | None) -> None:
        """Removes all checkpoints but the newest, the best and the last good one."""
        metrics = self._metrics(step for step in self.steps if step not in self._damaged)
        kept: set[int | None] = set(list(metrics)[-self._keep :])
        if self._best is not None:
            kept.add(_best(metrics))
        if good is not None:
            kept.add(max((step for step in metrics if step <= good), default=None))
        for step in set(self.steps) - kept:
            self._remove(step)

    def _remove(self, step: int) -> None:
        remove(self._folder / str(step))
        self._storage.remove(f"checkpoints/{step}")

    def _metrics(self, steps: Iterator[int]) -> dict[int, float | None]:
        """Returns the metric of each of these checkpoints that can be read."""
        metrics = {}
        for step in steps:
            with contextlib.suppress(ValueError):
                metrics[step] = self._meta(step).get("metric")
        return metrics

    def _is_intact(self, step: int) -> bool:
        """Compares every file with the manifest; logs the first difference once."""
        if step in self._damaged:
            return False
        self._storage.fetch_checkpoint(step)
        if wrong := damage(self._folder / str(step)):
            self._damaged.add(step)
            self.skipped.append(f"checkpoint {step} is not intact ({wrong}) and is skipped")
            LOGGER.warning("%s: %s", self.run, self.skipped[-1])
        return wrong is None

    def _meta_of_state(self, step: int) -> dict[str, Any]:
        """Returns the settings of a state that this release can read."""
        meta = self._meta(step)
        if not {"bases", "on", "started"} <= meta.keys():
            raise BadInput(
                f"{self.run}: expected checkpoints of {_OLDEST} or later, got older ones; use this "
                f"run with {_OLDEST}, or take another --run.dir"
            )
        return meta

    def _meta(self, step: int) -> dict[str, Any]:
        return foreign.read_settings(self._folder / str(step) / _META)


class SaveSchedule:
    """When to save: every ``save_every`` steps, after ``save_minutes``, and after the last step."""

    def __init__(self, settings: config_lib.Run, now: Callable[[], float] = time.monotonic):
        self._settings, self._now = settings, now
        self._saved = now()

    def is_due(self, done: int) -> bool:
        """True where this step must be saved; the minutes then start anew."""
        s, now = self._settings, self._now()
        is_late = s.save_minutes > 0 and now - self._saved >= 60 * s.save_minutes
        is_due = done % s.save_every == 0 or done == s.steps or is_late
        self._saved = now if is_due else self._saved
        return is_due


def shapes_of(state: Any) -> dict[str, str]:
    """Returns type and shape of every array by its path: ``{".step": "int32[]", ...}``."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {
        jax.tree_util.keystr(path): f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
        for path, leaf in leaves
    }


def _parts(state: TrainState) -> dict[str, Any]:
    """Returns the fields of a state as they are saved: without those that are empty."""
    fields = state._asdict().items()
    return {name: part for name, part in fields if not isinstance(part, tuple | dict) or part}


def _best(metrics: Mapping[int, float | None]) -> int | None:
    """Returns the step with the highest metric; among equal metrics the newest step."""
    known = [(value, step) for step, value in metrics.items() if value is not None]
    return max(known)[1] if known else None


def _check_space(folder: Path, arrays: TrainState) -> None:
    """Raises ``OSError`` where the arrays do not fit on the disk.

    An Orbax write that fails half-way prints a traceback for each file that it began.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, sum(x.nbytes for x in jax.tree.leaves(arrays)))


@contextlib.contextmanager
def _plainly_named(folder: Path) -> Iterator[Path]:
    """Gives another path of a folder. Orbax and tensorstore read ``[a]``, backslashes and ``gs:``
    in a path as patterns, and then write to one place and look for it in another."""
    with tempfile.TemporaryDirectory() as temporary:
        link = Path(temporary) / "checkpoint"
        link.symlink_to(folder)
        yield link


def _write_arrays(folder: Path, arrays: Mapping[str, Any]) -> None:
    """Writes the arrays from this process alone, without the log lines of Orbax, and reads them
    again: what cannot be opened is not saved.

    Raises:
        ValueError: what is read is not what was written.
    """
    alone = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0})
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as writer:
            writer.save(folder, args=ocp.args.StandardSave(arrays))
            again = writer.restore(folder, args=ocp.args.StandardRestore(arrays))
    finally:
        logger.setLevel(level)
    pairs = zip(jax.tree.leaves(arrays), jax.tree.leaves(again), strict=True)
    if any(x.tobytes() != np.asarray(y).tobytes() for x, y in pairs):
        raise ValueError("what was written differs when it is read")
