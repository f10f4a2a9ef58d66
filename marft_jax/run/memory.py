"""Estimates the memory of a training before anything is allocated."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from marft_jax.errors import BadInput
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.models.lora import adapted
from marft_jax.settings.config import Config, Model, Rollout
from marft_jax.team.profiles import Profile

_BITS = {"int8": 8, "int4": 4.5, "nf4": 4.5}
_CGROUP = Path("/sys/fs/cgroup/memory.max")
_WORTH_SAYING = 0.01  # share of a device's memory


def least(
    config: Config,
    model: Model,
    shape: DecoderConfig,
    context: int,
    members: Sequence[Profile],
    mesh: Mesh,
) -> dict[str, float]:
    """Returns the bytes of a device that a base and its members take at least, by what they hold.

    ``python -m marft_jax.plan`` compiles the programs, and so knows their memory too.

    Args:
        context: longest prompt and action together, in tokens.
    """
    dtype = jnp.dtype(model.dtype)
    matrices = [matrix for same in shape.matrices().values() for matrix in same]
    tables = (1 if shape.tie_embeddings else 2) * shape.vocab_size * shape.d_model
    bits = _BITS.get(model.quantize, 8 * dtype.itemsize)
    weights = sum(x.weights for x in matrices) * bits / 8 + tables * dtype.itemsize
    shared, adaptable = config.lora.mode == "shared", shape.adaptable()
    pairs = [x for name in adapted(shape, config.lora.targets) for x in adaptable[name]]
    adapter = 4 * config.lora.rank * sum(math.prod((*x.stack, x.d_in + x.d_out)) for x in pairs)
    names = {"" if shared else who.adapter or who.name: who.trainable for who in members}
    # what learns has a gradient and Adam's two moments; a lag keeps what samples the steps ahead
    copies = sum((4 if learns else 1) + config.rollout.lag for learns in names.values())
    sizes = {"weights": weights / (mesh.shape["fsdp"] * mesh.shape["tensor"])}
    sizes["adapters"] = copies * adapter
    if isinstance(config.rollout, Rollout):
        slots = min(config.rollout.slots, config.algo.episodes)
        cache = jax.eval_shape(lambda: shape.init_cache(slots, context, dtype))
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
        sizes["cache"] = held / len(jax.devices())
    return sizes


def check(needed: Mapping[str, float], mesh: Mesh, agents: int, rank: int) -> str:
    """Says in a line what is needed of what is there; "" where that is next to nothing.

    Raises:
        BadInput: the device, or the machine of devices that are CPUs, has less.
    """
    total, limit = sum(needed.values()), limit_of(mesh)
    parts = ", ".join(f"{name} {size / 1e9:.2g}" for name, size in needed.items())
    line = f"memory: at least {total / 1e9:.2g} GB of {limit / 1e9:.3g} GB a device ({parts})"
    if total > limit:
        raise BadInput(
            f"--lora.rank {rank}: expected {agents} agents and their base to fit, got {line}; "
            "lower the rank, --rollout.slots or --model.context, or take fewer agents"
        )
    return line if total > _WORTH_SAYING * limit else ""


def limit_of(mesh: Mesh) -> float:
    """Returns the bytes of each device; of CPUs, its share of the machine or of the container."""
    device = mesh.local_devices[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit", math.inf)
    here = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):  # "max", or none
        here = min(here, float(_CGROUP.read_text()))
    return here / len(mesh.local_devices)
