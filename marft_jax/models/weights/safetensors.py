"""Weights out of a directory of safetensors files, one tensor at a time and without torch."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from marft_jax.errors import BadInput
from marft_jax.formats.foreign import read_settings, readable
from marft_jax.models.config_json import READABLE
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.models.names import unread_names
from marft_jax.models.weights.layout import FP8, MXFP4, Stored, expert_rows, layouts

LOGGER = logging.getLogger("marft_jax")

Shapes = Mapping[str, tuple[int, ...]]

_FLOATS = ("F32", "F16", "BF16")
_FP8_SCALES = ("_scale_inv", "_scale")  # by both names they multiply
# of a model of text and images: the parts for images, those that guess several tokens at once, and
# what precedes the names of those for text
_IMAGES = re.compile(
    r"(model\.)?(vision_tower|audio_tower|multi_modal_projector|visual|embed_vision|embed_audio|"
    r"vision_embedder)\.|mtp\."
)
_TEXT = re.compile(
    r"^(language_model\.model|model\.language_model)\.|^language_model\.(?=lm_head\.)"
)
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")
_OTHERS = re.compile("consolidated|adapter_model|optimizer")  # weights, but not of this model
_EMBEDDINGS, _VOCABULARY = (f"{name}.weight" for name in ("model.embed_tokens", "lm_head"))


def weight_files(directory: Path) -> list[Path]:
    """Safetensors files of a model, sorted by name.

    Those of ``model.safetensors.index.json`` where there is one, else ``model.safetensors``, else
    the parts of a set (``model-00001-of-00002.safetensors``), else every ``*.safetensors`` in the
    directory but those of other programs (``consolidated*``, ``adapter_model*``, ...).

    Raises:
        BadInput: there are none, a part of a set is missing, or a file that the index names.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        with readable(index, "safetensors index"):
            names = set(read_settings(index)["weight_map"].values())
            files = [directory / name for name in sorted(names)]
    elif (directory / "model.safetensors").is_file():
        files = [directory / "model.safetensors"]
    else:
        every = sorted(directory.glob("*.safetensors"))
        of_model = [file for file in every if not _OTHERS.match(file.name)] or every
        files = _parts(of_model) or of_model
    if not files:
        raise BadInput(
            f"{directory}: expected *.safetensors weights, found none; convert others with "
            "transformers' save_pretrained, or name a .gguf file itself"
        )
    for file in files:
        if not file.is_file():
            raise BadInput(f"{directory}: {index.name} names {file.name}, which is missing")
    return files


def _parts(files: Sequence[Path]) -> list[Path]:
    """Returns the set of parts among these files that is complete; none where there are no parts.

    Raises:
        BadInput: no set is complete, or several are.
    """
    sets: dict[tuple[str, int], list[Path]] = {}
    for file in files:
        if match := _PART.fullmatch(file.name):
            sets.setdefault((match[1], int(match[2])), []).append(file)
    whole = [parts for (_, count), parts in sets.items() if len(parts) == count]
    if sets and len(whole) != 1:
        counts = (f"{len(parts)} of {n} of {name}" for (name, n), parts in sets.items())
        raise BadInput(
            f"{files[0].parent}: expected all parts of one model, found {', '.join(counts)}; "
            "download the missing files, or take the others away"
        )
    return whole[0] if whole else []


def has_head(directory: Path) -> bool:
    """Tells whether weights there have a vocabulary matrix beside the embeddings.

    Raises:
        BadInput: a file is not intact.
    """
    for file in directory.glob("*.safetensors"):
        with readable(file, "safetensors file"), safe_open(file, framework="numpy") as tensors:
            if _VOCABULARY in map(_ours, tensors.keys()):
                return True
    return False


