"""Limits of chips, from their data sheets, and what XLA must know of a GPU to compile for it."""

from __future__ import annotations

import os
from typing import NamedTuple

_GIB = 2**30


class Chip(NamedTuple):
    """Limits of one chip.

    Attributes:
        flops: dense bfloat16 operations per second; a multiply-add counts two.
        memory: bytes that a process gets of it.
        bandwidth: of its memory, bytes per second.
        links: bytes per second that it sends inside a host, one way.
        hosts: and to other hosts: inside a slice of TPUs as fast.
        network: and between slices of TPUs.
    """

    flops: float
    memory: float
    bandwidth: float
    links: float
    hosts: float
    network: float


# Google's documentation of each TPU version; memory is what libtpu's compiler gives to a program.
TPUS = {
    "v5e": Chip(197e12, 15.75 * _GIB, 819e9, 200e9, 200e9, 3.1e9),
    "v5p": Chip(459e12, 95.74 * _GIB, 2765e9, 600e9, 600e9, 6.2e9),
    "v6e": Chip(918e12, 31.25 * _GIB, 1638e9, 400e9, 400e9, 12.5e9),
}


class Gpu(NamedTuple):
    """A GPU of NVIDIA.

    Attributes:
        kind: as its driver names it.
        capability: version of its instructions, major and minor.
        cores: streaming multiprocessors, each with ``lanes`` for float32, ``threads`` at a time,
            and ``shared`` bytes of shared memory.
        cache: bytes of its second-level cache.
        clock: in GHz.
        memory: bytes that the driver reports.
        flops, bandwidth, links, network: as of ``Chip``.
    """

    kind: str
    capability: tuple[int, int]
    cores: int
    lanes: int
    threads: int
    shared: int
    cache: int
    clock: float
    memory: float
    flops: float
    bandwidth: float
    links: float
    network: float

    @property
    def chip(self) -> Chip:
        """Its limits. A process gets three quarters of the memory, unless JAX is told otherwise."""
        share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75"))
        memory = share * self.memory
        return Chip(self.flops, memory, self.bandwidth, self.links, self.network, self.network)

    def described(self) -> str:
        """The text that XLA compiles for (``GpuTargetConfigProto``)."""
        major, minor = self.capability
        own = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        return f"""
            platform_name: "CUDA"
            device_description_str: "{self.kind}"
            dnn_version_info {{ major: 9 minor: 10 }}
            runtime_version {{ major: 12 minor: 8 }}
            gpu_device_info {{
              cuda_compute_capability {{ major: {major} minor: {minor} {own} }}
              core_count: {self.cores}
              fpus_per_core: {self.lanes}
              threads_per_core_limit: {self.threads}
              threads_per_block_limit: 1024
              threads_per_warp: 32
              thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
              block_dim_limit_x: {2**31 - 1}
              block_dim_limit_y: 65535 block_dim_limit_z: 65535
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              shared_memory_per_core: {self.shared}
              shared_memory_per_block: {48 * 1024}
              shared_memory_per_block_optin: {self.shared - 1024}
              l2_cache_size: {self.cache}
              clock_rate_ghz: {self.clock}
              memory_bandwidth: {self.bandwidth:.0f}
              device_memory_size: {self.memory:.0f}
            }}"""


_KIB, _MIB = 2**10, 2**20
# NVIDIA's data sheets; the network is that of DGX A100 (200 Gbit/s a GPU), DGX H100, H200 and B200
# (400), AWS g6 (100 for 8 L4) and g6e (400 for 8 L40S), and 10 Gbit Ethernet.
GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 164 * _KIB, 40 * _MIB, 1.41,
                85.1e9, 312e12, 2.039e12, 300e9, 25e9),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 2048, 228 * _KIB, 50 * _MIB, 1.98,
                84.9e9, 989e12, 3.35e12, 450e9, 50e9),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 128, 2048, 228 * _KIB, 50 * _MIB, 1.98,
                151.4e9, 989e12, 4.8e12, 450e9, 50e9),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 128, 2048, 228 * _KIB, 126 * _MIB, 1.965,
                191.5e9, 2250e12, 7.7e12, 900e9, 50e9),
    "l40s": Gpu("NVIDIA L40S", (8, 9), 142, 128, 1536, 100 * _KIB, 96 * _MIB, 2.52,
                47.7e9, 362e12, 864e9, 32e9, 6.25e9),
    "l4": Gpu("NVIDIA L4", (8, 9), 58, 128, 1536, 100 * _KIB, 48 * _MIB, 2.04,
              23.7e9, 121e12, 300e9, 32e9, 1.56e9),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 128, 1536, 100 * _KIB, 72 * _MIB, 2.52,
                   25.3e9, 165e12, 1.008e12, 32e9, 1.25e9),
}  # fmt: skip
