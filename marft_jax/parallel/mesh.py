"""Makes a named mesh of devices, and places arrays on it.

A mesh always has three axes: ``data`` (rows), ``fsdp`` (rows, and a share of every matrix) and
``tensor`` (a share of every matrix). One device is the mesh (1, 1, 1). Adapters and critic are
replicated; the frozen base follows ``LOGICAL_AXES``. With ``mesh.rollout`` there are two meshes
without a common device: the mesh that plays holds a copy of the base and receives adapters.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from marft_jax.errors import BadInput

if TYPE_CHECKING:
    from marft_jax.settings import config as config_lib

AXES = ("data", "fsdp", "tensor")
_ROW_AXES = ("data", "fsdp")
ROWS = P(_ROW_AXES)
_LANES = 128  # of a TPU's tile
PLACES = "places"  # names a vmap over the places along ``data``

LOGICAL_AXES: Mapping[str | None, str | tuple[str, ...] | None] = {
    "model": "fsdp",
    "heads": "tensor",
    "hidden": "tensor",
    "vocabulary": "tensor",
    "expert": ("fsdp", "tensor"),
    "piece": None,
    None: None,
}
"""Axes of the base's tensors, as the decoder's parts name them, to axes of the mesh."""


def make_meshes(
    config: config_lib.Mesh, devices: Sequence[Any] | None = None, per_process: int | None = None
) -> tuple[Mesh, Mesh]:
    """Makes the mesh that learns and the mesh that plays: the same mesh unless ``rollout`` is set.

    Every process has a share of both; its last devices play. For the arguments see ``make_mesh``.

    Raises:
        BadInput: see ``make_mesh``; or the processes cannot share those that play.
    """
    if not config.rollout:
        mesh = make_mesh(config, devices, per_process)
        return mesh, mesh
    devices = jax.devices() if devices is None else devices
    here = per_process or _of_first(devices)
    shape = (*config.rollout, 1, 1)[: len(AXES)]
    processes, asked = len(devices) // here, math.prod(shape)
    apart = asked // processes
    if len(config.rollout) > len(AXES) or asked % processes or not 0 < apart < here:
        asked_for = " ".join(map(str, config.rollout))
        raise BadInput(
            f"--mesh.rollout: expected data, or data, fsdp and tensor, of as many devices of each "
            f"of {processes} processes and fewer than its {here}, got {asked_for}"
        )
    by_process = np.asarray(devices).reshape(processes, here)
    data, fsdp, tensor = shape
    playing = dataclasses.replace(config, data=data, fsdp=fsdp, tensor=tensor, rollout=())
    return (
        make_mesh(config, by_process[:, :-apart].ravel().tolist(), here - apart),
        make_mesh(playing, by_process[:, -apart:].ravel().tolist(), apart, "--mesh.rollout"),
    )


def make_mesh(
    config: config_lib.Mesh,
    devices: Sequence[Any] | None = None,
    per_process: int | None = None,
    flag: str = "--mesh",
) -> Mesh:
    """Makes the mesh of ``config`` over all devices of all processes.

    Args:
        devices: devices, those of the first process first; all devices by default.
        per_process: devices of a process; by default counted from the devices.
        flag: name of the setting in messages.

    Raises:
        BadInput: the axes do not multiply to the number of devices, more than one is -1, or a copy
            of the base would lie in several processes.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [config.data, config.fsdp, config.tensor]
    known = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) == 1 and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if -1 in sizes or math.prod(sizes) != len(devices):
        asked = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
        n = len(devices)
        pairs = ((d, f) for d in range(1, n + 1) for f in range(1, n + 1) if n % (d * f) == 0)
        possible = ", ".join(f"({d}, {f}, {n // (d * f)})" for d, f in pairs)
        left = " that --mesh.rollout leaves" if config.rollout else ""
        raise BadInput(
            f"{flag}: expected data x fsdp x tensor = {len(devices)} devices{left}, got {asked}; "
            f"possible: {possible}"
        )
    here = per_process or _of_first(devices)
    if here % (sizes[1] * sizes[2]):
        raise BadInput(
            f"{flag}: fsdp x tensor = {sizes[1] * sizes[2]} devices share a copy of the base, "
            f"expected a divisor of the {here} devices of a process; make data larger"
        )
    return Mesh(np.asarray(devices).reshape(sizes), AXES)


def check_heads(mesh: Mesh, heads: int) -> None:
    """Checks that ``tensor`` splits the model into whole heads, as parts of heads would need a sum
    of scores in each layer.

    Raises:
        BadInput: it does not; the message names a mesh that does.
    """
    tensor = mesh.shape["tensor"]
    if heads % tensor:
        fits = math.gcd(heads, tensor)
        raise BadInput(
            f"--mesh.tensor: expected a divisor of the model's {heads} query heads, got {tensor}; "
            f"--mesh.tensor {fits} leaves {tensor // fits} times as many places along data"
        )


def _of_first(devices: Sequence[Any]) -> int:
    """Counts the devices of the first process; every process has this number."""
    return sum(device.process_index == devices[0].process_index for device in devices)


def parts(mesh: Mesh, sizes: Sequence[int], bases: int) -> list[Mesh]:
    """Divides a process's part of the mesh that plays along ``data``, into a part for each base.

    Args:
        sizes: places of each part (``mesh.bases``); without sizes each base has the whole mesh.

    Raises:
        BadInput: the sizes are not one for each base, or their sum is not that of the places.
    """
    if sizes and (len(sizes) != bases or sum(sizes) != len(mesh.devices)):
        raise BadInput(
            f"--mesh.bases: expected {bases} numbers, one for each base, whose sum is "
            f"{len(mesh.devices)} (the places of a process along data), got "
            f"{' '.join(map(str, sizes))}; change it or --mesh.data"
        )
    ends = np.cumsum(sizes)[:-1]
    return [Mesh(part, AXES) for part in np.split(mesh.devices, ends)] if sizes else [mesh] * bases


