"""Limits of chips, from data sheets, and the description of a GPU that XLA compiles for."""

from __future__ import annotations

import os
from typing import NamedTuple

_GIB = 2**30


class Chip(NamedTuple):
    """Limits of one chip.

    Attributes:
        flops: dense bfloat16 FLOP/s; a multiply-add counts as two.
        memory: bytes that a process gets.
        bandwidth: of its memory, in bytes/s.
    """

    flops: float
    memory: float
    bandwidth: float


# Source: Google's documentation of each TPU version; memory: what libtpu gives to a program.
TPUS = {
    "v5e": Chip(197e12, 15.75 * _GIB, 819e9),
    "v5p": Chip(459e12, 95.74 * _GIB, 2765e9),
    "v6e": Chip(918e12, 31.25 * _GIB, 1638e9),
    # half a chip: JAX has a device for each of its two cores
    "tpu7x": Chip(1153.5e12, 94.75 * _GIB, 3690e9),
}


class Gpu(NamedTuple):
    """A GPU of NVIDIA.

    Attributes:
        kind: name that the driver gives.
        capability: compute capability, major and minor.
        cores: streaming multiprocessors; each has ``lanes`` for float32, runs ``threads`` at a
            time, and has ``shared`` bytes of shared memory.
        cache: bytes of the L2 cache.
        clock: in GHz.
        memory: bytes that the driver reports.
        flops, bandwidth: as of ``Chip``.
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

    @property
    def chip(self) -> Chip:
        """Its limits. By JAX's default a process gets three quarters of the memory."""
        share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75"))
        return Chip(self.flops, share * self.memory, self.bandwidth)

    def described(self) -> str:
        """Writes XLA's ``GpuTargetConfigProto``, as text."""
        major, minor = self.capability
        extension = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        return f"""
            platform_name: "CUDA"
            device_description_str: "{self.kind}"
            dnn_version_info {{ major: 9 minor: 10 }}
            runtime_version {{ major: 12 minor: 8 }}
            gpu_device_info {{
              cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
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
# Source: NVIDIA's data sheets.
GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 164 * _KIB, 40 * _MIB, 1.41,
                85.1e9, 312e12, 2.039e12),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 2048, 228 * _KIB, 50 * _MIB, 1.98,
                84.9e9, 989e12, 3.35e12),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 128, 2048, 228 * _KIB, 50 * _MIB, 1.98,
                151.4e9, 989e12, 4.8e12),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 128, 2048, 228 * _KIB, 126 * _MIB, 1.965,
                191.5e9, 2250e12, 7.7e12),
    "l40s": Gpu("NVIDIA L40S", (8, 9), 142, 128, 1536, 100 * _KIB, 96 * _MIB, 2.52,
                47.7e9, 362e12, 864e9),
    "l4": Gpu("NVIDIA L4", (8, 9), 58, 128, 1536, 100 * _KIB, 48 * _MIB, 2.04,
              23.7e9, 121e12, 300e9),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 128, 1536, 100 * _KIB, 72 * _MIB, 2.52,
                   25.3e9, 165e12, 1.008e12),
}  # fmt: skip
