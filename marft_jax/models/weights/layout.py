"""How tensors of a Hugging Face checkpoint hold ours: one each, or several in one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.models.names import paths_by_name

Shapes = Mapping[str, tuple[int, ...]]

_FUSED = {
    "fused": {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
    "fused_mlp": {
        "shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj"),
        "shared_mlp.output_linear": ("mlp.down_proj",),
    },
}


_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4 = np.concatenate([_FP4, -_FP4])
_FP8 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_FP8_BLOCK = 128


class Stored(NamedTuple):
    """Tensor of a checkpoint, of one of ours or several.

    Attributes:
        paths: of our tensors, in their order there; expert by expert.
        experts: number of experts, in front of the tensor's other axes; 0 for a tensor without.
        alternates: an expert has ``[in, out]``, or ``[out]`` of biases, and the columns of its
            pieces alternate. Else it has ``[out, in]``, and the rows of its pieces follow each
            other.
        names: that our tensors have in a checkpoint in which each expert is by itself.
    """

    paths: Sequence[str]
    experts: int = 0
    alternates: bool = False
    names: Sequence[str] = ()

    @property
    def pieces(self) -> int:
        """Pieces of an expert, or of a tensor without."""
        return len(self.paths) // max(1, self.experts)

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint."""
        piece_shapes = [shapes[path] for path in self.paths[: self.pieces]]
        (_, *others), rows = piece_shapes[0], sum(shape[0] for shape in piece_shapes)
        each = (*others, rows) if self.alternates else (rows, *others)
        return (self.experts, *each) if self.experts else each

    def split(self, stored: Any, shapes: Shapes) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (our path, array), reading one expert at a time; ``stored`` may read from its file
        what is sliced."""
        for first in range(0, len(self.paths), self.pieces):
            e = first // self.pieces
            whole, start = stored[e : e + 1][0] if self.experts else stored, 0
            for i, path in enumerate(self.paths[first : first + self.pieces]):
                end = start + shapes[path][0]
                yield path, whole[..., i :: self.pieces].T if self.alternates else whole[start:end]
                start = end

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """The inverse of ``split``, in the order of memory that a file has."""
        firsts = range(0, len(arrays), self.pieces)
        whole = [self._join(arrays[first : first + self.pieces]) for first in firsts]
        return np.ascontiguousarray(np.stack(whole) if self.experts else whole[0])

    def _join(self, pieces: Sequence[np.ndarray]) -> np.ndarray:
        if not self.alternates:
            return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        columns = np.stack([piece.T for piece in pieces], axis=-1)
        return columns.reshape(*columns.shape[:-2], -1)


class MXFP4(NamedTuple):
    """A tensor ``[experts, in, out]`` in MXFP4: blocks of 32 inputs with a power of 2 for each.

    Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3 and 6.3.

    Attributes:
        blocks: ``uint8 [experts, out, in / 32, 16]``; of a byte the low half comes first.
        scales: ``uint8 [experts, out, in / 32]``, exponents plus 127.
    """

    blocks: Any
    scales: np.ndarray

    def get_shape(self) -> list[int]:
        """Shape once unpacked."""
        *rows, blocks, half = self.blocks.get_shape()
        return [*rows[:-1], 2 * half * blocks, *rows[-1:]]

    def get_dtype(self) -> str:
        """F32 where both tensors have the shapes and types of the format."""
        *shape, half = self.blocks.get_shape()
        kinds = self.blocks.get_dtype(), self.scales.dtype.name
        if kinds == ("U8", "uint8") and half == 16 and tuple(shape) == self.scales.shape:
            return "F32"
        return f"blocks of {kinds[0]} {shape} with scales of {kinds[1]} {self.scales.shape}"

    def __getitem__(self, at: slice) -> np.ndarray:
        blocks, scales = self.blocks[at], self.scales[at]
        values = _FP4[np.stack([blocks & 15, blocks >> 4], axis=-1)].reshape(*scales.shape, -1)
        values = np.ldexp(values, scales.astype(np.int32)[..., None] - 127)
        return values.reshape(*values.shape[:2], -1).swapaxes(1, 2)


class FP8(NamedTuple):
    """A tensor in E4M3, to be multiplied by scales: along each axis there is one scale for all, for
    each index, or for every 128.

    Source: Micikevicius et al. 2022, FP8 Formats for Deep Learning (section 3).

    Attributes:
        bits: ``uint8 [..., out, in]``.
        scales: of as many axes.
    """

    bits: np.ndarray
    scales: np.ndarray

    @staticmethod
    def of(bits: np.ndarray, scales: np.ndarray) -> FP8:
        """Takes a single scale of any shape."""
        return FP8(bits, scales.reshape([1] * bits.ndim) if scales.size == 1 else scales)

    def get_shape(self) -> tuple[int, ...]:
        return self.bits.shape

    def get_dtype(self) -> str:
        """F32 where the scales have a shape of the format."""
        shape = self.scales.shape
        if len(shape) == self.bits.ndim and shape == tuple(at[-1] + 1 for at in self._places()):
            return "F32"
        return f"F8_E4M3 with scales of shape {shape}"

    def _places(self) -> list[np.ndarray]:
        """Places of the scales of each index, along each axis."""
        axes = zip(self.bits.shape, self.scales.shape, strict=True)
        return [np.arange(n) // {1: n, n: 1}.get(scales, _FP8_BLOCK) for n, scales in axes]

    def __getitem__(self, at: slice) -> np.ndarray:
        first, *others = self._places()
        scales = self.scales.astype(np.float32)
        for axis, places in reversed([*enumerate([first[at], *others])]):
            scales = scales.take(places, axis)
        return np.multiply(scales, _FP8[self.bits[at]], out=scales)


def layouts(config: DecoderConfig, paths: Iterable[str]) -> dict[str, Stored]:
    """Every tensor of a checkpoint, by name."""
    names, tensors = paths_by_name(config, paths), dict[str, Stored]()
    if config.files == "rows":
        tensors |= (whole := expert_rows(config, paths))
        single = {name for layout in whole.values() for name in layout.names}
        names = {name: path for name, path in names.items() if name not in single}
    for i, layer in enumerate(config.layers):
        at = f"model.layers.{i}"
        for whole, parts in _FUSED.get(config.files, {}).items():
            pieces = [names.pop(f"{at}.{part}.weight") for part in parts]
            tensors[f"{at}.{whole}.weight"] = Stored(pieces)
        if config.files == "stacked":
            for leaf in ("weight", "bias"):
                pieces = [names.pop(f"{at}.mlp.gate.{leaf}")]
                tensors[f"{at}.mlp.router.{leaf}"] = Stored(pieces)
            n = next(matrix.experts for matrix in layer.matrices().values() if matrix.experts)
            for part in layer.mlp.MATRICES.values():
                each = [piece.format(e) for e in range(n) for piece in part.pieces]
                for ours, theirs in (("weight", ""), ("bias", "_bias")):
                    pieces = [names.pop(f"{at}.{name}.{ours}") for name in each]
                    tensors[f"{at}.{part.parameter}{theirs}"] = Stored(pieces, n, alternates=True)
    return tensors | {name: Stored([path]) for name, path in names.items()}


def expert_rows(config: DecoderConfig, paths: Iterable[str]) -> dict[str, Stored]:
    """Tensors of a checkpoint that has one for all experts of a matrix, by name."""
    by_name, tensors = paths_by_name(config, paths), dict[str, Stored]()
    spelling, whole = dict(config.spelling), config.files in ("plain", "rows")
    for i, layer in enumerate(config.layers if whole else ()):
        for name, matrix in layer.mlp.matrices().items():
            known = layer.mlp.MATRICES[name]
            each = [piece.format(e) for e in range(matrix.experts) for piece in known.pieces]
            if names := [f"model.layers.{i}.{one}.weight" for one in each]:
                expert_paths = [by_name[one] for one in names]
                name = spelling.get(known.parameter, known.parameter)
                tensors[f"model.layers.{i}.{name}"] = Stored(
                    expert_paths, matrix.experts, names=names
                )
    return tensors
