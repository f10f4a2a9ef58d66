"""Weights and configuration out of a GGUF file, the format of llama.cpp.

The header is parsed here, because the ``gguf`` package takes seconds for the vocabulary of a small
model; block formats are unpacked by ``gguf.quants``.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from marft_jax.errors import BadInput
from marft_jax.formats.foreign import readable
from marft_jax.models.decoder import DecoderConfig
from marft_jax.models.families import (
    FAMILIES,
    SOFT_CAPS,
    Family,
    checked,
    paths_by_name,
    refuse,
    with_windows,
)
from marft_jax.models.ops import packed
from marft_jax.models.rope import RopeScaling
from marft_jax.parallel.ladder import round_up

ARCHITECTURES = {
    "llama": FAMILIES["LlamaForCausalLM"],
    "qwen2": FAMILIES["Qwen2ForCausalLM"],
    "qwen3": FAMILIES["Qwen3ForCausalLM"],
    "gemma3": FAMILIES["Gemma3ForCausalLM"],
}
_WINDOWED = ("gemma3",)  # those whose window llama.cpp reads

_Get = Callable[..., Any]
_ROPE_FREQS = "rope_freqs.weight"
_SCALARS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DIMENSIONS = 4  # as many as ggml has
_DIRECT = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
# A chunk stays in the L2 cache: SmolLM2-135M unpacks in 1.1 s on 2 cores, in 2.4 s row by row.
_CHUNK_BYTES = 1 << 16


class Tensor(NamedTuple):
    """A tensor's shape, outermost dimension first, and the place of its bytes in the file."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    size: int


