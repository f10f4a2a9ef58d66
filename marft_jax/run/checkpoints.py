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
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from marft_jax.errors import BadInput, RunFailed
from marft_jax.interop import peft
from marft_jax.learning.learner import TrainState
from marft_jax.parallel import processes
from marft_jax.run import files
from marft_jax.run.files import (
    DRAFT,
    MANIFEST,
    explained,
    manifest_of,
    remove,
    write_synced,
)
from marft_jax.run.identity import check_identity, check_shapes

LOGGER = logging.getLogger("marft_jax")

Which = int | Literal["latest", "best"]

_STATE, _META = "state", "meta.json"


class Saved(NamedTuple):
    """What a checkpoint holds.

    Attributes:
        state: the training state, laid out as asked.
        guard: the guard's memory, plain values.
        metric: the value by which the best is chosen; None where none was known.
        config: the settings of the run when it was saved, by section.
        team: the team then, see ``identity.described``; None where it was not saved yet.
    """

    state: TrainState
    guard: Mapping[str, Any]
    metric: float | None
    config: Mapping[str, Any]
    team: Mapping[str, Any] | None = None


class _Held(NamedTuple):
    """A finished step in the host's memory, as it will be written."""

    step: int
    arrays: TrainState
    meta: dict[str, Any]
    good: int | None


