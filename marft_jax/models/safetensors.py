"""Weights out of a directory of safetensors files, one tensor at a time and without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from marft_jax.config import BadInput
from marft_jax.models.families import source_name

Shapes = Mapping[str, tuple[int, ...]]

_FLOATS = ("float32", "float16", "bfloat16")


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model, sorted by name.

    Those of ``model.safetensors.index.json`` where there is one, else ``model.safetensors``, else
    every ``*.safetensors`` in the directory.

    Raises:
        BadInput: there are none, or the index names a file that is missing.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise BadInput(f"{index}: not a safetensors index ({error!r})") from error
        files = [directory / name for name in names]
    elif (directory / "model.safetensors").is_file():
        files = [directory / "model.safetensors"]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        other = sorted(p.name for p in directory.glob("*") if p.suffix in (".bin", ".pth", ".gguf"))
        hint = f"; there is {other[0]}: " if other else ""
        hint += "name the .gguf file itself" if hint.endswith(".gguf: ") else ""
        hint += "convert it with transformers' save_pretrained" if hint.endswith(": ") else ""
        raise BadInput(f"{directory}: expected *.safetensors weights, found none{hint}")
    for file in files:
        if not file.is_file():
            raise BadInput(f"{directory}: {index.name} names {file.name}, which is missing")
    return files


def read(directory: Path, shapes: Shapes) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (our path, array) for every tensor of the model, in the order of the files.

    Only the current tensor is in memory, in the type it is stored in.

    Args:
        directory: of the model.
        shapes: our paths and the shapes that the decoder expects.

    Raises:
        BadInput: a file is not intact, or a tensor is missing, unexpected, of another shape or not
            of a floating-point type; the tensor is named.
    """
    wanted = {source_name(path, "hf"): path for path in shapes}
    for file in weight_files(directory):
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():
                    if _ignorable(name, shapes):
                        continue
                    if name not in wanted:
                        raise BadInput(f"{file}: unexpected or repeated tensor {name!r}")
                    path = wanted.pop(name)
                    yield path, _checked(tensors.get_tensor(name), path, name, shapes, file)
        except (SafetensorError, OSError, TypeError, AttributeError) as error:
            raise BadInput(f"{file}: not a readable safetensors file ({error})") from error
    if wanted:
        missing = ", ".join(sorted(wanted)[:3]) + (", ..." if len(wanted) > 3 else "")
        raise BadInput(f"{directory}: {len(wanted)} tensors are missing: {missing}")


def _ignorable(name: str, shapes: Shapes) -> bool:
    """Buffers of old checkpoints, and the copy of tied embeddings."""
    tied = "lm_head/kernel" not in shapes
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def _checked(array: np.ndarray, path: str, name: str, shapes: Shapes, file: Path) -> np.ndarray:
    expected = shapes[path]
    if array.shape != expected:
        raise BadInput(f"{file}: tensor {name!r}: expected shape {expected}, got {array.shape}")
    if array.dtype.name not in _FLOATS:
        raise BadInput(
            f"{file}: tensor {name!r}: expected {', '.join(_FLOATS)}, got {array.dtype.name}"
        )
    return array
