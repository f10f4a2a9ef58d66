"""The value head of the first MARFT release: ``value_head.pth``, a state dict that torch saved.

Such a file is a zip with a pickle in it, and a pickle can run any code. So torch is not asked, and
neither is the plain unpickler: the one here knows an ordered dictionary, a tensor and the storages
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
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from marft_jax.config import BadInput
from marft_jax.formats.foreign import check_memo, readable

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
            f"to one value; got {shapes!s:.300}"
        )
    if not all(np.isfinite(kernel).all() for kernel in kernels):
        raise BadInput(f"{file}: expected finite numbers, got some that are not")
    return [np.ascontiguousarray(kernel) for kernel in kernels]


def _read(file: Path) -> dict[str, np.ndarray]:
    with readable(file, "state dict of tensors, saved by torch 1.6 or newer"):
        size = file.stat().st_size
        with zipfile.ZipFile(file) as archive:
            [listing] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            read = _Unpickler(archive, listing.removesuffix("data.pkl"), size).load()
    if not isinstance(read, dict) or not all(isinstance(x, np.ndarray) for x in read.values()):
        raise BadInput(f"{file}: expected a state dict of tensors, got {type(read).__name__}")
    return read


class _Unpickler(pickle.Unpickler):
    """Reads a state dict and nothing else, into no more memory than its file has bytes.

    What would grow is refused: compressed members, tensors that repeat a storage, and a memo with
    gaps, for which the unpickler makes room.
    """

    def __init__(self, archive: zipfile.ZipFile, root: str, size: int):
        self._archive, self._root = archive, root
        self._unread = self._uncopied = size
        self._storages: dict[str, np.ndarray] = {}
        program = self._read("data.pkl")
        check_memo(program)
        super().__init__(io.BytesIO(program))

    def _read(self, name: str) -> bytes:
        member = self._archive.getinfo(f"{self._root}{name}")
        self._unread -= member.file_size
        if self._unread < 0 or member.compress_type != zipfile.ZIP_STORED:
            raise ValueError("it is larger unpacked than packed; save it again with torch.save")
        return self._archive.read(member)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _Storage(_STORAGES[name])
        known = {
            ("collections", "OrderedDict"): lambda: collections.OrderedDict(),
            ("torch._utils", "_rebuild_tensor_v2"): self._rebuild,
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
        if key not in self._storages:
            self._storages[key] = np.frombuffer(self._read(f"data/{int(key)}"), storage.dtype)
        values = self._storages[key]
        if len(values) != count:
            raise ValueError(f"a storage of {len(values)} numbers instead of {count}")
        return values

    def _rebuild(
        self,
        values: np.ndarray,
        start: int,
        shape: Sequence[int],
        stride: Sequence[int],
        *_: object,
    ) -> np.ndarray:
        """A tensor: a strided view of a storage, within its bounds."""
        last = start + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if min(start, *shape, *stride, last) < 0 or (0 not in shape and last >= len(values)):
            raise ValueError("a tensor outside of its storage")
        self._uncopied -= math.prod(shape) * values.itemsize
        if self._uncopied < 0:
            raise ValueError("its tensors are larger than the file")
        view = np.lib.stride_tricks.as_strided(
            values[start:], shape, [step * values.itemsize for step in stride], writeable=False
        )
        return view.copy()
