"""Weights out of a GGUF file, the format of llama.cpp.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from marft_jax.errors import BadInput
from marft_jax.formats.foreign import readable
from marft_jax.models.decoder_config import DecoderConfig, LayerConfig
from marft_jax.models.names import source_name, unread_names
from marft_jax.models.ops import blocks
from marft_jax.models.parts.delta_net import DeltaNetConfig

ROPE_FREQS = "rope_freqs.weight"
_MOST_VALUES, _MOST_BYTES = 2_500_000, 64 << 20  # of a header; Gemma 4's has 2.1 million
_CHUNK_BYTES = 1 << 16  # stays in the L2 cache


class GGUF(NamedTuple):
    """An open file.

    Attributes:
        metadata: every key and value; arrays are lists.
        tensors: mapped from the file; ``shape`` begins with the innermost dimension.
        header_bytes: where the header ends.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, ReaderTensor]
    header_bytes: int

    @property
    def architecture(self) -> Any:
        return self.metadata.get("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a key that begins with the architecture."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


class _Reader(GGUFReader):
    """Reads no header that is larger than any model's, and nothing past the end of the file.

    The ``_get`` of the package makes a view of a map for each value, which takes three times as
    long, and silently returns less where the file ends.
    """

    data_offset = 0  # until the header is read
    _values = 0

    def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        offset, count = int(offset), int(count)
        end, size = offset + count * np.dtype(dtype).itemsize, len(self.data)
        if end > size:
            raise EOFError(f"ends at byte {size}, before its header or its tensors do")
        self._values += 1
        if not self.data_offset and (self._values > _MOST_VALUES or end > _MOST_BYTES):
            raise ValueError("has a header that is larger than that of any model")
        return np.frombuffer(self.data, dtype, count, offset)


def open_gguf(path: Path) -> GGUF:
    """Reads the header and maps the file.

    Raises:
        BadInput: it is no GGUF file, is cut short, is one part of several, or holds a tensor of a
            type that the ``gguf`` package does not know.
    """
    with readable(path, "GGUF file"):
        reader = _Reader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        if metadata.get("split.count", 0) > 1:
            raise BadInput(f"{path}: one part of several; join them with gguf-split --merge")
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        return GGUF(path, metadata, tensors, int(reader.data_offset))


def shape_of(tensor: ReaderTensor) -> tuple[int, ...]:
    """Outermost dimension first."""
    return tuple(reversed(tensor.shape.tolist()))


def read(
    file: GGUF,
    config: DecoderConfig,
    shapes: Mapping[str, tuple[int, ...]],
    quantize: str = "none",
) -> Iterator[tuple[str, Any]]:
    """Yields (our path, array) for every tensor of the model, in the order of the file.

    Block formats are unpacked to float32, other types stay as they are stored.

    Args:
        shapes: our paths and the shapes that the decoder expects.
        quantize: where this is ``int4``, matrices of layers in Q4_0 stay packed.

    Raises:
        BadInput: a tensor is missing, unexpected, misshapen or of a type that cannot be unpacked.
    """
    wanted: dict[str, list[str]] = {}  # several: of experts
    for path in shapes:
        name = source_name(config, path, "gguf")
        joined = re.sub("ffn_(gate|up)_exps", "ffn_gate_up_exps", name)
        wanted.setdefault(joined if joined in file.tensors else name, []).append(path)
    if missing := sorted(set(wanted) - set(file.tensors)):
        raise BadInput(f"{file.path}: {len(missing)} tensors are missing: {', '.join(missing[:3])}")
    later = tuple(f"blk.{i}." for i in range(config.n_layers, file.get("block_count", 0)))
    extra = set(file.tensors) - set(wanted) - {ROPE_FREQS} - unread_names(config, "gguf")
    if extra := sorted(name for name in extra if not name.startswith(later)):
        raise BadInput(f"{file.path}: unexpected tensor {extra[0]!r}")
    arranged = _ARRANGED.get(file.architecture, lambda layer, name, x: x)
    for name, tensor in file.tensors.items():
        [path, *_] = paths = wanted.get(name, [""])
        if path.count("/") > 4:
            yield from _experts(file, name, paths, shapes)
        elif path:
            _check_shape(file, name, shapes[path])
            in_layer = path.startswith("layers/")
            layer = config.layers[int(path.split("/")[1])] if in_layer else None
            matrix = in_layer and path.endswith("/kernel")
            stays = matrix and (tensor.tensor_type.name, quantize) == ("Q4_0", "int4")
            array = _q4_0(tensor) if stays else unpack(file, name).reshape(shapes[path])
            yield path, jax.tree.map(functools.partial(arranged, layer, path), array)


def _check_shape(file: GGUF, name: str, expected: tuple[int, ...]) -> None:
    got = shape_of(file.tensors[name])
    if got not in (expected, tuple(n for n in expected if n > 1)):
        raise BadInput(f"{file.path}: tensor {name!r}: expected shape {expected}, got {got}")


def _experts(
    file: GGUF, name: str, paths: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (our path, array) of a tensor of all experts, expert by expert; the rows of an
    expert's pieces follow each other. Of our paths those of the first piece come first."""
    experts = len({path.split("/")[4] for path in paths})
    (rows, *others), pieces = shapes[paths[0]], len(paths) // experts
    _check_shape(file, name, (experts, pieces * rows, *others))
    for e in range(experts):
        yield from zip(paths[e::experts], np.split(unpack(file, name, e), pieces), strict=True)


def _rotate_halves(layer: LayerConfig | None, path: str, rows: np.ndarray) -> np.ndarray:
    """Llama's GGUF rows pair channels (2i, 2i + 1); the decoder pairs (i, i + C/2)."""
    matrix = layer.matrices().get(path.split("/")[-2]) if layer else None
    if matrix is None or not matrix.rotated_heads:
        return rows
    split = rows.reshape(matrix.rotated_heads, -1, 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def _less_one(layer: LayerConfig | None, path: str, x: np.ndarray) -> np.ndarray:
    """Files hold the factors of norms, the decoder holds them less 1."""
    return x.astype(np.float32) - 1 if path.endswith("norm/scale") else x


def _qwen3_5(layer: LayerConfig | None, path: str, x: np.ndarray) -> np.ndarray:
    """Norms are as in files of Gemma, but for those of delta nets. Of a delta net a file holds
    -exp(log_rate), and value heads in another order: the first of each key head, then the second
    of each; the decoder has those of the first key head first."""
    if layer is None or "/mixer/" not in path or not isinstance(layer.mixer, DeltaNetConfig):
        return _less_one(layer, path, x)
    mixer, module = layer.mixer, path.split("/")[3]
    if module == "norm":
        return x
    x = np.log(-x) if module == "log_rate" else x.T if module == "out_proj" else x
    before, values = np.split(x, [sum(mixer.widths[:2]) if module in _QKV else 0])
    heads = values.reshape(-1, mixer.n_key_heads, len(values) // mixer.n_value_heads, *x.shape[1:])
    x = np.concatenate([before, heads.swapaxes(0, 1).reshape(values.shape)])
    return x.T if module == "out_proj" else x


_QKV = ("in_proj_qkv", "filter")
_ARRANGED: Mapping[str, Callable[[LayerConfig | None, str, np.ndarray], np.ndarray]] = {
    **dict.fromkeys(("llama", "smollm3", "granite"), _rotate_halves),
    **dict.fromkeys(("gemma2", "gemma3"), _less_one),
    **dict.fromkeys(("qwen35", "qwen35moe"), _qwen3_5),
}
"""Where llama.cpp stores tensors in another way: (layer if any, our path, tensor) to our tensor."""


def _q4_0(tensor: ReaderTensor) -> Any:
    """A tensor of Q4_0 as it is: of each block of 32 values the scale, then the values; value i and
    value i + 16 share a byte, and 8 stands for 0."""
    from qwix import QArray

    qarray: Any = QArray  # of arrays of the host
    rows, width = shape_of(tensor)
    raw = tensor.data.reshape(rows, width // blocks.BLOCK, -1)
    scales, bits = raw[..., :2].copy().view(np.float16)[..., 0], raw[..., 2:]
    halves = np.concatenate([bits & 15, bits >> 4], axis=-1).astype(np.int8) - 8
    return qarray(halves.astype(ml_dtypes.int4).reshape(rows, width), scales)


def unpack(file: GGUF, name: str, at: int | None = None) -> np.ndarray:
    """A tensor's values, or those of its element ``at``, in chunks on all cores; NumPy releases
    the interpreter's lock."""
    tensor = file.tensors[name]
    kind, shape, data = tensor.tensor_type, shape_of(tensor), tensor.data
    if at is not None:
        shape, data = shape[1:], data[at]
    if kind.name in ("F32", "F16"):
        return data
    if kind.name == "BF16":
        return data.view(ml_dtypes.bfloat16).reshape(shape)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = data.reshape(-1, block_bytes)
    values = np.empty((len(blocks), block), np.float32)
    step = max(1, _CHUNK_BYTES // block_bytes)

    def unpack_chunk(start: int) -> None:
        row = blocks[start : start + step].reshape(1, -1)  # gguf goes by 16 rows: of one, at once
        values[start : start + step] = dequantize(row, kind).reshape(-1, block)

    with readable(f"{file.path}: tensor {name!r}", f"tensor of type {kind.name}"):
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(unpack_chunk, range(0, len(blocks), step)))
    return values.reshape(shape)
