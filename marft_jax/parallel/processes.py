"""Trains one team with several processes: a TPU pod slice, GPU nodes, or processes of a machine.

Each process plays its share of a step's episodes on its own devices. All processes gather all
episodes and pack the same batch. The update is one program over all devices. The base is sharded
inside a process and replicated across processes, so only gradients of adapters and critic travel.
Sampled text depends only on the step, the episode and the turn, not on the number of processes.

Processes are not authenticated: any program that reaches the coordinator's port, or the ports that
device libraries open between the processes, can take part. So they need a network of their own.
Received data is parsed as JSON and checked, and never executed.
"""

from __future__ import annotations

import functools
import glob
import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from marft_jax.errors import BadInput, EpisodesFailed, RunFailed, Stopped, described, reason
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.parallel.exchange import read_part, write_part
from marft_jax.parallel.ladder import bucket
from marft_jax.types import Played, Player, Sample

if TYPE_CHECKING:
    from marft_jax.settings.config import Mesh

_TPU_DEVICES = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")


def start(config: Mesh) -> None:
    """Joins the other processes, if there are any. Call it before JAX touches a device.

    Raises:
        BadInput: settings of the processes are missing or wrong, or JAX finds no device.
    """
    _pass_over_absent_tpu()
    if config.coordinator is not None and not jax.distributed.is_initialized():
        _join(config)
    try:
        jax.devices()
    except Exception as error:  # JAX raises whatever a backend does, and an AssertionError
        asked = os.environ.get("JAX_PLATFORMS") or "auto"
        raise BadInput(
            f"JAX_PLATFORMS={asked}: expected a device to compute on, JAX found none "
            f"({described(error)}); unset JAX_PLATFORMS to use what is here, or install the "
            "device's driver and packages"
        ) from error


def _join(config: Mesh) -> None:
    """Joins the other processes; raises ``BadInput`` as ``start`` does."""
    known, seconds, who = dict[str, Any](), round(config.wait_seconds), "the other processes"
    if config.coordinator != "auto":
        known, who = _named(config), f"all {config.processes} processes"
    # JAX ends a process by itself, with an error of many lines, if another one does not come
    print(
        f"marft_jax: waiting up to {seconds} s for {who}, --mesh.coordinator {config.coordinator}; "
        "if one is missing, JAX ends this process",
        file=sys.stderr,
        flush=True,
    )
    try:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM for itself
        jax.distributed.initialize(
            **known, initialization_timeout=seconds, heartbeat_timeout_seconds=seconds
        )
    except (RuntimeError, ValueError) as error:
        raise BadInput(
            f"--mesh.coordinator {config.coordinator}: the processes did not find each other: "
            f"{described(error)}"
        ) from error


def _named(config: Mesh) -> dict[str, Any]:
    """Returns what JAX is told of processes whose addresses are settings."""
    assert config.coordinator
    host, _, port = config.coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port[:6]) < 1 << 16:
        raise BadInput(f"--mesh.coordinator {config.coordinator:.60}: expected HOST:PORT, or auto")
    if config.processes is None or config.process is None or config.process >= config.processes:
        raise BadInput(
            f"--mesh.coordinator {config.coordinator}: expected --mesh.processes N as well, and "
            f"--mesh.process below N, got {config.processes} and {config.process}"
        )
    known: dict[str, Any] = dict(
        coordinator_address=config.coordinator,
        num_processes=config.processes,
        process_id=config.process,
    )
    if host == "localhost" or host.startswith("[") or host.replace(".", "").isdecimal():
        # JAX listens at every address, as it must behind a name
        bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", config.coordinator)
        known["coordinator_bind_address"] = bind
        if config.process == 0:
            _check_address(bind)
    return known


