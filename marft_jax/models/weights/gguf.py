"""Weights and configuration out of a GGUF file, the format of llama.cpp.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
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
from marft_jax.models import config_json, families
from marft_jax.models.decoder import DecoderConfig
from marft_jax.models.names import source_name
from marft_jax.models.ops import blocks
from marft_jax.models.parts.short_conv import ShortConvConfig
from marft_jax.models.rope import RopeScaling

ARCHITECTURES = {
    "llama": families.FAMILIES["LlamaForCausalLM"],
    "qwen2": families.FAMILIES["Qwen2ForCausalLM"],
    "qwen3": families.FAMILIES["Qwen3ForCausalLM"],
    "qwen3moe": families.FAMILIES["Qwen3MoeForCausalLM"],
    "gemma2": families.FAMILIES["Gemma2ForCausalLM"],
    "gemma3": families.FAMILIES["Gemma3ForCausalLM"],
    "smollm3": families.FAMILIES["SmolLM3ForCausalLM"],
    "granite": families.FAMILIES["GraniteForCausalLM"],
    "olmo2": families.FAMILIES["Olmo2ForCausalLM"],
    "lfm2": families.FAMILIES["Lfm2ForCausalLM"],
}
_WINDOWED = {"gemma2": 2, "gemma3": 6}  # whose window llama.cpp reads, and which layer is full
_INTERLEAVED = ("llama", "smollm3", "granite")

_Get = Callable[..., Any]
_ROPE_FREQS = "rope_freqs.weight"
_MOST_VALUES, _MOST_BYTES = 2_000_000, 64 << 20  # of a header; Gemma 3's has 1.05 million in 8 MB
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


class _Reader(GGUFReader):
    """Reads no header that is larger than any model's, and nothing past the end of the file.

    The package's own ``_get`` makes a view of a map for each value, which takes three times as
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
            raise BadInput(
                f"{path}: one part of several; join them with llama.cpp's gguf-split --merge"
            )
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        return GGUF(path, metadata, tensors, int(reader.data_offset))


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    """Outermost dimension first."""
    return tuple(reversed(tensor.shape.tolist()))


