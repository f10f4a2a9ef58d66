"""Named hardware: its devices, the host of each device, and the limits of a chip.

``jax.experimental.topologies`` compiles for chips that are not present: for TPUs through libtpu,
for GPUs through JAX's CUDA plugin, which needs no driver for that. ``cpu:HOSTSxDEVICES`` is virtual
CPU devices, grouped into hosts by name only.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from marft_jax.errors import BadInput
from marft_jax.extras.planning.chips import GPUS, TPUS, Chip

# keeps libtpu from asking the cloud about this machine, and from locking its chips
_NO_MACHINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_NAMES = (
    "v5e:4x4, v5p:2x2x4, v6e:8x8, tpu7x:2x2x1; h100:8, h100:2x8, cpu:8 or cpu:2x4 (hosts x devices)"
)


class Topology(NamedTuple):
    """Devices to compile for.

    Attributes:
        devices: all devices, host by host.
        host: the devices of one host as a topology of its own; a process's programs use it.
        hosts: number of hosts.
        chip: limits of a chip; None for virtual devices, which have none.
        compiles: False where virtual devices stand for GPUs whose compiler is missing.
    """

    name: str
    devices: Sequence[Any]
    host: Sequence[Any]
    hosts: int
    chip: Chip | None
    compiles: bool = True

    @property
    def per_host(self) -> int:
        """Chips of a host, which has one process."""
        return len(self.devices) // self.hosts


def find_topology(name: str, must_compile: bool = True) -> Topology:
    """Finds hardware by name. Afterwards JAX does not use accelerators of this machine.

    Args:
        must_compile: False: GPUs may be described without their compiler.

    Raises:
        BadInput: there is no such chip or shape, or its compiler is not installed.
    """
    jax.config.update("jax_platforms", "cpu")
    kind, _, shape = name.partition(":")
    is_shape = re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape)
    sizes = [int(size) for size in shape.split("x")] if is_shape else []
    if kind in TPUS and sizes:
        return _tpu(name, kind, len(sizes))
    if kind not in ("cpu", *GPUS) or len(sizes) not in (1, 2):
        raise BadInput(f"--topology: expected {_NAMES}, got {name!r}; GPUs are {', '.join(GPUS)}")
    hosts, each = [1, *sizes][-2:]
    if kind == "cpu":
        return _virtual(name, hosts, each)
    try:
        return _gpus(name, kind, hosts, each)
    except BadInput:
        if must_compile:
            raise
    return _virtual(name, hosts, each)._replace(compiles=False)


def _virtual(name: str, hosts: int, each: int) -> Topology:
    with contextlib.suppress(RuntimeError):  # JAX has started with its number of devices
        jax.config.update("jax_num_cpu_devices", hosts * each)
    devices = jax.devices("cpu")
    if len(devices) < hosts * each:
        raise BadInput(
            f"--topology {name}: expected {hosts * each} CPU devices, JAX has started with "
            f"{len(devices)}; set JAX_NUM_CPU_DEVICES={hosts * each}"
        )
    return Topology(name, devices[: hosts * each], devices[:each], hosts, None)


def _gpus(name: str, kind: str, hosts: int, each: int) -> Topology:
    gpu = GPUS[kind]

    def devices_of(hosts: int) -> Sequence[Any]:
        return topologies.get_topology_desc(
            platform="cuda", target_config=gpu.described(), topology=f"1x{hosts}x{each}"
        ).devices

    try:
        return Topology(name, devices_of(hosts), devices_of(1), hosts, gpu.chip)
    except (RuntimeError, NotImplementedError) as error:
        raise _no_compiler(name, "GPU", "gpu-plans") from error


def _tpu(name: str, kind: str, dimensions: int) -> Topology:
    devices = _tpu_devices(name)
    first = [device for device in devices if device.process_index == 0]
    coordinates = list(zip(*(device.coords for device in first), strict=True))
    sizes = [max(along) - min(along) + 1 for along in coordinates][:dimensions]
    of_host = f"{kind}:{'x'.join(map(str, sizes))}"
    host = first if len(first) == len(devices) else _tpu_devices(of_host)
    return Topology(name, devices, host, len(devices) // len(first), TPUS[kind])


def _tpu_devices(name: str) -> Sequence[Any]:
    for variable, value in _NO_MACHINE.items():
        os.environ.setdefault(variable, value)
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except RuntimeError as error:
        why = " ".join(str(error).split())
        if re.search("libtpu|not installed|Unable to initialize", why):
            raise _no_compiler(name, "TPU", "tpu") from error
        raise BadInput(f"--topology: expected {_NAMES}, got {name!r}: {why:.160}") from error


def _no_compiler(name: str, kind: str, extra: str) -> BadInput:
    return BadInput(f'--topology {name}: no {kind} compiler; pip install -e ".[{extra}]"')
