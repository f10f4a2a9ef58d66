"""Named hardware: its devices, which host each belongs to, and what a chip can do.

``jax.experimental.topologies`` compiles for chips that are not there: for TPUs through libtpu, for
GPUs through JAX's plugin, which needs no driver for it. ``cpu:HOSTSxDEVICES`` is that many virtual
CPU devices, with hosts by name only.
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

# libtpu shall neither ask the cloud which machine this is, nor keep its chips from another process.
_NO_MACHINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_HOW = "v5e:4x4, v5p:2x2x4, v6e:8x8; h100:8, h100:2x8, cpu:8 or cpu:2x4 (hosts x devices)"


class Topology(NamedTuple):
    """Devices to compile for.

    Attributes:
        devices: host by host.
        host: of one host, as a topology of its own: a process's programs are compiled for it.
        hosts: how many there are.
        chip: None for virtual devices, which have no speed of their own.
    """

    name: str
    devices: Sequence[Any]
    host: Sequence[Any]
    hosts: int
    chip: Chip | None

    @property
    def per_host(self) -> int:
        """Chips of a host, which has one process."""
        return len(self.devices) // self.hosts


def find_topology(name: str) -> Topology:
    """The hardware of that name; from here on JAX leaves an accelerator of this machine alone.

    Raises:
        BadInput: no such chip or shape, or nothing here that compiles for it.
    """
    jax.config.update("jax_platforms", "cpu")
    kind, _, shape = name.partition(":")
    numbers = re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape)
    sizes = [int(size) for size in shape.split("x")] if numbers else []
    if kind in TPUS and sizes:
        return _tpu(name, kind)
    if kind not in ("cpu", *GPUS) or len(sizes) not in (1, 2):
        raise BadInput(f"--topology: expected {_HOW}, got {name!r}; GPUs are {', '.join(GPUS)}")
    hosts, each = [1, *sizes][-2:]
    return _virtual(name, hosts, each) if kind == "cpu" else _gpus(name, kind, hosts, each)


def _virtual(name: str, hosts: int, each: int) -> Topology:
    with contextlib.suppress(RuntimeError):  # JAX has started: what is there must do
        jax.config.update("jax_num_cpu_devices", hosts * each)
    devices = jax.devices("cpu")
    if len(devices) < hosts * each:
        raise BadInput(
            f"--topology {name}: JAX has started with {len(devices)} CPU devices; set "
            f"JAX_NUM_CPU_DEVICES={hosts * each} before"
        )
    return Topology(name, devices[: hosts * each], devices[:each], hosts, None)


def _gpus(name: str, kind: str, hosts: int, each: int) -> Topology:
    gpu = GPUS[kind]

    def of(hosts: int) -> Sequence[Any]:
        how = dict(target_config=gpu.described(), topology=f"1x{hosts}x{each}")
        return topologies.get_topology_desc(platform="cuda", **how).devices

    try:
        return Topology(name, of(hosts), of(1), hosts, gpu.chip)
    except (RuntimeError, NotImplementedError) as error:
        raise BadInput(
            f'--topology {name}: no GPU compiler here; pip install "marft_jax[gpu-plans]"'
        ) from error


def _tpu(name: str, kind: str) -> Topology:
    devices = _devices(name)
    first = [device for device in devices if device.process_index == 0]
    coordinates = list(zip(*(device.coords for device in first), strict=True))
    sizes = [max(along) - min(along) + 1 for along in coordinates][: 2 + (kind == "v5p")]
    alone = first if len(first) == len(devices) else _devices(f"{kind}:{'x'.join(map(str, sizes))}")
    return Topology(name, devices, alone, len(devices) // len(first), TPUS[kind])


def _devices(name: str) -> Sequence[Any]:
    for variable, value in _NO_MACHINE.items():
        os.environ.setdefault(variable, value)
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except RuntimeError as error:
        why = " ".join(str(error).split())
        if re.search("libtpu|not installed|Unable to initialize", why):
            raise BadInput(
                f'--topology {name}: no TPU compiler here; pip install "marft_jax[tpu]"'
            ) from error
        raise BadInput(f"--topology: expected {_HOW}, got {name!r}: {why:.160}") from error
    return found.devices