class Checkpoints:
    """The folder ``checkpoints/`` of a run; a context manager that saves what it holds at the end.

    The last finished step is held in the host's memory, whatever the devices do with their arrays
    meanwhile: so it can be saved at any moment, by any thread, and is whatever ends the run.

    Args:
        directory: the run directory.
        identity: what the saved arrays belong to, as ``identity_of`` gives it.
        keep: how many of the newest stay, beside the best.
        best: the metric by which one is the best; None keeps no best.

    Attributes:
        identity: as given.
        skipped: what was said about checkpoints that are not intact.
    """

    def __init__(
        self, directory: str | Path, identity: Mapping[str, Any], keep: int, best: str | None = None
    ):
        self._run = Path(directory).absolute()
        self._folder = self._run / "checkpoints"
        self.identity, self._keep, self._best = dict(identity), keep, best
        self.skipped: list[str] = []
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._saving: Future[None] | None = None
        self._saved: int | None = None
        self._held: _Held | None = None
        self._lock = threading.RLock()
        self._broken: set[int] = set()

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
        """The steps that have a checkpoint, intact or not."""
        if not self._folder.is_dir():
            return []
        return sorted(int(p.name) for p in self._folder.iterdir() if p.name.isdecimal())

    @property
    def latest(self) -> int | None:
        """The newest step with an intact checkpoint, if any."""
        return self.find("latest")

    def find(self, which: Which, most: int | None = None) -> int | None:
        """The step of the intact checkpoint that is asked for; None where there is none.

        Args:
            which: a step, the newest, or that with the best metric.
            most: only those of this step or an earlier one.
        """
        self.wait()
        intact = (
            step
            for step in reversed(self.steps)
            if (most is None or step <= most) and which in (step, "latest", "best")
            if self._is_intact(step)
        )
        if which != "best":
            return next(intact, None)
        return self._best_of(intact)

    def hold(
        self,
        step: int,
        state: TrainState,
        guard: Mapping[str, Any] | None = None,
        metric: float | None = None,
        good: int | None = None,
    ) -> None:
        """Copies a finished step to the host; arrays may be donated as soon as this returns.

        Args:
            step: training steps done.
            state: all that training changes.
            guard: the guard's memory.
            metric: the value by which the best is chosen, the higher the better.
            good: where the guard may have to go back to: that step's checkpoint stays as well.
        """
        if jax.process_index() > 0:  # the state is replicated: one process has all of it
            return
        # A copy: on a CPU, what the device gives is its own memory, which the next step overwrites.
        arrays = jax.tree.map(lambda x: np.array(jax.device_get(x)), state)
        metric = metric if metric is not None and np.isfinite(metric) else None
        meta = self.identity | {"metric": metric, "step": step}
        meta["guard"] = copy.deepcopy(dict(guard or {}))  # it changes while this is written
        self._held = _Held(step, arrays, meta, good)

    def save(self, step: int, state: TrainState, *more: Any, **named: Any) -> None:
        """Holds a finished step, as ``hold`` does, and starts saving it in the background.

        Raises:
            RunFailed: the save before it could not be finished.
        """
        self.hold(step, state, *more, **named)
        self.save_held()

    def save_held(self) -> None:
        """Starts saving what is held in the background, where it is not saved yet."""
        with self._lock:
            held = self._held
            if held is not None and held.step != self._saved:
                self.wait()
                self._saved = held.step
                self._saving = self._thread.submit(self._write, *held)

    def flush(self) -> None:
        """Saves what is held and waits until it is on the disk.

        Raises:
            RunFailed: it could not be saved.
        """
        with self._lock:
            self.save_held()
            self.wait()

    def wait(self) -> None:
        """Waits for the save in progress.

        Raises:
            RunFailed: it could not be finished.
        """
        with self._lock:
            saving, self._saving = self._saving, None
            if saving is not None:
                with explained(self._run):
                    saving.result()

    def check(self) -> None:
        """Raises what ``wait`` would raise, without waiting."""
        if self._saving is not None and self._saving.done():
            self.wait()

    def restore(
        self, fresh: TrainState, which: Which = "latest", most: int | None = None
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
        check_identity(meta, self.identity, str(self._run))
        check_shapes(meta["arrays"], shapes_of(fresh), str(self._run))
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, fresh)
        with ocp.StandardCheckpointer() as reader:
            state = reader.restore(self._folder / str(step) / _STATE, abstract)
        return Saved(state, meta["guard"], meta["metric"], meta["config"], meta.get("team"))

    def restore_adapters(self) -> dict[str, peft.Adapter] | None:
        """The newest adapters by name, whatever they were trained with; None without any."""
        step = self.find("latest")
        if step is None:
            return None
        meta = self._meta(step)
        with ocp.StandardCheckpointer() as reader:
            found = reader.restore(self._folder / str(step) / _STATE)["adapters"]
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
        self._saved = self._held = None
        if jax.process_index() == 0:
            for later in sorted((s for s in self.steps if s > step), reverse=True):
                remove(self._folder / str(later))

    def set_history_aside(self) -> list[str]:
        """Moves what no checkpoint covers out of the way of a run that begins anew.

        Returns:
            A line that says where to, if there was anything.

        Raises:
            BadInput: there are checkpoints, but none is intact.
        """
        if self.steps:
            raise BadInput(
                f"{self._run}: none of its checkpoints ({', '.join(map(str, self.steps))}) is "
                f"intact: {self.skipped[-1]}; bring one back from a copy, move checkpoints/ away "
                "to begin anew, or choose another --run.dir"
            )
        if jax.process_index() > 0 or (aside := files.set_aside(self._run)) is None:
            return []
        return [f"no checkpoint was saved yet: what is there of an earlier start is now in {aside}"]

    def clean(self) -> None:
        """Removes what a killed save left behind. Only for the process that holds the lock."""
        if self._folder.is_dir() and jax.process_index() == 0:
            for draft in self._folder.glob(f"{DRAFT}*"):
                shutil.rmtree(draft, ignore_errors=True)

    def _write(self, step: int, arrays: TrainState, meta: dict[str, Any], good: int | None) -> None:
        draft, final = self._folder / f"{DRAFT}{step}", self._folder / str(step)
        self._folder.parent.stat()  # a run directory that vanished is not made anew
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            alone = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0})
            with (
                _without_tracebacks(),
                ocp.Checkpointer(
                    ocp.StandardCheckpointHandler(multiprocessing_options=alone),
                    multiprocessing_options=alone,
                ) as writer,
            ):
                writer.save(draft / _STATE, args=ocp.args.StandardSave(arrays))
            meta = meta | {
                "arrays": shapes_of(arrays),
                "saved": time.strftime("%FT%TZ", time.gmtime()),
            }
            write_synced(draft / _META, meta)
            write_synced(draft / MANIFEST, manifest_of(draft))
            if final.exists():  # a damaged one, or one that was dropped in memory only
                remove(final)
            os.replace(draft, final)
            files.sync(self._folder)
        except ValueError as error:  # how tensorstore reports any failure of the file system
            shutil.rmtree(draft, ignore_errors=True)
            code = re.search(r"os_error_code='(\d+)'", str(error))
            why = os.strerror(int(code[1])) if code else " ".join(str(error).split())[:200]
            raise files.cannot_write(self._run, why) from error
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        self._broken.discard(step)
        self._retain(good)

    def _retain(self, good: int | None) -> None:
        """Removes all but the newest, the best and the last good one, once the new one is safe."""
        intact = [s for s in self.steps if s not in self._broken and self._is_readable(s)]
        kept: set[int | None] = set(intact[-self._keep :])
        if self._best is not None:
            kept.add(self._best_of(intact))
        if good is not None:
            kept |= set([step for step in intact if step <= good][-1:])
        for step in set(self.steps) - kept:
            remove(self._folder / str(step))

    def _best_of(self, steps: Iterable[int]) -> int | None:
        """The step with the highest metric, of equal ones the newest."""
        metrics = {step: self._meta(step).get("metric") for step in steps}
        known = [(value, step) for step, value in metrics.items() if value is not None]
        return max(known)[1] if known else None

    def _is_readable(self, step: int) -> bool:
        try:
            return bool(self._meta(step))
        except (OSError, ValueError):
            return False

    def _is_intact(self, step: int) -> bool:
        """Whether every file is as it was written; says so once where it is not."""
        if step in self._broken:
            return False
        wrong = files.damage(self._folder / str(step))
        if wrong:
            self._broken.add(step)
            self.skipped.append(f"checkpoint {step} is not intact ({wrong}) and is skipped")
            LOGGER.warning("%s: %s", self._run, self.skipped[-1])
        return wrong is None

    def _meta(self, step: int) -> dict[str, Any]:
        return json.loads((self._folder / str(step) / _META).read_text("utf-8"))


def shapes_of(state: Any) -> dict[str, str]:
    """Path to type and shape of every array: ``{".step": "int32[]", ...}``."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {
        jax.tree_util.keystr(path): f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
        for path, leaf in leaves
    }


@contextlib.contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Orbax logs what it raises; it is told once, by who catches it."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