def placed(tree: Any, mesh: Mesh) -> Any:
    """Places arrays on this process's part of a mesh, or on some of its ``data`` places.

    Args:
        tree: arrays that are not split along ``data``. What lies on these devices is not copied;
            what does not is replicated, and copied.
    """
    there = set(mesh.devices.flat)

    def place(x: jax.Array) -> jax.Array:
        if x.sharding.device_set == there:
            return x
        if not there <= x.sharding.device_set:
            return jax.device_put(x.addressable_data(0), replicated(mesh))
        assert isinstance(x.sharding, NamedSharding)
        pieces = [shard.data for shard in x.addressable_shards if shard.device in there]
        sharding = NamedSharding(mesh, x.sharding.spec)
        return jax.make_array_from_single_device_arrays(x.shape, sharding, pieces)

    return jax.tree.map(place, tree)


def put(tree: Any, sharding: NamedSharding) -> Any:
    """Places host arrays, which every process has; each process holds its parts of them."""
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def place(x: np.ndarray) -> jax.Array:
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(place, tree)


def fetch(tree: Any) -> Any:
    """Copies whole arrays to the host, from all processes. Every process must call it."""

    def whole(x: Any) -> np.ndarray:
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            assert isinstance(x.sharding, NamedSharding)
            x = _gather(x.sharding.mesh)(x)
        return np.asarray(x)

    return jax.tree.map(whole, tree)


def from_all(x: np.ndarray) -> np.ndarray:
    """Stacks the arrays of all processes, of equal shapes. Every process must call it."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.asarray([first[process] for process in sorted(first)]), "processes")
    split = NamedSharding(mesh, P("processes"))
    return fetch(jax.make_array_from_process_local_data(split, x[None]))


@functools.cache
def _gather(mesh: Mesh) -> Any:
    return serialised(mesh, jax.jit(lambda x: x, out_shardings=replicated(mesh)))


def with_mesh(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that ``jax.sharding.get_abstract_mesh`` gives this mesh in its trace."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args, **kwargs)

    return run


def serialised(mesh: Mesh, program: Any) -> Any:
    """Serialises the calls of a compiled function with those of other threads, on a mesh with
    several devices of this process. Each device must get the programs in the same order; else two
    programs that exchange data would wait for each other forever."""
    here = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return program if len(here) == 1 else _Locked(program)


class _Locked:
    launch = threading.Lock()

    def __init__(self, program: Any):
        self._program = program

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.launch:
            return self._program(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


def row_axes() -> tuple[str, ...]:
    """Returns the axes that split the leading dimension in code that is traced: without ``data``
    under a vmap over its places."""
    try:
        jax.lax.axis_size(PLACES)
    except NameError:
        return _ROW_AXES
    return _ROW_AXES[1:]


def row_shards(mesh: Mesh) -> int:
    """Returns the number of parts that the rows of a batch are split into."""
    return places(mesh, _ROW_AXES)


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding in which every device holds the whole array."""
    return NamedSharding(mesh, P())


def rows(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """Returns the sharding that splits dimension ``axis`` over the devices that share a batch."""
    return NamedSharding(mesh, P(*[None] * axis, *ROWS))


def base_sharding(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """Returns the sharding of a tensor of the base with these logical axes.

    A dimension is replicated where its axis of the mesh does not divide it, as are the layers of a
    stack, which come first.
    """
    spec = (*[None] * (len(shape) - len(axes)), *(LOGICAL_AXES[axis] for axis in axes))
    fitted = [
        axis if axis is not None and size % places(mesh, axis) == 0 else None
        for axis, size in zip(spec, shape, strict=True)
    ]
    return NamedSharding(mesh, P(*fitted))


def base_format(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> Any:
    """``base_sharding``, with the order in memory where it matters.

    A TPU turns the last two axes of an array round where that fills its tiles better, and each
    program that picks experts from a stack would turn all of the stack back. Scales, whose last
    axis is short, stay turned.
    """
    where = base_sharding(mesh, axes, shape)
    on_tpu, picked = mesh.devices.flat[0].platform == "tpu", "expert" in axes
    if not on_tpu or not picked or shape[-1] < _LANES:
        return where
    return Format(Layout(tuple(range(len(shape)))), where)


def in_order(axes: Sequence[str | None], array: Any) -> Any:
    """A placed tensor of the base, in the order of ``base_format``."""
    where = getattr(array, "sharding", None)
    if not isinstance(where, NamedSharding) or not isinstance(where.mesh, Mesh):
        return array
    form = base_format(where.mesh, axes, array.shape)
    return array if form == where else jax.jit(lambda x: x, out_shardings=form)(array)


def places(mesh: Mesh | AbstractMesh, axes: str | Sequence[str]) -> int:
    """Returns the number of parts of what is split over one axis or several."""
    return math.prod(mesh.shape[axis] for axis in ([axes] if isinstance(axes, str) else axes))


def placer(mesh: Mesh) -> Callable[[Sequence[str | None], Any], jax.Array]:
    """Returns a function that places a tensor of the base, with its logical axes, on the mesh."""

    def place(axes: Sequence[str | None], array: Any) -> jax.Array:
        return in_order(axes, put(array, base_sharding(mesh, axes, array.shape)))

    return place