class GGUF(NamedTuple):
    """An open file.

    Attributes:
        metadata: every key and value; arrays are lists.
        data: the mapped bytes, ``uint8``.
        header_bytes: where the header ends.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    data: np.ndarray
    header_bytes: int


class _Cursor:
    """Reads little-endian values one after the other; ``EOFError`` past the end."""

    def __init__(self, data: np.ndarray):
        self.view, self.at = data.data, 0

    def take(self, size: int) -> memoryview:
        if self.at + size > len(self.view):
            raise EOFError(f"ends at byte {len(self.view)}, inside its header")
        self.at += size
        return self.view[self.at - size : self.at]

    def unpack(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return str(self.take(self.unpack("Q")), "utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"metadata of unknown type {kind}")
        of, count = self.unpack("I"), self.unpack("Q")
        if of in _SCALARS:
            code = f"<{count}{_SCALARS[of]}"
            return list(struct.unpack(code, self.take(struct.calcsize(code))))
        return [self.value(of) for _ in range(count)]


def open_gguf(path: Path) -> GGUF:
    """Parses the header and maps the file.

    Raises:
        BadInput: it is no GGUF file, is cut short, is one part of several, or holds a tensor of a
            type that the ``gguf`` package does not know.
    """
    with readable(path, "GGUF file"):
        data = np.memmap(path, np.uint8, "r")
        cursor = _Cursor(data)
        if bytes(cursor.take(4)) != b"GGUF":
            raise ValueError("does not begin with 'GGUF'")
        if (version := cursor.unpack("I")) not in (2, 3):
            raise ValueError(f"is of version {version}; expected 2 or 3, little-endian")
        tensor_count, metadata_count = cursor.unpack("Q"), cursor.unpack("Q")
        metadata = {}
        for _ in range(metadata_count):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.unpack("I"))
        entries = [_read_entry(cursor) for _ in range(tensor_count)]
        alignment = int(metadata.get("general.alignment", 32))
        base = round_up(cursor.at, alignment)
        tensors = {name: tensor._replace(start=base + tensor.start) for name, tensor in entries}
        for name, tensor in tensors.items():
            if tensor.start + tensor.size > len(data):
                raise EOFError(f"ends at byte {len(data)}, before the end of tensor {name!r}")
        if metadata.get("split.count", 0) > 1:
            raise BadInput(
                f"{path}: one part of several; join them with llama.cpp's gguf-split --merge"
            )
    return GGUF(path, metadata, tensors, data, base)


def _read_entry(cursor: _Cursor) -> tuple[str, Tensor]:
    name = cursor.string()
    if (dimensions := cursor.unpack("I")) > _DIMENSIONS:
        raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(cursor.unpack("Q") for _ in range(dimensions))[::-1]
    kind = GGMLQuantizationType(cursor.unpack("I"))
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape and shape[-1] % block:
        raise ValueError(f"tensor {name!r} has rows of {shape[-1]}, not a multiple of {block}")
    return name, Tensor(shape, kind, cursor.unpack("Q"), math.prod(shape) // block * block_bytes)


def read_config(file: GGUF) -> DecoderConfig:
    """The decoder that the file's metadata and tensors describe.

    Raises:
        BadInput: an architecture or a setting that the decoder does not have, by name.
    """
    with readable(file.path, "GGUF file"):
        return _read_config(file)


def _read_config(file: GGUF) -> DecoderConfig:
    arch, source, tensors = file.metadata.get("general.architecture"), str(file.path), file.tensors
    if arch not in ARCHITECTURES:
        raise BadInput(
            f"{source}: GGUF architecture {arch!r} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    if (embedding := tensors.get("token_embd.weight")) is None:
        raise BadInput(f"{source}: tensor 'token_embd.weight' is missing")

    def get(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{arch}.{key}", default)

    family = ARCHITECTURES[arch]
    config = checked(
        lambda key: embedding.shape[0] if key == "vocab_size" else get(key),
        "gguf",
        source,
        norm_eps=float(get("attention.layer_norm_rms_epsilon", 1e-5)),
        rope_theta=float(get("rope.freq_base", family.defaults.get("rope_theta", 1e4))),
        local_rope_theta=get("rope.freq_base_swa", family.defaults.get("rope_local_base_freq")),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        **family.traits,
    )
    _refuse_unsupported(arch, get, config.head_dim, source)
    config = dataclasses.replace(config, rope_scaling=_rope_scaling(file, get, config))
    return _with_windows(config, family, get, source) if arch in _WINDOWED else config


def _with_windows(config: DecoderConfig, family: Family, get: _Get, source: str) -> DecoderConfig:
    """With windows; a pattern is a number or a list by layers. Only Gemma's 27B, of 62 layers, does
    not divide scores by √head_dim, and no field says so."""
    pattern = get("attention.sliding_window_pattern", 6)
    settings = {
        "sliding_window": get("attention.sliding_window", 0),
        "sliding_window_pattern": pattern,
    }
    if isinstance(pattern, list):
        kinds = {True: "sliding_attention", False: "full_attention"}
        settings["layer_types"] = [kinds[bool(slides)] for slides in pattern]
    if config.n_layers == 62:
        scalar = config.d_model // config.n_heads
        config = dataclasses.replace(config, query_pre_attn_scalar=scalar)
    return with_windows(config, family, settings, source)


def _refuse_unsupported(arch: str, get: _Get, head_dim: int, source: str) -> None:
    window = get("attention.sliding_window")
    narrow = window and arch not in _WINDOWED and window < get("context_length", 0)
    scaling = get("rope.scaling.type", "none")
    refused = {
        "expert_count": (get("expert_count", 0), "0 (no mixture of experts)"),
        "attention.sliding_window": (narrow, "none, or at least the context length"),
        "attention.value_length": (get("attention.value_length", head_dim) != head_dim, head_dim),
        "rope.dimension_count": (get("rope.dimension_count", head_dim) != head_dim, head_dim),
        "rope.scaling.type": (
            scaling not in ("none", "linear"),
            "none, linear, or Llama 3's rope_freqs tensor",
        ),
        **{key: (get(key), "none") for key in SOFT_CAPS},
    }
    cases = {f"{arch}.{key}": case for key, case in refused.items()}
    refuse(arch, cases, lambda key: get(key.partition(".")[2]), source)


def _rope_scaling(file: GGUF, get: _Get, config: DecoderConfig) -> RopeScaling | None:
    """Linear scaling is metadata; Llama 3's is a tensor of divisors, mapped back to its formula."""
    if _ROPE_FREQS in file.tensors:
        return _llama3_scaling(_unpack(file, _ROPE_FREQS).astype(np.float64), config, file.path)
    factor = float(get("rope.scaling.factor", get("rope.scale_linear", 1.0)))
    linear = get("rope.scaling.type", "linear") == "linear" and factor not in (0.0, 1.0)
    return RopeScaling("linear", factor) if linear else None