def read(
    directory: Path, config: DecoderConfig, shapes: Shapes
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (our path, array) for every tensor of the model, in the order of the files.

    Only the current tensor is in memory, in the type it is stored in.

    Args:
        shapes: our paths and the shapes that the decoder expects.

    Raises:
        BadInput: a file is not intact, or a tensor is missing, unexpected, of another shape or not
            of a floating-point type; or two tied ones differ.
    """
    wanted: dict[str, Stored] = {**layouts(config, shapes)}
    left_out = 0
    of_experts = expert_rows(config, shapes)
    passed = unread_names(config, "hf") | _names_of_scales({*wanted, *of_experts})
    tied = set[int]() if config.tie_embeddings else None
    for file in weight_files(directory):
        with readable(file, "safetensors file"), safe_open(file, framework="numpy") as tensors:
            bytes_of = _bytes_of(file)
            for name in tensors.keys():
                ours = _ours(name).removesuffix("_blocks")
                if name.endswith("rotary_emb.inv_freq") or ours in passed:
                    continue  # the former are buffers of old checkpoints
                if _IMAGES.match(name):
                    left_out += 1
                    continue
                if tied is not None and ours in (_EMBEDDINGS, _VOCABULARY):
                    tied.add(hash(tensors.get_tensor(name).tobytes()))
                    if ours == _VOCABULARY:
                        continue
                if ours in of_experts and of_experts[ours].names[0] in wanted:
                    for one in of_experts[ours].names:
                        wanted.pop(one, None)
                    wanted[ours] = of_experts[ours]
                if ours not in wanted:
                    fault = f"{file}: unexpected or repeated tensor {name!r}"
                    raise BadInput(fault + _packed(tensors))
                layout, stored = wanted.pop(ours), _stored(name, tensors, bytes_of, file)
                shape, kind = tuple(stored.get_shape()), stored.get_dtype()
                where = f"{file}: tensor {name!r}: expected"
                if shape != (expected := layout.shape(shapes)):
                    raise BadInput(f"{where} shape {expected}, got {shape}" + _packed(tensors))
                if kind not in _FLOATS:
                    fault = f"{where} one of {', '.join(_FLOATS)}, got {kind}"
                    raise BadInput(fault + _packed(tensors))
                yield from layout.split(stored, shapes)
    if wanted:
        missing = ", ".join(sorted(wanted)[:3]) + (", ..." if len(wanted) > 3 else "")
        raise BadInput(f"{directory}: {len(wanted)} tensors are missing: {missing}")
    if left_out:
        LOGGER.info("%s: left out %d tensors for images or audio", directory, left_out)
    if tied and len(tied) > 1:
        raise BadInput(
            f"{directory}: expected lm_head.weight equal to the embeddings, as config.json says "
            "`tie_word_embeddings: true`, got others; set it to false there to use them"
        )


def _packed(tensors: Any) -> str:
    """Says that weights are packed in a way that is not known, where their types show it."""
    kinds = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}
    packed = sorted(kinds - {*_FLOATS, "F8_E4M3"})
    kinds = f"; its weights are packed ({', '.join(packed)}): expected {READABLE} or GGUF"
    return kinds if packed else ""


def _names_of_scales(names: Iterable[str]) -> set[str]:
    """Names of scales, which are read with their tensors; those of activations are not used."""
    suffixes = "_scales", *_FP8_SCALES
    scales = {f"{name}{suffix}" for name in names for suffix in suffixes}
    return scales | {f"{name.removesuffix('weight')}input_scale" for name in names}


def _stored(name: str, tensors: Any, bytes_of: Callable[[str], np.ndarray], file: Path) -> Any:
    """A tensor of an opened file, to be read by slices, which unpack it where it has scales."""
    stored = tensors.get_slice(name)
    if name.endswith("_blocks"):
        return MXFP4(stored, _scales([f"{name.removesuffix('blocks')}scales"], tensors, file))
    if stored.get_dtype() == "F8_E4M3":
        names = [f"{name}{suffix}" for suffix in _FP8_SCALES]
        return FP8.of(bytes_of(name), _scales(names, tensors, file))
    return stored


def _bytes_of(file: Path) -> Callable[[str], np.ndarray]:
    """Maps the bytes of each tensor of a file that safetensors has opened and checked, as its NumPy
    reader has no fp8. The header is 8 bytes with its length, then JSON."""
    raw: Any = np.memmap(file, np.uint8, "r")
    start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    header = json.loads(raw[8:start].tobytes())

    def tensor(name: str) -> np.ndarray:
        first, end = header[name]["data_offsets"]
        return raw[start + first : start + end].reshape(header[name]["shape"])

    return tensor


def _scales(names: Sequence[str], opened: Any, file: Path) -> np.ndarray:
    """Scales by one of these names, in the opened file or in another."""
    for name in names:
        with contextlib.suppress(SafetensorError):
            return opened.get_tensor(name)
    for other in weight_files(file.parent):
        with readable(other, "safetensors file"), safe_open(other, framework="numpy") as tensors:
            for name in set(names) & set(tensors.keys()):
                return tensors.get_tensor(name)
    raise BadInput(f"{file}: its scales {names[0]!r} are missing")


def _ours(name: str) -> str:
    """Name of a tensor without what precedes it in a model of text and images."""
    return _TEXT.sub(lambda match: "model." if any(match.groups()) else "", name)
