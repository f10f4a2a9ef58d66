"""Several processes that train one team: a TPU pod slice, GPU nodes, or processes of one machine.

Each process plays its own share of a step's episodes on its own devices. The finished episodes are
handed round, so that every process packs the same batch; the update is then one program over all
devices, the base sharded inside a process and replicated across, so that of the model only
gradients of adapters and critic cross. What text is sampled depends on the step, the episode and
the turn alone, and so not on how many processes there are.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from marft_jax import config as config_lib
from marft_jax.types import Episode


def start(config: config_lib.Mesh) -> None:
    """Joins the other processes, before anything touches a device; alone it does nothing.

    Raises:
        BadInput: the processes are described incompletely, or did not all come in time.
    """
    if config.coordinator is None or jax.distributed.is_initialized():
        return
    said = (config.processes, config.process)
    if config.coordinator != "auto" and None in said:
        raise config_lib.BadInput(
            f"--mesh.coordinator {config.coordinator}: expected --mesh.processes and "
            f"--mesh.process as well, got {said[0]} and {said[1]}"
        )
    known: dict[str, Any] = {}
    if config.coordinator != "auto":
        known["coordinator_address"] = config.coordinator
        known |= {"num_processes": config.processes, "process_id": config.process}
    seconds = round(config.wait_seconds)
    try:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            **known, initialization_timeout=seconds, heartbeat_timeout_seconds=seconds
        )
    except (RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise config_lib.BadInput(
            f"--mesh.coordinator {config.coordinator}: the processes did not find each other "
            f"within {seconds} s: {why:.200}"
        ) from error


def share(count: int, processes: int) -> int:
    """The most of so many episodes, or turns, that one process plays."""
    return -(-count // processes)


def leave(error: BaseException) -> NoReturn:
    """Ends this process, with exit code 1, because another one is gone."""
    why = " ".join(str(error).split())
    print(
        f"marft_jax: process {jax.process_index()}: another process failed or is gone; start all "
        f"of them again to continue from the newest checkpoint ({why:.200})",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)  # whatever waits for the others at exit would wait in vain


def is_lead() -> bool:
    """Whether this process writes logs and transcripts."""
    return jax.process_index() == 0


def any_process(flag: bool) -> bool:
    """Whether ``flag`` is true anywhere. Every process must ask, at the same place."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def handed_round(items: Sequence[Any]) -> list[Any]:
    """The items of all processes, those of the first process first."""
    if jax.process_count() == 1:
        return list(items)
    mine = np.frombuffer(pickle.dumps(list(items)), np.uint8)
    sizes = multihost_utils.process_allgather(np.asarray(mine.size))
    padded = np.zeros(int(np.max(sizes)), np.uint8)
    padded[: mine.size] = mine
    parts = multihost_utils.process_allgather(padded)
    gathered: list[Any] = []
    for part, size in zip(parts, sizes, strict=True):
        gathered += pickle.loads(part[: int(size)].tobytes())  # written by this same program
    return gathered


def together(player: Any) -> Any:
    """Plays on all processes, see ``Together``; alone, the player itself."""
    return player if jax.process_count() == 1 else Together(player)


class Together:
    """Plays the episodes of a step on all processes; each gets all of them back, in task order.

    Args:
        player: plays this process's share.
    """

    def __init__(self, player: Any):
        self._player = player
        self.waited_s = 0.0

    def play(self, tasks: Sequence[int], step: int, *, first: int = 0) -> list[Episode]:
        """As ``Rollout.play``."""
        bounds = np.linspace(0, len(tasks), jax.process_count() + 1).astype(int)
        low, high = (int(bound) for bound in bounds[jax.process_index() :][:2])
        mine = self._player.play(tasks[low:high], step, first=first + low) if high > low else []
        self.waited_s = self._player.waited_s
        return handed_round(mine)