def _llama3_scaling(divisors: np.ndarray, config: DecoderConfig, path: Path) -> RopeScaling | None:
    """The settings whose divisors these are: 1 for fast frequencies, ``factor`` for slow ones."""
    half = config.head_dim // 2
    if divisors.shape != (half,):
        raise BadInput(f"{path}: tensor {_ROPE_FREQS!r}: expected ({half},), got {divisors.shape}")
    if np.allclose(divisors, 1.0):
        return None
    inverse = config.rope_theta ** (-np.arange(half) / half)
    for original in (8192, *(2**n for n in range(4, 21))):
        scaling = RopeScaling("llama3", float(divisors.max()), 1.0, 4.0, original)
        turns = original * inverse / (2 * np.pi)
        keep = np.clip((turns - 1.0) / 3.0, 0.0, 1.0)
        if np.allclose(1 / (keep + (1 - keep) / scaling.factor), divisors, rtol=1e-4):
            return scaling
    raise BadInput(f"{path}: tensor {_ROPE_FREQS!r} does not follow Llama 3's formula; unsupported")


def read(
    file: GGUF,
    config: DecoderConfig,
    shapes: Mapping[str, tuple[int, ...]],
    quantize: str = "none",
) -> Iterator[tuple[str, Any]]:
    """Yields (our path, array) for every tensor of the model, in the order of the file.

    Block formats come as float32, the others as they are stored.

    Args:
        shapes: our paths and the shapes that the decoder expects.
        quantize: matrices of blocks in Q4_0 stay packed where this is ``int4``.

    Raises:
        BadInput: a tensor is missing, unexpected, misshapen or of a type that cannot be unpacked.
    """
    wanted = paths_by_name(shapes, "gguf")
    if missing := sorted(set(wanted) - set(file.tensors)):
        raise BadInput(f"{file.path}: {len(missing)} tensors are missing: {', '.join(missing[:3])}")
    if extra := sorted(set(file.tensors) - set(wanted) - {_ROPE_FREQS}):
        raise BadInput(f"{file.path}: unexpected tensor {extra[0]!r}")
    heads = {"q": config.n_heads, "k": config.n_kv_heads}
    interleaved = file.metadata["general.architecture"] == "llama"
    for name in file.tensors:
        if name == _ROPE_FREQS:
            continue
        path = wanted[name]
        expected, got = shapes[path], file.tensors[name].shape
        if got != expected:
            raise BadInput(f"{file.path}: tensor {name!r}: expected shape {expected}, got {got}")
        module, leaf = path.split("/")[-2:]
        matrix = path.startswith("layers/") and leaf == "kernel"
        stays = matrix and (file.tensors[name].type.name, quantize) == ("Q4_0", "int4")
        array = _blocks(file, name) if stays else _unpack(file, name)
        if interleaved and module in heads:
            rotate = functools.partial(_rotate_halves, heads=heads[module])
            array = jax.tree.map(rotate, array)
        if config.norm_offset and path.endswith("norm/scale"):
            array = array.astype(np.float32) - 1
        yield path, array


def _rotate_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Llama's GGUF rows pair channels (2i, 2i + 1); the decoder pairs (i, i + C/2)."""
    split = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def _blocks(file: GGUF, name: str) -> Any:
    """A tensor of Q4_0 as it is: of each block of 32 values the scale, then the values; value i and
    value i + 16 share a byte, and 8 stands for 0."""
    from qwix import QArray

    qarray: Any = QArray  # of arrays of the host
    (rows, width), _, start, size = file.tensors[name]
    raw = np.asarray(file.data[start : start + size]).reshape(rows, width // packed.BLOCK, -1)
    scales, bits = raw[..., :2].copy().view(np.float16)[..., 0], raw[..., 2:]
    halves = np.concatenate([bits & 15, bits >> 4], axis=-1).astype(np.int8) - 8
    return qarray(halves.astype(ml_dtypes.int4).reshape(rows, width), scales)


def _unpack(file: GGUF, name: str) -> np.ndarray:
    shape, kind, start, size = file.tensors[name]
    raw = file.data[start : start + size]
    if kind.name in _DIRECT:
        return np.asarray(raw).view(_DIRECT[kind.name]).reshape(shape)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    values = np.empty(math.prod(shape), np.float32)
    blocks = max(1, _CHUNK_BYTES // block_bytes)
    try:
        for i in range(0, size // block_bytes, blocks):
            packed = np.asarray(raw[i * block_bytes : (i + blocks) * block_bytes])
            values[i * block : (i + blocks) * block] = dequantize(packed[None], kind)[0]
    except NotImplementedError as error:
        raise BadInput(
            f"{file.path}: tensor {name!r} is of type {kind.name}, which is not supported; "
            "supported: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K and what gguf can unpack"
        ) from error
    return values.reshape(shape)
