"""Weights out of a directory of safetensors files, one tensor at a time and without torch."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors import safe_open

from marft_jax.errors import BadInput
from marft_jax.formats.foreign import read_settings, readable
from marft_jax.models.decoder import DecoderConfig
from marft_jax.models.names import unread_names
from marft_jax.models.weights.layout import MXFP4, ExpertRows, Layout, expert_rows, layouts

LOGGER = logging.getLogger("marft_jax")

Shapes = Mapping[str, tuple[int, ...]]

_FLOATS = ("F32", "F16", "BF16")
# of a model of text and images: the parts for images, those that guess several tokens at once, and
# what precedes the names of those for text
_IMAGES = re.compile(
    r"(model\.)?(vision_tower|audio_tower|multi_modal_projector|visual|embed_vision|embed_audio|"
    r"vision_embedder)\.|mtp\."
)
_TEXT = re.compile(
    r"^(language_model\.model|model\.language_model)\.|^language_model\.(?=lm_head\.)"
)
_EMBEDDINGS, _VOCABULARY = (f"{name}.weight" for name in ("model.embed_tokens", "lm_head"))


def weight_files(directory: Path) -> list[Path]:
    """Safetensors files of a model, sorted by name.

    Those of ``model.safetensors.index.json`` where there is one, else ``model.safetensors``, else
    every ``*.safetensors`` in the directory.

    Raises:
        BadInput: there are none, or the index names a file that is missing.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        with readable(index, "safetensors index"):
            names = set(read_settings(index)["weight_map"].values())
            files = [directory / name for name in sorted(names)]
    elif (directory / "model.safetensors").is_file():
        files = [directory / "model.safetensors"]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise BadInput(
            f"{directory}: expected *.safetensors weights, found none; convert others with "
            "transformers' save_pretrained, or name a .gguf file itself"
        )
    for file in files:
        if not file.is_file():
            raise BadInput(f"{directory}: {index.name} names {file.name}, which is missing")
    return files


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
    wanted: dict[str, Layout | ExpertRows] = {**layouts(config, shapes)}
    left_out = 0
    of_experts = expert_rows(config, shapes)
    passed = {f"{name}_scales" for name in wanted}  # MXFP4's are read with their blocks
    passed |= unread_names(config)
    tied = set[int]() if config.tie_embeddings else None
    for file in weight_files(directory):
        with readable(file, "safetensors file"), safe_open(file, framework="numpy") as tensors:
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
                    raise BadInput(f"{file}: unexpected or repeated tensor {name!r}")
                layout, stored = wanted.pop(ours), tensors.get_slice(name)
                if name.endswith("_blocks"):
                    stored = MXFP4(stored, _scales(directory, name))
                shape, kind = tuple(stored.get_shape()), stored.get_dtype()
                where = f"{file}: tensor {name!r}: expected"
                if shape != (expected := layout.shape(shapes)):
                    raise BadInput(f"{where} shape {expected}, got {shape}")
                if kind not in _FLOATS:
                    raise BadInput(f"{where} one of {', '.join(_FLOATS)}, got {kind}")
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


def _scales(directory: Path, name: str) -> np.ndarray:
    """Scales of the blocks of this name, in whichever file they are."""
    wanted = f"{name.removesuffix('blocks')}scales"
    for file in weight_files(directory):
        with readable(file, "safetensors file"), safe_open(file, framework="numpy") as tensors:
            if wanted in tensors.keys():
                return tensors.get_tensor(wanted)
    raise BadInput(f"{directory}: tensor {wanted!r} is missing")


def _ours(name: str) -> str:
    """Name of a tensor without what precedes it in a model of text and images."""
    return _TEXT.sub(lambda found: "model." if any(found.groups()) else "", name)
