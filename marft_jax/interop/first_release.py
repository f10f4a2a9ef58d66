"""Reads the value head of the first MARFT release: ``value_head.pth``, saved by torch.

Such a file is a zip with a pickle in it, and a pickle can run any code. So neither torch nor the
plain unpickler reads it. The unpickler here knows an ordered dictionary, a tensor and the storages
of floating-point numbers, and refuses every other name before it is looked up.
Source: https://pytorch.org/docs/stable/notes/serialization.html (layout of a saved zip).
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from marft_jax.errors import BadInput
from marft_jax.formats.foreign import check_memo, readable

VALUE_HEAD = "value_head.pth"

_STORAGES = {
    "FloatStorage": np.float32,
    "DoubleStorage": np.float64,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
}


def read_value_head(file: Path) -> list[np.ndarray]:
    """Reads the kernels ``[in, out]`` of the head in float32, from the features to the value.

    Raises:
        BadInput: the file is not one that torch writes, has other contents than tensors, or its
            tensors are not a stack of linear layers without bias that ends in one value.
    """
    with readable(file, "state dict of tensors, saved by torch 1.6 or newer"):
        with zipfile.ZipFile(file) as archive:
            [listing] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            tensors = _Unpickler(archive, listing.removesuffix("data.pkl")).load()
    if not isinstance(tensors, dict) or not {*map(type, tensors.values())} <= {np.ndarray}:
        raise BadInput(f"{file}: expected a state dict of tensors, got {type(tensors).__name__}")
    kernels = [np.ascontiguousarray(x.astype(np.float32).T) for x in tensors.values()]
    shapes = [kernel.shape for kernel in kernels]
    if {*map(len, shapes)} != {2} or [s[1] for s in shapes] != [*(s[0] for s in shapes[1:]), 1]:
        raise BadInput(
            f"{file}: expected linear layers without bias, each as wide as the one before it, down "
            f"to one value; got {shapes!s:.300}"
        )
    if not all(np.isfinite(kernel).all() for kernel in kernels):
        raise BadInput(f"{file}: expected finite numbers, got some that are not")
    return kernels


class _Unpickler(pickle.Unpickler):
    """Reads a state dict and nothing else, in no more memory than its file has bytes.

    It refuses what would need more: compressed members, tensors that share a storage or are a part
    of a storage, and a memo with gaps, for which the unpickler would allocate memory.
    """

    def __init__(self, archive: zipfile.ZipFile, root: str):
        self._archive, self._root, self._seen = archive, root, set[str]()
        program = self._read("data.pkl")
        check_memo(program)
        super().__init__(io.BytesIO(program))

    def _read(self, name: str) -> bytes:
        member = self._archive.getinfo(f"{self._root}{name}")
        if name in self._seen or member.compress_type != zipfile.ZIP_STORED:
            raise ValueError("larger unpacked than packed; save it again with torch.save")
        self._seen.add(name)
        return self._archive.read(member)

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("collections", "OrderedDict"): lambda: collections.OrderedDict(),
            ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
            ("torch._utils", "_rebuild_parameter"): lambda tensor, *rest: tensor,
            **{("torch", storage): np.dtype(type_) for storage, type_ in _STORAGES.items()},
        }
        if (module, name) not in known:
            raise BadInput(
                f"{self._archive.filename}: it holds {module}.{name}, which is not loaded: only "
                "tensors are; save `head.state_dict()` alone"
            )
        return known[module, name]

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise ValueError(f"a reference to {kind!r}")
        return np.frombuffer(self._read(f"data/{int(key)}"), dtype)


def _rebuild(
    values: np.ndarray, start: int, shape: Sequence[int], stride: Sequence[int], *_: object
) -> np.ndarray:
    """Makes a tensor that is all of its storage, row by row."""
    rows = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if start or math.prod(shape) != len(values) or list(stride) != rows:
        raise ValueError("a tensor that is a view of another; save a copy of it")
    return values.reshape(shape)