def read_config(file: GGUF) -> DecoderConfig:
    """Reads the decoder that the file's metadata and tensors describe.

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

    def size(key: str) -> Any:
        """A size, the largest where there is one for each layer."""
        value = _shape(embedding)[0] if key == "vocab_size" else get(key)
        return max(value) if isinstance(value, list) else value

    family = ARCHITECTURES[arch]
    sizes = config_json.sizes(size, "gguf", source)
    _refuse_unsupported(arch, get, sizes["head_dim"], source)
    theta = float(get("rope.freq_base", family.defaults.get("rope_theta", 1e4)))
    local = get("rope.freq_base_swa", family.defaults.get("rope_local_base_freq"))
    # only the 27B of Gemma 2 and 3 does not divide scores by √head_dim; no field says so
    other_root = (arch, sizes["n_layers"]) in (("gemma2", 46), ("gemma3", 62))
    settings = sizes | {
        "norm_eps": float(get("attention.layer_norm_rms_epsilon", 1e-5)),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, get, sizes["head_dim"], theta),
        "local_rope_theta": local,
        "query_pre_attn_scalar": sizes["d_model"] // sizes["n_heads"] if other_root else None,
        "tie_embeddings": "output.weight" not in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        "o_bias": "blk.0.attn_output.bias" in tensors,
    }
    if arch in _WINDOWED:
        pattern = get("attention.sliding_window_pattern", _WINDOWED[arch])
        settings |= _windows(sizes, family, pattern, get, local, source)
    return config_json.built(family, source, **settings | _MORE.get(arch, _nothing)(get, sizes))


def _nothing(get: _Get, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {}


def _gemma2(get: _Get, sizes: Mapping[str, int]) -> dict[str, Any]:
    defaults = families.FAMILIES["Gemma2ForCausalLM"].defaults
    return {our: float(get(key, defaults[key])) for key, our in families.SOFT_CAPS.items()}


def _smollm3(get: _Get, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {"rotated": [(i + 1) % 4 != 0 for i in range(sizes["n_layers"])]}  # as llama.cpp


def _granite(get: _Get, sizes: Mapping[str, int]) -> dict[str, Any]:
    names = "attention.scale", "embedding_scale", "residual_scale", "logit_scale"
    by_default = sizes["head_dim"] ** -0.5, 1, 1, 1
    found = (get(name) or own for name, own in zip(names, by_default, strict=True))
    return families.multipliers(*map(float, found))


def _qwen3_experts(get: _Get, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "n_experts": get("expert_count"),
        "n_chosen": get("expert_used_count"),
        "d_expert": get("expert_feed_forward_length"),
        "normalised": True,  # as llama.cpp
        "is_dense": [False] * sizes["n_layers"],
    }


def _lfm2(get: _Get, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "mixer": ShortConvConfig(sizes["d_model"], int(get("shortconv.l_cache"))),
        "is_recurrent": [heads == 0 for heads in get("attention.head_count_kv")],
    }


_MORE = {
    "qwen3moe": _qwen3_experts,
    "gemma2": _gemma2,
    "smollm3": _smollm3,
    "granite": _granite,
    "lfm2": _lfm2,
}


def _windows(
    sizes: Mapping[str, int],
    family: families.Family,
    pattern: Any,
    get: _Get,
    local_theta: float | None,
    source: str,
) -> dict[str, Any]:
    """Reads the window; its pattern is a number or a list by layers."""
    settings = {
        "sliding_window": get("attention.sliding_window", 0),
        "sliding_window_pattern": pattern,
    }
    if isinstance(pattern, list):
        kinds = {True: "sliding_attention", False: "full_attention"}
        settings["layer_types"] = [kinds[bool(slides)] for slides in pattern]
    return config_json.windows(family, settings, sizes, local_theta, source)


def _refuse_unsupported(arch: str, get: _Get, head_dim: int, source: str) -> None:
    window = get("attention.sliding_window")
    narrow = window and arch not in _WINDOWED and window < get("context_length", 0)
    scaling = get("rope.scaling.type", "none")
    refused = {
        "expert_count": (
            ARCHITECTURES[arch].build is families.dense and get("expert_count", 0),
            "0 (no mixture of experts)",
        ),
        "attention.sliding_window": (narrow, "none, or at least the context length"),
        "attention.value_length": (get("attention.value_length", head_dim) != head_dim, head_dim),
        "rope.dimension_count": (get("rope.dimension_count", head_dim) != head_dim, head_dim),
        "rope.scaling.type": (
            scaling not in ("none", "linear"),
            "none, linear, or Llama 3's rope_freqs tensor",
        ),
        **{key: (arch != "gemma2" and get(key), "none") for key in families.SOFT_CAPS},
    }
    cases = {f"{arch}.{key}": case for key, case in refused.items()}
    config_json.refuse(arch, cases, lambda key: get(key.partition(".")[2]), source)


def _rope_scaling(file: GGUF, get: _Get, head_dim: int, theta: float) -> RopeScaling | None:
    """Reads linear scaling from metadata, Llama 3's from a tensor of divisors."""
    factor = float(get("rope.scaling.factor", get("rope.scale_linear", 1.0)))
    linear = get("rope.scaling.type", "linear") == "linear" and factor not in (0.0, 1.0)
    if _ROPE_FREQS in file.tensors:
        if linear:
            both = f"tensor {_ROPE_FREQS!r} beside rope.scaling.factor {factor:g}"
            raise BadInput(f"{file.path}: {both} is not supported; supported: one of them")
        divisors = _unpack(file, _ROPE_FREQS).astype(np.float64)
        return _llama3_scaling(divisors, head_dim // 2, theta, file.path)
    return RopeScaling("linear", factor) if linear else None


def _llama3_scaling(
    divisors: np.ndarray, half: int, theta: float, path: Path
) -> RopeScaling | None:
    """Finds the settings of these divisors: 1 for fast frequencies, ``factor`` for slow ones."""
    if divisors.shape != (half,):
        raise BadInput(f"{path}: tensor {_ROPE_FREQS!r}: expected ({half},), got {divisors.shape}")
    if np.allclose(divisors, 1.0):
        return None
    inverse = theta ** (-np.arange(half) / half)
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

    Block formats are unpacked to float32, other types stay as they are stored.

    Args:
        shapes: our paths and the shapes that the decoder expects.
        quantize: where this is ``int4``, matrices of layers in Q4_0 stay packed.

    Raises:
        BadInput: a tensor is missing, unexpected, misshapen or of a type that cannot be unpacked.
    """
    wanted: dict[str, list[str]] = {}  # several: of an expert each
    for path in shapes:
        wanted.setdefault(source_name(config, path, "gguf"), []).append(path)
    if missing := sorted(set(wanted) - set(file.tensors)):
        raise BadInput(f"{file.path}: {len(missing)} tensors are missing: {', '.join(missing[:3])}")
    if extra := sorted(set(file.tensors) - set(wanted) - {_ROPE_FREQS}):
        raise BadInput(f"{file.path}: unexpected tensor {extra[0]!r}")
    rotated = {name: x.rotated_heads for name, (x, *_) in config.matrices().items()}
    interleaved = file.metadata["general.architecture"] in _INTERLEAVED
    for name in file.tensors:
        if name == _ROPE_FREQS:
            continue
        [path, *others] = wanted[name]
        expected, got = shapes[path], _shape(file.tensors[name])
        expected = (1 + len(others), *expected) if others else expected
        if got not in (expected, tuple(n for n in expected if n > 1)):
            raise BadInput(f"{file.path}: tensor {name!r}: expected shape {expected}, got {got}")
        if others:
            for e, path in enumerate(wanted[name]):
                yield path, _unpack(file, name, e)
            continue
        module, leaf = path.split("/")[-2:]
        matrix = path.startswith("layers/") and leaf == "kernel"
        stays = matrix and (file.tensors[name].tensor_type.name, quantize) == ("Q4_0", "int4")
        array = _q4_0(file.tensors[name]) if stays else _unpack(file, name).reshape(expected)
        if interleaved and (heads := rotated.get(module)):
            rotate = functools.partial(_rotate_halves, heads=heads)
            array = jax.tree.map(rotate, array)
        if config.norm_offset and path.endswith("norm/scale"):
            array = array.astype(np.float32) - 1
        yield path, array


def _rotate_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Llama's GGUF rows pair channels (2i, 2i + 1); the decoder pairs (i, i + C/2)."""
    split = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def _q4_0(tensor: ReaderTensor) -> Any:
    """A tensor of Q4_0 as it is: of each block of 32 values the scale, then the values; value i and
    value i + 16 share a byte, and 8 stands for 0."""
    from qwix import QArray

    qarray: Any = QArray  # of arrays of the host
    rows, width = _shape(tensor)
    raw = tensor.data.reshape(rows, width // blocks.BLOCK, -1)
    scales, bits = raw[..., :2].copy().view(np.float16)[..., 0], raw[..., 2:]
    halves = np.concatenate([bits & 15, bits >> 4], axis=-1).astype(np.int8) - 8
    return qarray(halves.astype(ml_dtypes.int4).reshape(rows, width), scales)


def _unpack(file: GGUF, name: str, at: int | None = None) -> np.ndarray:
    """A tensor's values, or those of its element ``at``, in chunks on all cores; NumPy releases
    the interpreter's lock."""
    tensor = file.tensors[name]
    kind, shape, data = tensor.tensor_type, _shape(tensor), tensor.data
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

    def unpack(start: int) -> None:
        row = blocks[start : start + step].reshape(1, -1)  # gguf goes by 16 rows: of one, at once
        values[start : start + step] = dequantize(row, kind).reshape(-1, block)

    with readable(f"{file.path}: tensor {name!r}", f"tensor of type {kind.name}"):
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(unpack, range(0, len(blocks), step)))
    return values.reshape(shape)