def _check_address(address: str) -> None:
    """Raises ``BadInput`` where no port can be opened; JAX ends there with a segmentation fault."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        socket.create_server((host.strip("[]"), int(port)), family=family).close()
    except OSError as error:
        raise BadInput(
            f"--mesh.coordinator {address}: expected an address of this machine, where process 0 "
            f"runs, and a free port, got one that cannot be opened ({reason(error)})"
        ) from error


def _pass_over_absent_tpu() -> None:
    """Stops JAX from looking for a TPU if libtpu is installed, for plans, but there is no TPU. JAX
    would print pages of errors before it takes the CPU."""
    chips = any(glob.glob(devices) for devices in _TPU_DEVICES)
    other = importlib.util.find_spec("jax_plugins") or os.environ.get("JAX_PLATFORMS")
    if importlib.util.find_spec("libtpu") and not chips and not other:
        jax.config.update("jax_platforms", "cpu")


def share(count: int, processes: int) -> int:
    """Returns the most of ``count`` episodes or turns that one process plays."""
    return -(-count // processes)


def end_together(work: Callable[[], int]) -> int:
    """Does the work and returns its exit code. If it fails because another process is gone, ends
    this process with exit code 1."""
    try:
        return work()
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        why = " ".join(str(error).split())
        print(
            f"marft_jax: process {jax.process_index()}: another process failed or is gone; start "
            f"all of them again to continue from the newest checkpoint ({why:.200})",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)  # whatever waits for the others at exit would wait in vain


def is_lead() -> bool:
    """True in the process that writes logs and transcripts."""
    return jax.process_index() == 0


def any_process(flag: bool) -> bool:
    """True if ``flag`` is True in any process. Every process must call it, at the same place."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(mesh_lib.from_all(np.asarray(flag))))


def of_first(number: int) -> int:
    """Returns the number of the first process, below 2^32. Every process must call it, at the same
    place."""
    if jax.process_count() == 1:
        return number
    return int(mesh_lib.from_all(np.asarray(number, np.uint32))[0])


Collective = Callable[[Callable[[], Any]], Any]
"""Runs what all processes must run in one order, and returns its result; from any thread."""


def play_on_all(player: Player, collective: Collective) -> Player:
    """Plays on all processes, see ``PlayerOnAll``; with one process, returns the player itself."""
    return player if jax.process_count() == 1 else PlayerOnAll(player, collective)


class PlayerOnAll:
    """Plays the episodes of a step on all processes; each process gets all episodes, in task order.

    Args:
        player: plays this process's share.
        collective: runs the exchange of episodes in the same order in all processes.
    """

    def __init__(self, player: Player, collective: Collective = lambda work: work()):
        self._player, self._collective = player, collective

    def play(self, samples: Sequence[Sample], step: int) -> Played:
        """Plays as ``Rollout.play`` does; if it ends early in one process, it does so in all."""
        bounds = np.linspace(0, len(samples), jax.process_count() + 1).astype(int)
        low, high = (int(bound) for bound in bounds[jax.process_index() :][:2])
        mine, error = Played([], []), None
        try:
            if high > low:
                mine = self._player.play(samples[low:high], step)
        except (Stopped, RunFailed, BadInput) as raised:
            error = raised
        failure_here = None if error is None else [type(error).__name__, str(error)]
        parts = self._collective(functools.partial(gather, mine, failure_here))
        if error is not None:
            raise error
        for process, (_, failure) in enumerate(parts):
            if failure is not None:
                kind, text = failure
                kinds = {each.__name__: each for each in (Stopped, RunFailed)}
                raise kinds.get(kind, EpisodesFailed)(f"process {process}: {text}")
        played = [part for part, _ in parts]
        return Played(
            [episode for part in played for episode in part.episodes],
            [episode for part in played for episode in part.failed],
            mine.waited_s,
        )


def gather(mine: Played, failure: Sequence[str] | None) -> list[tuple[Played, list[str] | None]]:
    """Gathers from all processes what each played, or its failure; the first process first.

    Raises:
        RunFailed: a process sent something else.
    """
    part = np.frombuffer(write_part(mine, failure), np.uint8)
    sizes = mesh_lib.from_all(np.asarray(part.size, np.int32))
    padded = np.zeros(bucket(int(sizes.max())), np.uint8)  # few shapes: each is compiled
    padded[: part.size] = part
    parts = mesh_lib.from_all(padded)
    return [read_part(x[:size].tobytes()) for x, size in zip(parts, sizes, strict=True)]
