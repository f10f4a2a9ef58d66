"""The value head of the first MARFT release: ``value_head.pth``, a state dict that torch saved.

Such a file is a zip with a pickle in it, and a pickle can run any code. So torch is not asked, and
neither is the plain unpickler: the one here knows an ordered dictionary, a tensor and the storages
of floating-point numbers, and refuses every other name before it is looked up.
Source: https://pytorch.org/docs/stable/notes/serialization.html (layout of a saved zip).
"""

from __future__ import annotations

import collections
import io
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from marft_jax.config import BadInput

VALUE_HEAD = "value_head.pth"

_STORAGES = {
    "FloatStorage": np.dtype(np.float32),
    "DoubleStorage": np.dtype(np.float64),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
}


class _Storage(NamedTuple):
    """A storage type by its name; nothing of torch stands behind it."""

    dtype: np.dtype


def read_value_head(file: Path) -> list[np.ndarray]:
    """The head's kernels ``[in, out]`` in float32, from the features to the value.

    Raises:
        BadInput: no such file as torch writes it, something else than tensors in it, or tensors
            that are no bias-free stack of linear layers down to one value.
    """
    tensors = list(_read(file).items())
    kernels = [tensor.astype(np.float32).T for _, tensor in tensors]
    shapes = {name: tensor.shape for name, tensor in tensors}
    chained = all(kernel.ndim == 2 for kernel in kernels) and all(
        a.shape[1] == b.shape[0] for a, b in zip(kernels, kernels[1:], strict=False)
    )
    if not kernels or not chained or kernels[-1].shape[1] != 1:
        raise BadInput(
            f"{file}: expected linear layers without bias, each as wide as the one before it, down "
            f"to one value; got {shapes}"
        )
    return [np.ascontiguousarray(kernel) for kernel in kernels]


def _read(file: Path) -> dict[str, np.ndarray]:
    try:
        with zipfile.ZipFile(file) as archive:
            [listing] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            root = listing.removesuffix("data.pkl")
            read = _Unpickler(archive, root).load()
    except BadInput:
        raise
    except Exception as error:  # a damaged pickle fails in any way it likes
        raise BadInput(
            f"{file}: expected tensors saved by torch 1.6 or newer, got {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error
    if not isinstance(read, dict) or not all(isinstance(x, np.ndarray) for x in read.values()):
        raise BadInput(f"{file}: expected a state dict of tensors, got {type(read).__name__}")
    return read


class _Unpickler(pickle.Unpickler):
    """Reads a state dict and nothing else."""

    def __init__(self, archive: zipfile.ZipFile, root: str):
        super().__init__(io.BytesIO(archive.read(f"{root}data.pkl")))
        self._archive, self._root = archive, root

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _Storage(_STORAGES[name])
        known = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
            ("torch._utils", "_rebuild_parameter"): lambda tensor, *rest: tensor,
        }
        if (module, name) not in known:
            raise BadInput(
                f"{self._archive.filename}: it holds {module}.{name}, which is not loaded: only "
                "tensors are; save `head.state_dict()` alone"
            )
        return known[module, name]

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, storage, key, _, count = pid
        if kind != "storage" or not isinstance(storage, _Storage):
            raise ValueError(f"a reference to {kind!r}")
        values = np.frombuffer(self._archive.read(f"{self._root}data/{int(key)}"), storage.dtype)
        if len(values) != count:
            raise ValueError(f"a storage of {len(values)} numbers instead of {count}")
        return values


def _rebuild(
    storage: np.ndarray, start: int, shape: Sequence[int], stride: Sequence[int], *rest: object
) -> np.ndarray:
    """A tensor: a strided view of a storage, within its bounds."""
    last = start + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if min(start, *shape, *stride, last) < 0 or (0 not in shape and last >= len(storage)):
        raise ValueError("a tensor outside of its storage")
    view = np.lib.stride_tricks.as_strided(
        storage[start:], shape, [step * storage.itemsize for step in stride], writeable=False
    )
    return view.copy()
